"""The ledger of bad samples: whole lines are never lost, torn ones are counted, no loss means no
file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from stepguard._errors import JournalError
from stepguard.ledger import SCHEMA, Ledger, ledger_path, read_ledger
from stepguard.records.checks import BadSamples

ENTRY = BadSamples(
    step=48,
    run="r1",
    attempt=2,
    time=10.0,
    micro_batch=1,
    samples=(3, 15),
    count=2,
    of=64,
    indices=(17, 48211),
    ids=("größe\u2028.png", 7),
    epoch=0,
    batch=300,
    left_out="sample",
    cause="SG101",
    place="input: batch:x, samples 3, 15",
    incident="00000048-nonfinite_input",
)


def test_entry_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    Ledger(tmp_path / "new" / "run").append(ENTRY)
    assert read_ledger(tmp_path / "new" / "run") == ([ENTRY], 0)


def test_line_has_the_documented_fields_and_a_version(tmp_path: Path) -> None:
    Ledger(tmp_path).append(ENTRY)
    text = ledger_path(tmp_path).read_text(encoding="utf-8")
    assert text.count("\n") == 1
    line = json.loads(text)
    assert line["v"] == SCHEMA and line["indices"] == [17, 48211] and line["left_out"] == "sample"
    assert set(line) >= {
        "run",
        "attempt",
        "time",
        "step",
        "micro_batch",
        "samples",
        "count",
        "of",
        "ids",
    }
    assert set(line) >= {"epoch", "batch", "cause", "place", "incident"}


def test_unknown_indices_and_ids_stay_unknown(tmp_path: Path) -> None:
    Ledger(tmp_path).append(BadSamples(step=1))
    (entry,), _ = read_ledger(tmp_path)
    assert (entry.indices, entry.ids, entry.batch, entry.micro_batch) == (None, None, None, None)


def test_run_that_lost_nothing_has_no_file(tmp_path: Path) -> None:
    Ledger(tmp_path)
    assert list(tmp_path.iterdir()) == [] and read_ledger(tmp_path) == ([], 0)


def test_torn_last_line_is_counted_and_ended_by_the_next(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.append(ENTRY)
    with ledger.path.open("ab") as file:
        file.write(b'{"v":1,"step":4')
    assert read_ledger(tmp_path) == ([ENTRY], 1)
    ledger.append(ENTRY)
    assert read_ledger(tmp_path) == ([ENTRY, ENTRY], 1)


@pytest.mark.parametrize(
    "line", ["[]", "3", '{"v":1}', '{"v":1,"step":"x"}', '{"v":1,"step":1,"left_out":"all"}']
)
def test_line_that_is_no_entry_is_counted(line: str, tmp_path: Path) -> None:
    ledger_path(tmp_path).write_text(line + "\n\n", encoding="utf-8")
    assert read_ledger(tmp_path) == ([], 1)


def test_newer_schema_is_refused_with_the_way_out(tmp_path: Path) -> None:
    ledger_path(tmp_path).write_text('{"v":99,"step":1}\n', encoding="utf-8")
    with pytest.raises(JournalError, match=r"line 1 has schema 99.*upgrade"):
        read_ledger(tmp_path)


def test_every_rank_has_its_own_file_and_all_are_read_together(tmp_path: Path) -> None:
    for rank in (0, 1, 11):
        Ledger(tmp_path, rank).append(BadSamples(step=5, rank=rank, time=float(rank)))
    (tmp_path / "bad_samples.old.jsonl").write_text("{}\n", encoding="utf-8")
    assert [entry.rank for entry in read_ledger(tmp_path)[0]] == [0, 1, 11]
    assert [entry.rank for entry in read_ledger(tmp_path, 11)[0]] == [11]
    assert ledger_path(tmp_path, 11).name == "bad_samples.rank11.jsonl"


def test_disk_that_takes_half_a_line_leaves_nothing_of_that_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, write, budget = Ledger(tmp_path), os.write, [20, 0]
    ledger.append(ENTRY)

    def full(file: int, data: bytes) -> int:
        room = budget.pop(0)
        if not room:
            raise OSError(28, "No space left on device")
        return write(file, data[:room])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        ledger.append(ENTRY)
    monkeypatch.undo()
    ledger.append(ENTRY)
    assert read_ledger(tmp_path) == ([ENTRY, ENTRY], 0)


@pytest.mark.parametrize(
    ("cause", "again"), [("SG101", True), ("SG204", True), ("SG402", True), ("SG301", False)]
)
def test_only_what_the_data_or_the_loss_did_would_fail_again(cause: str, again: bool) -> None:
    assert BadSamples(step=0, cause=cause).would_fail_again is again
