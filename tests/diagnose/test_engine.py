"""From a bad step to ordered findings: certainty, order, words, names; all causes occur."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diagnose.literals import NAN, at, findings, found, number, origin, spans, tensor, x
from settings_of import config_of
from stepguard import Guard, GuardConfig
from stepguard.diagnose import Case, Proof
from stepguard.diagnose.engine import (
    HEALTHY_SERIES,
    MOST_FINDINGS,
    Found,
    ranked,
    rule_of,
    uncontested,
)
from stepguard.diagnose.rule import describe, fill, holds, limit_of, spell
from stepguard.diagnose.rules import RULES
from stepguard.diagnose.source_line import name_operands
from stepguard.records import Certainty, Incident, Operand, Origin, Reading, Verdict

# --- order and certainty


def finding(code: str, certainty: Certainty = "certain") -> Found:
    return rule_of(code), Proof(certainty, "", {})


@pytest.mark.parametrize(
    ("unordered", "order"),
    [
        ([finding("SG101", "possible"), finding("SG703", "likely")], "SG703 SG101"),
        ([finding("SG402"), finding("SG103")], "SG103 SG402"),
        ([finding("SG201"), finding("SG302")], "SG302 SG201"),
        ([finding("SG201"), finding("SG302", "possible")], "SG201 SG302"),
        ([finding("SG201"), finding("SG301"), finding("SG505")], "SG505 SG301 SG201"),
    ],
    ids=["certainty", "code", "yields", "not to a less certain one", "yielding is passed on"],
)
def test_findings_go_by_certainty_then_by_what_they_yield_to_then_by_code(
    unordered: list[Found], order: str
) -> None:
    assert " ".join(rule.code for rule, _ in ranked(unordered)) == order


def test_no_rule_yields_to_itself_by_any_way_or_to_a_code_that_is_missing() -> None:
    yields_to = {rule.code: rule.yields_to for rule in RULES}
    for code in yields_to:
        reached: set[str] = set()
        todo = list(yields_to[code])
        while todo:
            one = todo.pop()
            if one not in reached:
                reached.add(one)
                todo.extend(yields_to[one])
        assert code not in reached


@pytest.mark.parametrize(
    ("how", "certainty"),
    [
        ({"method": "replay", "reproduced": True}, "certain"),
        ({"method": "live"}, "certain"),
        ({"method": "replay", "reproduced": False}, "likely"),
        ({"method": "output-gradient"}, "likely"),
        ({}, "likely"),
    ],
)
def test_only_an_operation_that_was_observed_is_certain(
    how: dict[str, Any], certainty: str
) -> None:
    where = at("loss", "div", spans(1.0, 2.0), x(0.0, 0.0, 1.0), zero_denominator=True, **how)
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


def test_at_most_a_few_findings_are_given() -> None:
    where = at("loss", reproduced=True, compiled_only=True, uninitialised=True, number=NAN)
    assert 1 < len(findings(where, bad_ranks=(0,))) <= MOST_FINDINGS


def test_the_way_of_a_nan_that_was_dropped_is_told() -> None:
    where = at("forward", "empty", uninitialised=True, discarded_by="aten.index")
    assert "aten.index dropped the NaN from the loss" in findings(where)[0].evidence[-1]


# --- questions that rules ask about a case


def case(where: Origin | None = None, **reading: Any) -> Case:
    verdict = Verdict(kind="nonfinite_loss", severity="incident")
    return Case(reading=Reading(step=7, **reading), verdict=verdict, origin=where)


def test_operation_and_node_are_named_without_decoration() -> None:
    for op, name in (
        ("aten._foreach_addcdiv_", "addcdiv"),
        ("aten.log", "log"),
        ("my::op", "my::op"),
    ):
        assert case(origin("forward", op)).op == name
    nodes = {"SqrtBackward0": "Sqrt", "torch::autograd::AccumulateGrad": "AccumulateGrad"}
    for node, name in nodes.items():
        assert case(origin("backward", None, node=node)).node == name


def test_a_case_without_origin_answers_harmlessly() -> None:
    empty = case()
    assert (empty.op, empty.node, empty.tensor, empty.phase, empty.inputs) == ("", "", "", "", ())
    assert empty.place == "the step" and not empty.operated


def test_place_names_operation_node_module_and_line() -> None:
    where = origin("backward", "aten.div", node="SqrtBackward0", module="act", source="a.py:3")
    assert case(where).place == "aten.div (SqrtBackward0) in act at a.py:3"


def test_of_a_list_argument_the_most_telling_tensor_is_taken() -> None:
    fine, zero = spans(1.0, 1.0, name="other[0]"), spans(0.0, 0.0, name="other[1]", zeros=1)
    listed = case(at("optimizer", "_foreach_div_", fine, zero))
    assert listed.argument("other") == zero
    assert listed.argument("exponent") is None


def test_the_bad_operand_is_an_input_before_the_output() -> None:
    bad = case(at("forward", "mul", spans(0.0, 1.0, nan=1), posinf=1)).bad_operand
    assert bad is not None and bad.name == "self"


def test_an_infinity_under_a_finite_loss_was_absorbed() -> None:
    where = at("forward", "exp", posinf=1)
    assert case(where, loss=0.5, grads_finite=False).absorbed
    assert not case(where, loss=math.inf, grads_finite=False).absorbed


# --- words


@pytest.mark.parametrize(
    ("operand", "words"),
    [
        (
            tensor("other", (4, 1), 0.0, 1.5, zeros=1, nan=2),
            "`other` (float32, shape (4, 1)) spans 0 to 1.5, with 2 of 4 elements NaN, "
            "1 of 4 elements zero",
        ),
        (tensor("x", (4,), 0.0, 0.0, zeros=4), "`x` (float32, shape (4,)) is 0"),
        (
            tensor("x", (2,), None, None, nan=2),
            "`x` (float32, shape (2,)), with 2 of 2 elements NaN",
        ),
        (number("eps", 1e-8), "`eps` is 1e-08"),
        (None, ""),
    ],
)
def test_operand_is_described_by_type_range_and_counts(operand: Operand | None, words: str) -> None:
    assert describe(operand) == words


KNOWN = tensor("x", (2,), -1.0, 1.0, index=(1,), value=-1.0)


@pytest.mark.parametrize(
    ("sentence", "names", "words"),
    [
        ("it is {x:element}", {"x": tensor("x", (2,), 0.0, 1.0)}, ""),
        ("it is {x:element}", {"x": KNOWN}, "it is -1 at index (1,)"),
        ("{x} and {y}", {"x": 0.0, "y": NAN}, "0 and nan"),
        ("`{x}`[? in {y}?]", {"x": 'b["{x}"]', "y": "{z}"}, '`b["{x}"]` in {z}'),
        ("{x}", {"x": ["a", "b", "c", "d", "e"]}, "a, b, c and 2 more"),
        ("{x}", {"x": (1.0, 0.5)}, "1, 0.5"),
    ],
    ids=["unknown", "known", "zero and nan", "what a user wrote", "many", "numbers"],
)
def test_sentence_is_filled_with_what_is_known(
    sentence: str, names: dict[str, Any], words: str
) -> None:
    assert fill(sentence, case(), names) == words


@pytest.mark.parametrize("unknown", [None, False, "", (), []])
def test_a_sentence_without_one_of_its_numbers_is_dropped(unknown: object) -> None:
    assert fill("step {reading.step}: {x}", case(), {"x": unknown}) == ""
    assert fill("step {reading.step}[?: {x}?]", case(), {"x": unknown}) == "step 7"
    assert fill("[?{x}|step {reading.step}?]", case(), {"x": unknown}) == "step 7"


def test_a_misspelt_field_is_an_error() -> None:
    with pytest.raises(AttributeError, match="evidense"):
        fill("{evidense.eps}", case(), {})


def test_a_condition_names_what_is_known_and_what_is_not() -> None:
    assert holds("", case(), {})
    assert holds("x, not y", case(), {"x": 0.0, "y": None})
    assert not holds("x, not y", case(), {"x": 0.0, "y": True})


def test_numbers_and_limits_are_short() -> None:
    said = [spell(value) for value in (None, 3.0, 0.1, 1e30, math.inf)]
    assert said == ["unknown", "3", "0.1", "1e+30", "inf"]
    assert limit_of("torch.float16") == "65504, the largest float16"
    assert limit_of("int4") == "the largest int4"


# --- operands carry the user's own expression, or the part they play; never torch's `self`

X, Y = spans(0.0, 1.0, name="self"), spans(0.0, 1.0, name="other")


def labels(op: str, line: str, *inputs: Operand, **more: str) -> list[str]:
    phase, source = more.get("phase", "loss"), more.get("source", "train.py:7")
    where = origin(phase, f"aten.{op}", *inputs, source=source, context=(f"7 {line}",))
    named = name_operands(where)
    return [operand.label for operand in named.inputs]


@pytest.mark.parametrize(
    ("op", "line", "inputs", "expected"),
    [
        ("div", "rate = total / count", (X, Y), ["total", "count"]),
        ("div_", "rate.div_(count)", (X, Y), ["rate", "count"]),
        ("log", 'loss = -torch.log(p["a"] + 1e-8)', (X,), ['p["a"] + 1e-8']),
        ("mul", "y = 2 * (a + b)", (X, number("other", 2.0)), ["a + b", "the second factor"]),
        ("rsub", "y = 1 - keep", (X, number("other", 1.0)), ["keep", "the first term"]),
        ("reciprocal", "y = 1 / width", (X,), ["width"]),
        ("bmm", "s = q @ k", (X, spans(0.0, 1.0, name="mat2")), ["q", "k"]),
        # torch takes the tensor first: which of two names it was cannot be told
        (
            "mul",
            "y = weight * loss",
            (X, number("other", 2.0)),
            ["the first factor", "the second factor"],
        ),
        ("_softmax", "w = attend(x)", (X, number("dim", -1)), ["the argument", ""]),
        ("_foreach_div_", "", (spans(0.0, 1.0, name="self[3]"),), ["the dividend of tensor 3"]),
    ],
)
def test_operand_is_called_what_the_line_calls_it(
    op: str, line: str, inputs: tuple[Operand, ...], expected: list[str]
) -> None:
    assert labels(op, line, *inputs) == expected


@pytest.mark.parametrize(
    "line",
    [
        "y = a / b + c / d",
        "y = F.normalize(a / b)",
        "y = a / (",
        "+ a / b",
        "y = a / 2.0",
        "y = policy.log_prob(a / b)",
        "",
        "y = a / " + "b" * 50,
    ],
    ids=["two of them", "library", "cut off", "continued", "number", "density", "no line", "long"],
)
def test_divisor_is_a_word_where_the_line_leaves_a_doubt(line: str) -> None:
    assert labels("div", line, X, Y)[1] == "the divisor"


def test_names_in_notebooks_slopes_and_stored_tensors() -> None:
    assert labels("log", "y = p.log()", X, source="cell [3], line 7") == ["p"]
    assert labels("div", "y = a / b", X, Y, phase="backward") == ["the dividend", "the divisor"]
    stored = spans(0.0, 1.0, name="buffer:centre")
    assert labels("sub", "y = out - self.centre", stored, phase="state") == [""]


# --- every cause that the README counts comes out of a real run: of the zoo, or of a test

ROOT = Path(__file__).parents[2]
NOT_COUNTED = {"SG803"}
"""A loss of 0 or a step without labels is a note: nothing is wrong with its numbers."""
ELSEWHERE = {
    "SG208": "benchmarks",
    "SG209": "locate",
    "SG701": "report",
    "SG702": "locate",
    "SG704": "distributed",
    "SG705": "distributed",
    "SG801": "engine",
}
"""Folders of tests whose real runs yield it: ranks, faults no replay shows, a launcher's dtype."""


