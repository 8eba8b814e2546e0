"""Tables for a terminal: preflight, doctor, checkpoints, bad samples, probes, trials."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from stepguard.records.checks import BadSamples, Outcome, Preflight, Problem, Verification
from stepguard.records.codec import from_jsonable, to_jsonable
from stepguard.records.incident import Examination, Section
from stepguard.records.probes import (
    AttentionLook,
    Look,
    ParameterLook,
    TensorLook,
    TrialOutcome,
    WhatIf,
)
from stepguard.report import screen
from stepguard.report.checks import (
    SECTIONS,
    as_json,
    paint_preflight,
    render_examination,
    render_ledger,
    render_results,
    suspects,
    totals,
)
from stepguard.report.probes import look_tables, progress_bar, sentences, show

RESULT = Preflight(
    target="train:build",
    outcomes=(
        Outcome(
            id="precision.effective",
            title="runs as configured",
            status="pass",
            evidence=("bfloat16",),
        ),
        Outcome(
            id="optimizer.eps",
            title="eps survives",
            status="fail",
            evidence=("eps=1e-8 is 0",),
            fix="eps=1e-4",
        ),
        Outcome(
            id="data.range", title="in range", status="warn", evidence=("x: 1 of 9",), fix="look"
        ),
        Outcome(id="norm.eps", title="norms", status="not_applicable", evidence=("no norm layer",)),
        Outcome(id="lr.config", title="lr", status="not_checked", evidence=("give --config FILE",)),
        Outcome(
            id="config.types", title="types", status="not_checked", evidence=("give --config FILE",)
        ),
    ),
    facts=(("AMP enabled", "no"),),
    alignment="contradicted",
    alignment_why=("fp16 asked for, float32 probed",),
)


def render_preflight(result: Preflight, *, width: int = 100, unicode: bool = True) -> str:
    console = screen.paper(width=width, colour=False)
    paint_preflight(console, result, unicode=unicode)
    return screen.text_on(console)


def test_narrow_window_and_plain_stream_get_whole_words() -> None:
    text = render_preflight(RESULT, width=60, unicode=False)
    assert text.isascii()
    text = render_preflight(RESULT, width=100)
    assert " FAIL optimizer.eps           expected: eps survives\n" in text
    assert "fix: eps=1e-4" in text and "fix: look" in text
    assert " pass precision.effective     bfloat16\n" in text
    counts = "1 failed (optimizer.eps), 1 warned, 1 passed, 1 not applicable, 2 not checked"
    assert f" not ready: {counts}\n" in text
    assert " give --config FILE\n    lr.config, config.types\n" in text
    assert "configuration is NOT aligned" in text and "is aligned" not in text
    assert from_jsonable(Preflight, to_jsonable(RESULT)) == RESULT
    narrow = render_preflight(RESULT, width=60, unicode=False)
    assert max(map(len, narrow.splitlines())) <= 60


def test_every_item_has_a_section() -> None:
    from stepguard.check.preflight import TITLES

    parts = {part for names in SECTIONS.values() for part in names}
    assert {name.partition(".")[0] for name in TITLES} <= parts


def test_every_item_is_in_the_docs() -> None:
    from stepguard.check.preflight import TITLES

    page = (Path(__file__).parents[2] / "docs" / "check.md").read_text(encoding="utf-8")
    points = [name for name in TITLES if name.startswith("checklist.")]
    assert len(points) == 10
    assert [name for name in TITLES if name not in points and f"`{name}`" not in page] == []


def test_sections_are_numbered_and_commands_stay_whole() -> None:
    command = "stepguard quarantine " + "x" * 200
    sections = (
        Section(
            title="configuration", status="not checked", lines=("not checked: give --config FILE",)
        ),
        Section(title="recommendations", status="fine", lines=("a " * 80,), commands=(command,)),
    )
    text = render_examination(Examination(path="run", sections=sections), width=70, colour=False)
    assert " 1. configuration  not checked" in text and command in text
    assert all(len(line) <= 70 for line in text.splitlines() if command not in line)


BAD = Problem(
    file="run/a/optimizer.pt",
    kind="nan",
    tensor="state/0/exp_avg",
    detail="1 NaN of 3",
    role="optimizer",
)
GOOD = Verification(path="run/b", format="DCP", tensors=1200, bytes=2_100_000_000, step=40)
PART = Verification(
    path="run/a", format="transformers", problems=(BAD,), tensors=3, bytes=100, step=20
)
LINK = Problem(file="run/x", kind="link", detail="is a link out of the folder", severity="warning")
FOLDER = Verification(
    path="run", format="folder", problems=(LINK, BAD), parts=(PART, GOOD), seconds=2.0
)


def test_every_checkpoint_has_a_line_and_every_problem_its_place() -> None:
    text = render_results([FOLDER], width=100, colour=False)
    for words in (
        "run/b",
        "DCP",
        "1,200",
        "2.1 GB",
        "corrupt, 1 error",
        "optimizer.pt: state/0/exp_avg (optimizer): 1 NaN of 3",
    ):
        assert words in text
    assert "link out of the folder" in text and text.count("1 NaN of 3") == 1
    lines = render_results([FOLDER], width=60, colour=False).splitlines()
    assert all(len(line) <= 60 for line in lines)
    many = tuple(Problem(file="a", kind="nan", tensor=f"w{n}", detail="bad") for n in range(30))
    long = Verification(path="a", format="x", problems=many)
    assert "and 18 more; --json lists all" in render_results([long], width=80, colour=False)
    assert "2 checkpoints, 1 good, 1 corrupt; 1,203 tensors, 2.1 GB in 2.0 s (1.05 GB/s)" in text


LOST = BadSamples(
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
LOST_BATCH = replace(
    LOST,
    samples=(),
    count=8,
    indices=tuple(range(40, 48)),
    left_out="step",
    incident="b",
    step=301,
)


def test_table_says_step_batch_row_data_set_cause_and_place() -> None:
    text = render_ledger("runs/a", [LOST], 0, 100, 110)
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


@pytest.mark.parametrize("width", [40, 60, 80, 110])
def test_long_ids_and_places_are_shortened_in_the_middle(width: int) -> None:
    long = replace(
        LOST,
        ids=("s3://bucket/" + "x" * 60 + "/0042.png",),
        place="forward: " + "y" * 90 + " at a.py:1",
    )
    lines = render_ledger("runs/a", [long], 0, 0, width).splitlines()
    assert "s3://" in lines[1] and "…" in lines[1] and "0042.png" in lines[1]
    assert width < 110 or (len(lines[1]) <= width and lines[1].endswith("at a.py:1"))


def test_innocent_samples_are_lost_but_no_suspects() -> None:
    innocent = replace(LOST_BATCH, innocent=True)
    assert suspects([innocent]) == []
    text = render_ledger("runs/a", [innocent], 0, 0, 110)
    assert "lost with others" in text and "8 samples lost" in text


def test_step_that_several_ranks_lost_counts_once() -> None:
    ranks = [replace(LOST_BATCH, rank=rank, run=f"run of rank {rank}") for rank in range(4)]
    again = replace(LOST_BATCH, attempt=2, rank=3)
    assert totals([*ranks, again]) == {"lost": 40, "steps": 2, "of": 40}
    # 100 steps in the journal of each rank, 8 samples on each
    text = render_ledger("runs/a", ranks, 0, 400, 110)
    assert "32 samples lost in 1 step, of 32 in them; 1.00% of about 3,200 seen" in text


def test_proven_samples_come_before_those_of_bad_batches() -> None:
    found = suspects([LOST_BATCH, LOST, replace(LOST_BATCH, cause="SG505", indices=(1,))])
    assert (
        found[0].index == 48211
        and found[0].proven
        and not any(suspect.proven for suspect in found[1:])
    )
    assert len(found) == 9


def test_many_losses_are_cut_short_and_json_has_all() -> None:
    entries = [replace(LOST, step=step, incident=str(step)) for step in range(100)]
    assert "and 60 more; --json lists all" in render_ledger("runs/a", entries, 0, 0, 80)
    assert len(as_json("runs/a", entries, 0, 0)["entries"]) == 100
    for lost, unread, seen, said in (
        (
            [LOST, LOST_BATCH],
            0,
            100,
            "9 samples lost in 2 steps, of 16 in them; 1.12% of about",
        ),
        ([LOST, replace(LOST, attempt=2), LOST_BATCH], 0, 0, "more than once: row 48211 2 times"),
        ([LOST_BATCH], 0, 0, "all 8  40, 41, 42 and 5 more"),
        ([], 0, 100, "no samples were lost in runs/a\n"),
        ([], 2, 0, "2 lines could not be read"),
    ):
        assert said in render_ledger("runs/a", lost, unread, seen, 110)


def look(step: int, bits: float, infinities: int = 0) -> Look:
    tensor = TensorLook(
        module="body", stage="forward", dtype="float16", headroom=bits, infinities=infinities
    )
    still = ParameterLook(name="still", dtype="bfloat16", weight=1.0, gradient=1.0, lost=1.0)
    moving = ParameterLook(
        name="moving", dtype="float32", weight=1.0, gradient=1.0, update=0.2, lost=0.0
    )
    attention = AttentionLook(module="attention", largest_logit=step, entropy=0.5, collapsed=0.0)
    return Look(step=step, tensors=(tensor,), parameters=(moving, still), attention=(attention,))


def test_every_row_has_its_history() -> None:
    ranges, updates, attention = look_tables([look(2, 9.0), look(7, 5.0)], None)
    assert ranges["rows"][0]["history"] == ((2, 9.0), (7, 5.0))
    assert [row["cells"][0] for row in updates["rows"]] == ["still", "moving"]
    assert updates["rows"][1]["history"] == ((2, 0.2), (7, 0.2))
    assert attention["rows"][0]["history"] == ((2, 2.0), (7, 7.0))
    assert len(look_tables([look(2, 2.0)], 1)[1]["rows"]) == 1


def test_what_is_near_its_limit_is_marked() -> None:
    (ranges, updates, _) = look_tables([look(2, 2.0)], None)
    assert ranges["headings"][ranges["rows"][0]["warns"][0]] == "bits left"
    assert updates["headings"][updates["rows"][1]["warns"][0]] == "update/weight"
    assert look_tables([look(2, 9.0)], None)[0]["rows"][0]["warns"] == ()
    assert (
        look_tables([look(2, 9.0, infinities=3)], None)[0]["rows"][0]["cells"][4] == "9.0 (3 inf)"
    )


SKIP = TrialOutcome(
    name="skip",
    label="skip the step",
    cost=2,
    works=True,
    loss=0.5,
    held_out=0.75,
    distance=0.125,
    losses=(1.0, 0.5),
    steps=12,
    change="nothing to change",
    answers=("SG101",),
)
NOTHING = TrialOutcome(
    name="nothing",
    label="do nothing",
    cost=0,
    bad_step=45,
    bad_value="loss is nan",
    losses=(1.0, float("nan")),
    steps=4,
)
UNTRIED = TrialOutcome(name="own", label="your own: fix", cost=3, why_not="ValueError: no")
FOUND = WhatIf(
    incident="00000045-nonfinite_loss",
    step=45,
    first=16,
    window=29,
    after=8,
    outcomes=(SKIP, NOTHING, UNTRIED),
    remarks=("few batches",),
)


def test_table_shows_the_best_first_and_the_words_for_the_change() -> None:
    out = io.StringIO()
    show(FOUND, out)
    text = " ".join(out.getvalue().split())
    assert "00000045-nonfinite_loss: 29 steps from step 16, then the bad one and 8 after" in text
    assert "skip the step [SG101] does not come back 0.5 0.75 12.5%" in text
    assert "do nothing step 45: loss is nan - -" in text
    assert "not tried: ValueError: no" in text
    assert text.index("skip the step") < text.index("do nothing")
    assert text.endswith("Best: skip the step. To change: nothing to change. - few batches")
    assert sentences(WhatIf(incident="a", step=1, outcomes=(NOTHING,))) == [
        "Nothing that was tried helps: the cause is in the code or in all of the data."
    ]
    silent = io.StringIO()
    with progress_bar(silent) as tell:
        tell(1, 2, "skip")
    assert silent.getvalue() == ""
