"""Journal and ledger are readable after any crash: whole lines are kept, torn ones counted."""

from __future__ import annotations

import json
import math
import os
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepguard._errors import JournalError
from stepguard.journal import SCHEMA, Journal, journal_path, read_run
from stepguard.ledger import Ledger, ledger_path, read_ledger
from stepguard.records import Decision, Finding, Incident, Origin, Reading, Verdict
from stepguard.records.checks import BadSamples

NAN = math.nan
INCIDENT = Incident(
    id="i1",
    step=2,
    verdict=Verdict(
        kind="nonfinite_loss", severity="incident", summary="loss is nan", evidence={"loss": NAN}
    ),
    reading=Reading(
        step=2, loss=NAN, micro_losses=(1.0, NAN), components={"ce": 1.0, "kl": math.inf}, lr=(0.1,)
    ),
    origin=Origin(step=2, phase="forward", module="größe.✓", op="aten.log"),
    findings=(
        Finding(
            code="SG202", title="log of a non-positive value", evidence=("operand is 0\nat row 3",)
        ),
    ),
)


def _write_run(folder: Path) -> Path:
    journal = Journal(folder)
    journal.write("run", {"stepguard": "0.1.0", "name": "größe ✓\u2028"})
    journal.step(Reading(step=0, loss=1.0, lr=(0.1,)), committed=True)
    journal.step(Reading(step=1, loss=NAN, micro_losses=(NAN,)), committed=False)
    journal.incident(INCIDENT)
    journal.write("note", {"text": "spike"})
    journal.close()
    return journal.path


def _counts(path: Path) -> tuple[int, int, int, int]:
    run = read_run(path)
    return bool(run.header), len(run.steps), len(run.incidents), len(run.notes)


def test_run_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    _write_run(tmp_path)
    run = read_run(tmp_path)
    assert run.header["name"] == "größe ✓\u2028"
    assert [step["step"] for step in run.steps] == [0, 1]
    assert [step["committed"] for step in run.steps] == [True, False]
    assert run.steps[0]["loss"] == 1.0 and math.isnan(run.steps[1]["loss"])
    assert run.notes[0]["text"] == "spike"
    assert run.torn == 0


def test_incident_is_read_back_with_its_non_finite_numbers(tmp_path: Path) -> None:
    _write_run(tmp_path)
    (incident,) = read_run(tmp_path).incidents
    assert math.isnan(incident.reading.micro_losses[1])
    assert incident.reading.components["kl"] == math.inf
    assert incident.verdict.evidence is not None and math.isnan(
        float(incident.verdict.evidence["loss"])
    )
    assert incident.origin == INCIDENT.origin
    assert incident.findings == INCIDENT.findings