def quiet(folder: Path | None = None, **settings: Any) -> GuardConfig:
    return config_of(terminal="quiet", run_dir=folder, **settings)


def codes(incident: Incident | None) -> list[str]:
    assert incident is not None
    return [finding.code for finding in incident.findings]


def test_sg506_a_scale_that_collapses() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def too_much_for_any_scale(x: Tensor) -> Tensor:
        return (model(x).half().float() * 2e5).sum()

    with Guard(model, optimizer, scaler=scaler, config=quiet()) as guard:
        for _ in range(6):
            guard.step(too_much_for_any_scale, torch.ones(2, 2))
        assert "SG506" in [code for incident in guard.incidents for code in codes(incident)]


def resumed(folder: Path, rates: tuple[float, float], **settings: Any) -> tuple[nn.Module, Guard]:
    """A run that saved a checkpoint, and a second one, with another rate, that loaded it."""
    for number_, rate in enumerate(rates):
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        guard = Guard(model, optimizer, config=quiet(folder, probation=1, **settings))
        if number_ == 0:
            for _ in range(4):
                guard.step(lambda x, net=model: net(x).pow(2).mean(), torch.ones(2, 2))
            assert guard.save() is not None
            guard.close()
    guard.restore()
    return model, guard


def test_sg603_a_checkpoint_that_brought_nan_in(tmp_path: Path) -> None:
    model, guard = resumed(tmp_path, (0.1, 0.1))
    with guard, torch.no_grad():
        next(model.parameters())[0, 0] = math.nan
        with torch.enable_grad():
            incident = guard.step(lambda x: model(x).pow(2).mean(), torch.ones(2, 2)).incident
    assert "SG603" in codes(incident)


