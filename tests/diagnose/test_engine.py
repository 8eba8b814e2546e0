"""The order of findings: by certainty, then by what the rules yield to, then by code."""

from __future__ import annotations

import pytest

from diagnose.diagnose_literals import findings, origin
from stepguard.diagnose.engine import MOST_FINDINGS, YIELDS_TO, ranked
from stepguard.diagnose.rules import RULES
from stepguard.records import Certainty, Evidence, Finding


def finding(code: str, certainty: Certainty = "certain") -> Finding:
    return Finding(code=code, title=code, certainty=certainty)


def order(*unordered: Finding) -> list[str]:
    return [found.code for found in ranked(unordered)]


def test_the_more_certain_finding_goes_first() -> None:
    assert order(finding("SG101", "possible"), finding("SG703", "likely")) == ["SG703", "SG101"]


def test_equal_findings_go_by_code() -> None:
    assert order(finding("SG402"), finding("SG103")) == ["SG103", "SG402"]


def test_a_finding_yields_to_an_equally_certain_one() -> None:
    assert order(finding("SG201"), finding("SG302")) == ["SG302", "SG201"]


def test_a_finding_does_not_yield_to_a_less_certain_one() -> None:
    assert order(finding("SG201"), finding("SG302", "possible")) == ["SG201", "SG302"]


def test_yielding_is_passed_on() -> None:
    """SG201 yields to SG301, which yields to SG505."""
    assert order(finding("SG201"), finding("SG301"), finding("SG505")) == [
        "SG505",
        "SG301",
        "SG201",
    ]


def test_rules_yield_only_to_codes_that_exist() -> None:
    codes = {rule.code for rule in RULES}
    for rule in RULES:
        assert set(rule.yields_to) <= codes


@pytest.mark.parametrize("code", YIELDS_TO)
def test_no_rule_yields_to_itself_by_any_way(code: str) -> None:
    reached: set[str] = set()
    todo = list(YIELDS_TO[code])
    while todo:
        one = todo.pop()
        if one not in reached:
            reached.add(one)
            todo.extend(YIELDS_TO[one])
    assert code not in reached


def test_at_most_a_few_findings_are_given() -> None:
    everything = Evidence(compiled_only=True, uninitialised=True, number=float("nan"))
    where = origin("loss", reproduced=True, evidence=everything)
    found = findings(where, bad_ranks=(0,), facts=None)
    assert 1 < len(found) <= MOST_FINDINGS


def test_the_way_of_a_nan_that_was_dropped_is_told() -> None:
    where = origin(
        "forward", "aten.empty", evidence=Evidence(uninitialised=True, discarded_by="aten.index")
    )
    assert "aten.index left the NaN out of the loss" in findings(where)[0].evidence[-1]
