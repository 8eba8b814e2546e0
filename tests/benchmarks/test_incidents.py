"""The benchmark of public incidents: what it scores, and that its list is complete."""

from __future__ import annotations

import re

import pytest
from zoo.incidents import CHECKPOINTS, INCIDENTS, NOT_HERE

from benchmarks import incidents


def test_each_listed_incident_is_reproduced_once_or_has_a_reason() -> None:
    names = [one.name for one in INCIDENTS] + list(CHECKPOINTS)
    names += [name for few in NOT_HERE.values() for name in few.split()]
    assert len(names) == len(set(names)) == 98
    assert all(re.fullmatch(r"I\d{3}", name) and int(name[1:]) % 2 for name in names)


def test_named_stopped_and_nothing_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert incidents.main(["--only", "I117", "I009", "I093", "I023"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "3 of 4 named (75%), 0 stopped, 1 not noticed" in said
    assert incidents.main(["--only", "I002"]) == 2
