"""The ledger as people read it: a table that fits, totals, and who was lost more than once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepguard.records.checks import BadSamples
from stepguard.report.checks import as_json, render_ledger, suspects

ENTRY = BadSamples(
    step=300,
    incident="a",
    samples=(5,),
    count=1,
    of=8,
    indices=(48211,),
    epoch=0,
    batch=300,
    left_out="sample",
    cause="SG101",
    place="input: batch:x at train.py:88",
)
BATCH = replace(
    ENTRY,
    samples=(),
    count=8,
    indices=tuple(range(40, 48)),
    left_out="step",
    incident="b",
    step=301,
)


def test_table_says_step_batch_row_data_set_cause_and_place() -> None:
    text = render_ledger("runs/a", [ENTRY], 0, 100, 110)
    head, line = text.splitlines()[:2]
    assert head.split() == [
        "step",
        "attempt",
        "batch",
        "rows",
        "data",
        "set",
        "cause",
        "dropped",
        "place",
    ]
    for shown in (
        "300",
        "0:300",
        "5",
        "48211",
        "SG101",
        "the rows",
        "input: batch:x at train.py:88",
    ):
        assert shown in line


def test_totals_count_every_loss_and_every_sample_seen() -> None:
    assert "9 samples lost in 2 steps, of 16 in them; 1.12% of about 800 seen" in render_ledger(
        "runs/a", [ENTRY, BATCH], 0, 100, 110
    )


def test_samples_lost_again_are_counted() -> None:
    again = replace(ENTRY, attempt=2, incident="c")
    assert "more than once: row 48211 2 times" in render_ledger(
        "runs/a", [ENTRY, again, BATCH], 0, 0, 110
    )


def test_whole_batch_lists_a_few_and_how_many_more() -> None:
    assert "all 8  40, 41, 42 and 5 more" in render_ledger("runs/a", [BATCH], 0, 0, 110)


@pytest.mark.parametrize("width", [40, 60, 80, 110])
def test_long_ids_and_places_are_shortened_in_the_middle(width: int) -> None:
    long = replace(
        ENTRY,
        ids=("s3://bucket/" + "x" * 60 + "/0042.png",),
        place="forward: " + "y" * 90 + " at a.py:1",
    )
    lines = render_ledger("runs/a", [long], 0, 0, width).splitlines()
    assert "s3://" in lines[1] and "…" in lines[1] and "0042.png" in lines[1]
    assert width < 110 or (len(lines[1]) <= width and lines[1].endswith("at a.py:1"))


def test_innocent_samples_are_lost_but_no_suspects() -> None:
    innocent = replace(BATCH, innocent=True)
    assert suspects([innocent]) == []
    text = render_ledger("runs/a", [innocent], 0, 0, 110)
    assert "lost with others" in text and "8 samples lost" in text


def test_proven_samples_come_before_those_of_bad_batches() -> None:
    found = suspects([BATCH, ENTRY, replace(BATCH, cause="SG505", indices=(1,))])
    assert (
        found[0].index == 48211
        and found[0].proven
        and not any(suspect.proven for suspect in found[1:])
    )
    assert len(found) == 9


def test_nothing_lost_is_said() -> None:
    assert render_ledger("runs/a", [], 0, 100, 80) == "no samples were lost in runs/a\n"


def test_torn_lines_are_told() -> None:
    assert "2 lines could not be read" in render_ledger("runs/a", [], 2, 0, 80)


def test_many_losses_are_cut_short_and_json_has_all() -> None:
    entries = [replace(ENTRY, step=step, incident=str(step)) for step in range(100)]
    assert "and 60 more; --json lists all" in render_ledger("runs/a", entries, 0, 0, 80)
    assert len(as_json("runs/a", entries, 0, 0)["entries"]) == 100
