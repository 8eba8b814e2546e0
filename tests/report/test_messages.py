"""One-line messages, the same in terminal, readable log and logging."""

from __future__ import annotations

from dataclasses import replace

from report.literals import BARE, masked_row, note
from stepguard.report import phrases


def test_incident_is_one_line_with_count_and_reason() -> None:
    line = phrases.incident_line(masked_row(49, "rewind", 4, "used up"), "2nd", again=True)
    assert line.startswith("step 49 rewound again (2nd): loss is nan (text_loss); aten._softmax")
    assert line.endswith("; sample 5; SG204; used up")


def test_incident_without_decision_or_origin_is_told_all_the_same() -> None:
    bare = replace(BARE, decision=None)
    assert phrases.incident_line(bare) == f"step 7 is bad: {BARE.verdict.summary}"


def test_stop_says_why() -> None:
    stopped = masked_row(52, "stop", 4, "no rewind: 3 rewinds used")
    assert phrases.stopping(stopped) == (
        "Stopping training to prevent corruption at step 52: no rewind: 3 rewinds used"
    )


def test_note_carries_its_step() -> None:
    assert phrases.message("note", note("loader", "it is empty", 3)) == "step 3: it is empty"