def test_every_line_is_strict_json_with_a_schema(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = _write_run(tmp_path).read_text().splitlines()
    records = [json.loads(line, parse_constant=refuse) for line in lines]
    assert len(records) == 5
    assert all(record["v"] == SCHEMA and record["type"] for record in records)


@pytest.mark.slow
def test_truncation_at_every_byte_loses_no_whole_line(tmp_path: Path) -> None:
    data = _write_run(tmp_path / "run").read_bytes()
    whole = [_counts_of(data[:end], tmp_path) for end in _line_ends(data)]
    for size in range(len(data) + 1):
        cut = tmp_path / "cut.jsonl"
        cut.write_bytes(data[:size])
        complete = data[:size].count(b"\n")
        # a last line that lacks nothing but its newline is whole, too
        expected = {whole[complete]} | (
            {whole[complete + 1]} if data[size : size + 1] == b"\n" else set()
        )
        assert _counts(cut) in expected, f"cut at byte {size}"


def _line_ends(data: bytes) -> list[int]:
    return [0, *(i + 1 for i, byte in enumerate(data) if byte == ord("\n"))]


def _counts_of(data: bytes, folder: Path) -> tuple[int, int, int, int]:
    path = folder / "whole.jsonl"
    path.write_bytes(data)
    return _counts(path)


@pytest.mark.slow
def test_appending_after_a_line_torn_anywhere_works(tmp_path: Path) -> None:
    data = _write_run(tmp_path / "run").read_bytes()
    path = journal_path(tmp_path)
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        before = _counts(path)
        journal = Journal(tmp_path)
        journal.write("end", {"steps": 2})
        journal.close()
        run = read_run(tmp_path)
        assert run.notes[-1]["type"] == "end"
        assert _counts(path) == (*before[:3], before[3] + 1), f"torn at byte {size}"
        assert run.torn <= 1


@given(st.binary(max_size=200), st.integers(min_value=0, max_value=5))
def test_garbage_between_lines_costs_only_itself(garbage: bytes, at: int) -> None:
    good = [json.dumps({"v": SCHEMA, "type": "step", "step": i}).encode() for i in range(5)]
    lines = [*good[:at], garbage.replace(b"{", b"?"), *good[at:]]
    with tempfile.TemporaryDirectory() as folder:
        journal_path(Path(folder)).write_bytes(b"\n".join(lines))
        assert [step["step"] for step in read_run(Path(folder)).steps] == list(range(5))


def test_every_line_carries_its_attempt_and_branch(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write("run", {"attempt": 3})
    journal.write("note", {"kind": "restored", "step": 4})  # before the first step: no new branch
    for step in (4, 5):
        journal.step(Reading(step=step, loss=1.0), committed=True)
    journal.write("rewind", {"step": 6, "to": 4})
    journal.step(Reading(step=4, loss=1.0), committed=False)
    journal.step(Reading(step=4, loss=1.0), committed=True)  # a dropped step may come again
    journal.write("note", {"kind": "restored", "step": 2})
    journal.step(Reading(step=2, loss=1.0), committed=True)
    journal.step(Reading(step=2, loss=1.0), committed=True)  # a committed one is a new branch
    stop = Decision(action="stop", rewound_to=1)
    journal.incident(replace(INCIDENT, decision=stop))
    journal.write("end", {})
    journal.close()
    lines = [json.loads(line) for line in journal.path.read_text().splitlines()]
    assert {line["attempt"] for line in lines} == {3}
    assert [line["branch"] for line in lines] == [1, 1, 1, 1, 2, 2, 2, 3, 3, 4, 5, 5]
    firsts = {line["branch"]: line["from_step"] for line in lines if "from_step" in line}
    assert firsts == {1: 4, 2: 4, 3: 2, 4: 2, 5: 1}
    reasons = [line["by"] for line in lines if "by" in line]
    assert reasons == ["restart", "rewind", "restore", "repeat", "rewind"]


def test_step_line_names_the_incident_that_was_written_before_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.incident(INCIDENT)
    journal.step(Reading(step=2, loss=1.0), committed=True)
    journal.step(Reading(step=3, loss=1.0), committed=False)
    journal.incident(replace(INCIDENT, id="i3", step=3))
    journal.step(Reading(step=3, loss=1.0), committed=True)  # the retry is not the incident's step
    journal.close()
    assert [step.get("incident") for step in read_run(tmp_path).steps] == ["i1", None, None]
    lines = [json.loads(line) for line in journal.path.read_text().splitlines()]
    assert [line.get("of_last_step") for line in lines if line["type"] == "incident"] == [
        None,
        True,
    ]


@pytest.mark.parametrize(
    "line",
    [
        '{"v": 1, "type": "incident"}',
        '{"v": 1, "type": "incident", "incident": {"id": "x"}}',
        '{"v": 1, "type": "incident", "incident": 3}',
        "[1, 2]",
        '"step"',
        "\x00\x00\x00",
    ],
)
def test_line_without_sense_is_counted_and_passed_over(tmp_path: Path, line: str) -> None:
    path = _write_run(tmp_path)
    with path.open("a") as file:
        file.write(line + "\n")
    assert _counts(path) == (True, 2, 1, 1)
    assert read_run(path).torn == 1


def test_record_after_a_full_disk_starts_on_its_own_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path)
    journal.write("run", {"stepguard": "0"})
    whole, calls = os.write, []

    def full(fd: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return whole(fd, data[:7])

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, "write", full)
        journal.write("note", {"text": "lost"})
    journal.write("note", {"text": "kept"})
    journal.close()
    run = read_run(tmp_path)
    assert [note["text"] for note in run.notes] == ["kept"]
    assert run.torn == 0  # nothing is left of the line that did not fit


def test_incident_is_on_disk_before_writing_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    journal = Journal(tmp_path)
    journal.step(Reading(step=0, loss=1.0), committed=True)
    assert synced == []
    journal.incident(INCIDENT)
    assert len(synced) == 1
    journal.close()


def test_ranks_write_their_own_files(tmp_path: Path) -> None:
    for rank in (0, 1):
        journal = Journal(tmp_path, rank)
        journal.write("run", {"rank": rank})
        journal.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "journal.jsonl",
        "journal.rank1.jsonl",
    ]
    assert read_run(tmp_path, 1).header["rank"] == 1


def test_resumed_run_keeps_the_first_header_and_notes_the_second(tmp_path: Path) -> None:
    for start in range(2):
        journal = Journal(tmp_path)
        journal.write("run", {"start": start})
        journal.close()
    run = read_run(tmp_path)
    assert run.header["start"] == 0
    assert [note["start"] for note in run.notes] == [1]


def test_missing_journal_names_the_path_and_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"journal\.jsonl does not exist; give a run directory"):
        read_run(tmp_path)


@pytest.mark.parametrize("version", [SCHEMA + 1, None, "1"])
def test_newer_schema_is_refused_rather_than_misread(tmp_path: Path, version: object) -> None:
    path = journal_path(tmp_path)
    path.write_text(json.dumps({"v": version, "type": "step", "step": 0}) + "\n")
    with pytest.raises(JournalError, match=r"line 1 has schema .*upgrade it"):
        read_run(tmp_path)


def test_unknown_fields_of_a_later_minor_version_are_ignored(tmp_path: Path) -> None:
    path = _write_run(tmp_path)
    path.write_text(path.read_text().replace('"id":"i1"', '"id":"i1","mood":"grim"'))
    assert _counts(path) == (True, 2, 1, 1)


def test_lines_of_two_threads_stay_whole(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    text = "x" * 5000

    def write() -> None:
        for number in range(200):
            journal.write("note", {"step": number, "summary": text})

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.close()
    found = read_run(tmp_path)
    assert found.torn == 0
    assert len(found.notes) == 600


# --- the ledger of bad samples


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
    assert line["v"] == 1 and line["indices"] == [17, 48211] and line["left_out"] == "sample"
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


@pytest.mark.parametrize(
    ("cause", "again"), [("SG101", True), ("SG204", True), ("SG402", True), ("SG301", False)]
)
def test_only_what_the_data_or_the_loss_did_would_fail_again(cause: str, again: bool) -> None:
    assert BadSamples(step=0, cause=cause).would_fail_again is again
