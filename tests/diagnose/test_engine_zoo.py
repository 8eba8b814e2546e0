"""The 28 incidents of the shared zoo: the accepted cause comes first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diagnose.diagnose_literals import codes, findings
from diagnose.zoo_literals_of_operations import ZOO_OF_OPERATIONS
from diagnose.zoo_literals_of_runs import ZOO_OF_RUNS
from stepguard.records import Evidence

ZOO = ZOO_OF_OPERATIONS | ZOO_OF_RUNS


@pytest.mark.parametrize("name", ZOO)
def test_accepted_cause_comes_first(name: str) -> None:
    accepted, where, reading = ZOO[name]
    said = codes(where, **reading)
    assert said, "nothing was found"
    assert said[0] in accepted, said


@pytest.mark.parametrize("name", ZOO)
def test_cause_does_not_hang_on_the_evidence(name: str) -> None:
    """Operation, node and operands carry the cause, except where only a measured fact can tell."""
    accepted, where, reading = ZOO[name]
    if name == "where_exp_unselected_branch":
        # an infinity that was discarded and one that was absorbed look alike
        accepted = ("SG402", "SG403")
    said = codes(replace(where, evidence=Evidence()), **reading)
    assert said and said[0] in accepted, said


def test_every_zoo_incident_is_covered() -> None:
    assert len(ZOO) == 28


@pytest.mark.parametrize("name", ZOO)
def test_the_first_finding_gives_numbers_and_a_remedy(name: str) -> None:
    _, where, reading = ZOO[name]
    first = findings(where, **reading)[0]
    assert first.evidence and all(first.evidence)
    assert first.remedies
    assert first.certainty in ("certain", "likely")
