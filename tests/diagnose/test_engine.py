"""The order of findings: by certainty, then by what the rules yield to, then by code."""

from __future__ import annotations

from typing import Any

import pytest

from diagnose.diagnose_literals import NAN, findings, found, origin, out, tensor
from stepguard.diagnose import Proof
from stepguard.diagnose.engine import MOST_FINDINGS, Found, ranked, rule_of, uncontested
from stepguard.diagnose.rules import RULES
from stepguard.records import Certainty, Evidence, Origin

YIELDS_TO = {rule.code: rule.yields_to for rule in RULES}


def finding(code: str, certainty: Certainty = "certain") -> Found:
    return rule_of(code), Proof(certainty, "", {})


def order(*unordered: Found) -> list[str]:
    return [rule.code for rule, _ in ranked(unordered)]


def test_the_more_certain_finding_goes_first() -> None:
    assert order(finding("SG101", "possible"), finding("SG703", "likely")) == ["SG703", "SG101"]


def test_equal_findings_go_by_code() -> None:
    assert order(finding("SG402"), finding("SG103")) == ["SG103", "SG402"]


def test_a_finding_yields_to_an_equally_certain_one() -> None:
    assert order(finding("SG201"), finding("SG302")) == ["SG302", "SG201"]


def test_a_finding_does_not_yield_to_a_less_certain_one() -> None:
    assert order(finding("SG201"), finding("SG302", "possible")) == ["SG201", "SG302"]


def divided(**more: Any) -> Origin:
    return origin(
        "loss",
        "aten.div",
        tensor("self", (4,), 1.0, 2.0),
        tensor("other", (4,), 0.0, 1.0, zeros=1, index=(0,), value=0.0),
        output=out(posinf=1),
        evidence=Evidence(zero_denominator=True),
        **more,
    )


@pytest.mark.parametrize(
    ("where", "certainty"),
    [
        (divided(method="replay", reproduced=True), "certain"),
        (divided(method="live"), "certain"),
        (divided(method="replay", reproduced=False), "likely"),
        (divided(method="output-gradient"), "likely"),
        (divided(), "likely"),
    ],
)
def test_only_an_operation_that_was_observed_is_certain(where: Origin, certainty: str) -> None:
    assert found("SG201", where).certainty == certainty


def test_stored_tensor_that_was_seen_bad_is_certain_without_a_replay() -> None:
    bad = tensor("param:w", (2,), 0.0, 1.0, nan=1, index=(0,), value=NAN)
    where = origin("state", None, bad, tensor="param:w", method="scan")
    assert found("SG601", where, bad_state=("param:w",)).certainty == "certain"
    unseen = origin("state", None, tensor="param:w", method="scan")
    assert found("SG601", unseen, bad_state=("param:w",)).certainty == "likely"


def test_two_certain_causes_that_exclude_each_other_are_both_likely() -> None:
    rivals = uncontested([finding("SG101"), finding("SG201"), finding("SG703", "likely")])
    assert [proof.certainty for _, proof in rivals] == ["likely", "likely", "likely"]
    same_fault = uncontested([finding("SG302"), finding("SG201")])
    assert [proof.certainty for _, proof in same_fault] == ["certain", "certain"]


def test_custom_function_named_like_an_operation_is_judged_by_its_boundary() -> None:
    where = origin(
        "forward",
        "log",
        tensor("x", (4,), -1.0, 0.0),
        output=out(nan=1),
        node="SqrtBackward",
        method="replay",
        evidence=Evidence(opaque="function"),
    )
    (only,) = findings(where)
    assert (only.code, only.certainty) == ("SG208", "likely")
    assert "float32 [4] from -1 to 0" in only.evidence[1]


def test_fused_attention_that_nothing_else_explains_is_an_opaque_kernel() -> None:
    q = tensor("query", (1, 2, 4, 8), -3.0, 3.0)
    where = origin(
        "forward", "aten._scaled_dot_product_flash_attention", q, output=out(nan=1), method="replay"
    )
    (only,) = findings(where)
    assert (only.code, only.certainty) == ("SG208", "possible")


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
    assert "aten.index dropped the NaN from the loss" in findings(where)[0].evidence[-1]
