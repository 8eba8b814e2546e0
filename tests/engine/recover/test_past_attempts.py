"""The journal tells where earlier attempts started from, what they lost, and how they ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepguard.engine.recover.rewind import attempts_in, failed_starts, past_of


def _journal(folder: Path, *lines: dict[str, Any] | str) -> Path:
    path = folder / "journal.jsonl"
    written = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(written) + "\n", encoding="utf-8")
    return path


def _incident(step: Any, action: str, left_out: str = "") -> dict[str, Any]:
    decision = {"action": action, "left_out": left_out}
    verdict = {"kind": "nonfinite_loss"}
    return {
        "type": "incident",
        "incident": {"step": step, "decision": decision, "verdict": verdict},
    }


def _restored(name: str) -> dict[str, Any]:
    return {"type": "note", "kind": "restored", "checkpoint": name}


RUN = {"type": "run", "run": "abc"}


def test_attempts_begin_at_each_header_and_know_their_checkpoint(tmp_path: Path) -> None:
    found = attempts_in(_journal(tmp_path, RUN, RUN, _restored("step-40"), _incident(44, "stop")))
    assert [(a.restored, a.stopped_at) for a in found] == [
        (None, None),
        ("step-40", 44),
    ]


def test_steps_that_were_left_out_or_stopped_at_are_lost(tmp_path: Path) -> None:
    lines = (
        RUN,
        _incident(3, "skip", "the step"),
        _incident(5, "rewind"),
        _incident(7, "stop"),
        RUN,
        _incident(9, "leave_out", "sample 2"),
    )
    past = past_of(attempts_in(_journal(tmp_path, *lines)))
    assert past.lost_steps == {3, 7, 9}
    assert past.stopped_at == {7}


def test_starts_from_a_checkpoint_count_only_if_the_policy_stopped_them(tmp_path: Path) -> None:
    attempt = (RUN, _restored("step-40"))
    lines = (*attempt, _incident(44, "stop"), *attempt, *attempt, _incident(41, "stop"))
    found = attempts_in(_journal(tmp_path, *lines))
    assert failed_starts(found, "step-40") == 2
    assert failed_starts(found, "step-20") == 0


@pytest.mark.parametrize(
    "line", ["{not json", "[]", '{"type":"incident"}', '{"type":"incident","incident":{}}']
)
def test_lines_that_cannot_be_read_are_passed_over(line: str, tmp_path: Path) -> None:
    (found,) = attempts_in(_journal(tmp_path, RUN, line, _incident("4", "stop")))
    assert found.stopped_at is None and not found.lost_steps


def test_missing_journal_has_no_attempts(tmp_path: Path) -> None:
    assert attempts_in(tmp_path / "journal.jsonl") == []
