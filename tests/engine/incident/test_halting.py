"""The line that tells a launcher what became of a run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stepguard.engine.incident.situation import exit_line

PATTERN = re.compile(
    r"stepguard: HALTED step=(\d+) cause=(\S+) restart=(helps|same-fault|change-code) state=(.+)"
)


def test_line_is_exactly_what_launchers_are_told_to_grep_for() -> None:
    line = exit_line(
        step=48, cause="SG204", restart="same-fault", state=Path("runs/a/checkpoints/step-40")
    )
    assert (
        line == "stepguard: HALTED step=48 cause=SG204 restart=same-fault "
        "state=runs/a/checkpoints/step-40"
    )


def test_stop_without_a_saved_state_says_none() -> None:
    assert exit_line(step=0, cause="nonfinite_loss", restart="change-code").endswith(" state=none")
    assert exit_line(step=0, cause="nonfinite_loss", restart="change-code", state="").endswith(
        " state=none"
    )


def test_it_stays_one_line_of_four_fields_whatever_the_names_hold() -> None:
    line = exit_line(
        step=7, cause="two words\n", restart="helps", state="a path\nwith\x1b[2J/ blanks"
    )
    found = PATTERN.fullmatch(line)
    assert found is not None and found[1] == "7" and " " not in found[2]
    assert found[4] == "a path?with?[2J/ blanks"


def test_unknown_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="same-fault"):
        exit_line(step=1, cause="SG204", restart="perhaps")  # type: ignore[arg-type]
