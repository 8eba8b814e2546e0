"""The sections of `stepguard doctor` as text."""

from __future__ import annotations

from stepguard.records.incident import Examination, Section
from stepguard.report.checks import render_examination


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
