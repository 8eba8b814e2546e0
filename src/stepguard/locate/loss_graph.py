"""Read the loss expression of a watched loop from its autograd graph, which no replay reaches.

The part of the graph between the model's outputs and the loss is small, and its nodes keep what
their slopes need: a divisor, the argument of a logarithm, the total weight of the targets. That is
held from the beginning of the backward pass, which releases it, to the end of the step, as it is:
nothing is copied, computed or waited for before a step is bad.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepguard.locate.operands import (
    Index,
    broken,
    first_true,
    numeric,
    of_number,
    plain,
    summarise,
)
from stepguard.records.incident import NO_EVIDENCE, Evidence, Operand, Origin
from stepguard.tensors.values import VERSION, is_finite

READ_FROM_GRAPH = (
    "outside the model: read from the autograd graph of the loss, which has no source lines; "
    "`guard.loss(loss_fn, batch)` would locate the line"
)


Sources = tuple[int | None, ...]
CAME_IN = (
    "the bad value went into this operation: it was computed before, without a gradient (a target, "
    "a weight, an advantage, a mask)"
)
NOT_AGAIN = (
    "the model's output was non-finite when the loss read it, and is finite now that the same call "
    "was replayed"
)
SELECTIONS = ("WhereBackward", "MaskedFillBackward", "MaskedSelectBackward", "IndexBackward")
LEAF = 1 << 63
"""Nodes that gather the gradient of a leaf have the largest number there is."""
PASSED_ON = frozenset(
    f"{name}Backward0"
    for name in [
        "Add",
        "Clone",
        "Expand",
        "Index",
        "Permute",
        "ReshapeAlias",
        "Select",
        "Slice",
        "Squeeze",
        "T",
        "Transpose",
        "Unsqueeze",
        "UnsafeView",
        "View",
    ]
)
"""Nodes behind which is looked for what made an operand; of a sum only with a constant."""
FACTORS = frozenset({"MulBackward0", "DivBackward0", "NegBackward0", "ToCopyBackward0"})
"""Nodes that pass a NaN on as it is, between an operation and the loss."""


class Saved(NamedTuple):
    """One autograd node of the loss expression, with what it keeps for its slope."""

    name: str
    """`DivBackward0`."""
    sequence: int
    """Nodes are numbered in the order in which their operations ran."""
    values: dict[str, Any]
    """By the name of the argument; `result` is the output."""
    versions: list[int]
    """Version counters of the tensors among `values`, when they were held."""
    sources: Sources
    """Sequence numbers of what made its operands; None for one that no gradient flows into."""

    @property
    def intact(self) -> bool:
        """Has nothing written to the kept tensors since?"""
        tensors = [one for one in self.values.values() if isinstance(one, Tensor)]
        return self.versions == list(map(VERSION, tensors))


Expression = list[Saved]


# --- What each kind of node shows about the operation that made it.


@dataclass(frozen=True, slots=True)
class Singular:
    """An operation that cannot have a finite value, or slope, at its operands."""

    op: str
    inputs: tuple[Operand, ...]
    output: Operand | None = None
    evidence: Evidence = NO_EVIDENCE
    slope_only: bool = False
    """The value is finite, its slope is not."""
    remark: str = ""


Reader = Callable[[dict[str, Any], Sources], Singular | None]


def _at(name: str, tensor: Tensor, where: Tensor) -> Operand | None:
    """The tensor at the first element that meets the condition; None where no element does."""
    index: Index | None = first_true(where)
    return None if index is None else summarise(name, tensor, index)


def _quotient(values: dict[str, Any], sources: Sources) -> Singular | None:
    divisor, above = values.get("other"), values.get("self")
    if divisor is None:
        return None
    shown = _at("other", divisor, divisor == 0)
    if shown is None:
        return None
    finite = plain(divisor)[torch.isfinite(plain(divisor))]
    facts = Evidence(
        zero_denominator=True,
        denominator_learned=sources[1] is not None,
        denominator_fractional=not bool((finite == finite.round()).all()),
    )
    above_it = () if above is None else (summarise("self", above, shown.index),)
    return Singular("div", (*above_it, shown), evidence=facts)


def _argument(op: str, edge: float) -> Reader:
    """An operation whose argument has to be above `edge`."""

    def read(values: dict[str, Any], sources: Sources) -> Singular | None:
        argument = values.get("self")
        if argument is None:
            return None
        shown = _at("self", argument, argument <= edge)
        if shown is None:
            return None
        facts = Evidence(argument="zero" if shown.value == edge else "negative")
        return Singular(op, (shown,), evidence=facts)

    return read


def _result(op: str, pole: float | None = None) -> Reader:
    """An operation that keeps its result; where that is `pole` its slope is infinite."""

    def read(values: dict[str, Any], sources: Sources) -> Singular | None:
        result = values.get("result")
        if result is None:
            return None
        shown = _at("result", result, broken(result))
        if shown is not None:
            return Singular(op, (), shown)
        shown = None if pole is None else _at("result", result, result == pole)
        if shown is None:
            return None
        return Singular(op, (shown,), evidence=Evidence(singular_at=pole), slope_only=True)

    return read


def _power(values: dict[str, Any], sources: Sources) -> Singular | None:
    base, exponent = values.get("self"), values.get("exponent")
    if not isinstance(base, Tensor) or not isinstance(exponent, int | float):
        return None
    inputs = of_number("exponent", float(exponent))
    if exponent != int(exponent) or exponent < 0:
        shown = _at("self", base, base < 0) if exponent != int(exponent) else None
        facts = Evidence(argument="negative")
        if shown is None and exponent < 0:
            shown, facts = _at("self", base, base == 0), Evidence(negative_power=True)
        if shown is not None:
            return Singular("pow", (shown, inputs), evidence=facts)
    shown = _at("self", base, base == 0) if 0 < exponent < 1 else None
    if shown is None:
        return None
    return Singular("pow", (shown, inputs), evidence=Evidence(singular_at=0.0), slope_only=True)


def _inverse_cosine(op: str) -> Reader:
    def read(values: dict[str, Any], sources: Sources) -> Singular | None:
        argument = values.get("self")
        if argument is None:
            return None
        shown = _at("self", argument, argument.abs() > 1)
        if shown is not None:
            return Singular(op, (shown,))
        shown = _at("self", argument, argument.abs() == 1)
        if shown is None:
            return None
        facts = Evidence(singular_at=shown.value)
        return Singular(op, (shown,), evidence=facts, slope_only=True)

    return read


def _spread(op: str) -> Reader:
    """A standard deviation or variance of fewer elements than it needs."""

    def read(values: dict[str, Any], sources: Sources) -> Singular | None:
        data = values.get("self")
        if data is None or not is_finite(data):
            return None
        axes = values.get("dim")
        correction = values.get("correction", 1)
        sizes = data.shape if not axes else [data.shape[_axis(one, data.dim())] for one in axes]
        count = math.prod(sizes)
        if count > correction:
            return None
        inputs = (summarise("self", data), of_number("correction", float(correction)))
        return Singular(op, inputs, evidence=Evidence(reduced_elements=count))

    return read


def _axis(number: int, dimensions: int) -> int:
    """torch shows a negative axis as the unsigned number of the same bits."""
    return number - (1 << 64) if number >= dimensions else number


def _labels(values: dict[str, Any], sources: Sources) -> Singular | None:
    """A mean over targets of which none counts."""
    total, target = values.get("total_weight"), values.get("target")
    if total is None or values.get("reduction") != 1 or total.item() != 0.0:
        return None
    inputs = []
    facts = NO_EVIDENCE
    if target is not None:
        ignored = values["ignore_index"]
        ignored -= (1 << 64) if ignored >= (1 << 63) else 0
        counted = int((target != ignored).sum())
        inputs = [summarise("target", target), of_number("ignore_index", float(ignored))]
        facts = Evidence(valid_targets=counted, targets=target.numel())
    return Singular("nll_loss_forward", tuple(inputs), evidence=facts)


def _mean(values: dict[str, Any], sources: Sources) -> Singular | None:
    if values.get("self_sym_numel") != 0:
        return None
    return Singular("mean", (), evidence=Evidence(reduced_elements=0))


def _constant_operand(op: str, second: str) -> Reader:
    """An operation that is defined everywhere, with a bad operand that no gradient flows into."""

    def read(values: dict[str, Any], sources: Sources) -> Singular | None:
        # a loss has a gradient for its scores alone, unless its targets want one too
        for name, source in zip(("self", second), (*sources, None), strict=False):
            value = values.get(name)
            if value is None or source is not None or not numeric(value):
                continue
            if not is_finite(value):
                return Singular(op, (summarise(name, value),), remark=CAME_IN)
        data = values.get("self")
        if "reduction" in values and isinstance(data, Tensor) and not data.numel():
            return Singular(op, (summarise("self", data),), evidence=Evidence(reduced_elements=0))
        return None

    return read


READERS: dict[str, Reader] = {
    "DivBackward0": _quotient,
    "LogBackward0": _argument("log", 0.0),
    "Log2Backward0": _argument("log2", 0.0),
    "Log10Backward0": _argument("log10", 0.0),
    "Log1PBackward0": _argument("log1p", -1.0),
    "ExpBackward0": _result("exp"),
    "Expm1Backward0": _result("expm1"),
    "SqrtBackward0": _result("sqrt", 0.0),
    "RsqrtBackward0": _result("rsqrt"),
    "ReciprocalBackward0": _result("reciprocal"),
    "PowBackward0": _power,
    "AcosBackward0": _inverse_cosine("acos"),
    "AsinBackward0": _inverse_cosine("asin"),
    "StdBackward0": _spread("std"),
    "VarBackward0": _spread("var"),
    "NllLossBackward0": _labels,
    "NllLoss2DBackward0": _labels,
    "MeanBackward0": _mean,
    "MeanBackward1": _mean,
    "MulBackward0": _constant_operand("mul", "other"),
    "MseLossBackward0": _constant_operand("mse_loss", "target"),
    "SmoothL1LossBackward0": _constant_operand("smooth_l1_loss", "target"),
    "HuberLossBackward0": _constant_operand("huber_loss", "target"),
    "BinaryCrossEntropyBackward0": _constant_operand("binary_cross_entropy", "target"),
    "BinaryCrossEntropyWithLogitsBackward0": _constant_operand(
        "binary_cross_entropy_with_logits", "target"
    ),
}
"""Nodes that show by what they keep whether their operation is the origin."""
READ = frozenset(
    {
        *("self", "other", "target", "result", "exponent", "dim", "correction"),
        *("total_weight", "reduction", "ignore_index", "self_sym_numel"),
    }
)
"""What readers ask of a node; a kernel keeps more than that, and every value costs time."""
SELF_UNREAD = frozenset({"NllLossBackward0", "NllLoss2DBackward0"})
"""Their `self` shows only whether the model's output was bad, where it is the model's output."""


def read_origin(origin: Origin, expressions: Sequence[Expression], *, loss: float | None) -> Origin:
    """The first operation of the loss expression that could not stay finite, if one shows.

    `origin`: what the replay of the model's part knows, that the bad value came from outside it.
    `loss`: of the step, where it is bad.
    """
    first = origin.micro_batch
    for index, nodes in enumerate(expressions):
        if first is not None and index != first:
            continue
        came_out = _bad_output(nodes)
        if came_out is not None:
            return replace(
                origin,
                phase="forward",
                output=came_out,
                reproduced=False,
                remarks=(NOT_AGAIN,),
            )
        for node in sorted(nodes, key=lambda one: one.sequence):
            reader = READERS.get(node.name)
            found = reader(node.values, node.sources) if reader and node.intact else None
            # a slope matters only where the value itself did no harm
            if found is None or (found.slope_only and loss is not None):
                continue
            facts = _facts(found, node, nodes, loss)
            remarks = (found.remark, READ_FROM_GRAPH) if found.remark else (READ_FROM_GRAPH,)
            return replace(
                origin,
                phase="backward" if found.slope_only else "loss",
                op=f"aten.{found.op}",
                node=node.name if found.slope_only else None,
                inputs=found.inputs,
                output=found.output,
                method="graph",
                micro_batch=index if len(expressions) > 1 else first,
                evidence=origin.evidence | facts,
                remarks=remarks,
            )
    return origin


def _facts(found: Singular, node: Saved, nodes: Expression, loss: float | None) -> Evidence:
    """Evidence of the operation, with what its place in the expression adds."""
    facts = found.evidence
    if facts.zero_denominator:
        facts |= Evidence(denominator_from=_made_by(node.sources[1], nodes))
    elif facts.argument is not None:
        facts |= Evidence(argument_from=_made_by(node.sources[0], nodes))
    if found.op == "div" and loss is not None and math.isnan(loss):
        # x / 0 is infinite unless x is 0 too
        facts |= Evidence(zero_numerator=_leads(node, nodes))
    if loss is None and not found.slope_only:
        facts |= Evidence(unselected=_deselected(node, nodes))
    return facts


def _made_by(sequence: int | None, nodes: Expression) -> str | None:
    """The operation that made an operand; None where it is not in the expression."""
    known = {node.sequence: node for node in nodes}
    while sequence in known:
        node = known[sequence]
        sources = [one for one in node.sources if one is not None]
        if node.name not in PASSED_ON or len(sources) != 1:
            name = re.sub(r"(?<!^)(?=[A-Z])", "_", node.name.partition("Backward")[0]).lower()
            return f"aten._{name}" if name.endswith("softmax") else f"aten.{name}"
        sequence = sources[0]
    return None


def _leads(wanted: Saved, nodes: Expression) -> bool:
    """Is there nothing but a factor between the operation and the loss?"""
    for node in nodes:
        if node is wanted:
            return True
        if node.name not in FACTORS or len(node.sources) - node.sources.count(None) != 1:
            break
    return False


def _deselected(wanted: Saved, nodes: Expression) -> bool:
    """Does what the operation made run into a selection, which takes other elements of it?"""
    reached = {wanted.sequence}
    for node in sorted(nodes, key=lambda one: one.sequence):
        if not reached.isdisjoint(node.sources):
            if node.name.startswith(SELECTIONS):
                return True
            reached.add(node.sequence)
    return False


def _bad_output(nodes: Expression) -> Operand | None:
    """What the model returned, if it was bad when the loss was computed from it."""
    made_here = {node.sequence for node in nodes}
    for node in nodes:
        for names, source in zip((("self",), ("other", "target")), node.sources, strict=False):
            if source is None or source in made_here or source >= LEAF:
                continue
            for value in map(node.values.get, names):
                if value is not None and numeric(value) and node.intact and not is_finite(value):
                    return summarise("the model's output", value)
    return None