def test_sg802_a_restored_rate_above_the_configured_one(tmp_path: Path) -> None:
    model, guard = resumed(tmp_path, (0.1, 0.001), resume_lr="checkpoint")
    with guard:
        bad = torch.full((2, 2), math.nan)
        incident = guard.step(lambda x: model(x).pow(2).mean(), bad).incident
    assert "SG802" in codes(incident)


def test_sg703_only_the_compiled_graph_is_bad() -> None:
    def wrong(graph: Any, inputs: Any) -> Any:
        return lambda *values: [out * math.nan for out in graph.forward(*values)]

    torch.compiler.reset()
    model: Any = torch.compile(nn.Linear(2, 1), backend=wrong)
    with Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), config=quiet()) as guard:
        incident = guard.step(lambda x: model(x).pow(2).mean(), torch.ones(2, 2)).incident
    torch.compiler.reset()
    assert "SG703" in codes(incident)


def test_every_counted_cause_has_a_real_run() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    zoo = [path.read_text(encoding="utf-8") for path in (ROOT / "zoo/scenes").glob("*.py")]
    counted = {rule.code for rule in RULES if not rule.code.startswith(HEALTHY_SERIES)}
    counted -= NOT_COUNTED
    missing = []
    for code in counted:
        if code in ELSEWHERE:
            tests = (ROOT / "tests" / ELSEWHERE[code]).rglob("test_*.py")
            occurs = any(code in path.read_text(encoding="utf-8") for path in tests)
        else:
            # the first code of a case is the one it is named for
            occurs = f"def test_{code.lower()}_" in here or any(
                re.search(rf'accepted=\("{code}"', text) for text in zoo
            )
        missing += [] if occurs else [code]
    assert missing == []
    assert f"one of {len(counted)} causes" in (ROOT / "README.md").read_text(encoding="utf-8")
