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
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepguard.locate.operands import broken, first_true, numeric, of_number, plain, summarise
from stepguard.records.incident import Evidence, Operand, Origin
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
PASSED_ON = (
    *("AddBackward0", "CloneBackward0", "ExpandBackward0", "IndexBackward0", "PermuteBackward0"),
    *("ReshapeAliasBackward0", "SelectBackward0", "SliceBackward0", "SqueezeBackward0"),
    *("SqueezeBackward1", "TBackward0", "TransposeBackward0", "UnsqueezeBackward0"),
    *("UnsafeViewBackward0", "ViewBackward0"),
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


Values = dict[str, Any]
Reader = Callable[[Values, Sources], Origin | None]
"""Finds that an operation cannot have a finite value at its operands, or (phase backward) that its
value is finite and its slope is not."""


READERS: dict[str, Reader] = {}
"""Nodes that show by what they keep whether their operation is the origin."""


def _reads(*ops: str) -> Callable[[Any], Any]:
    """Have the nodes of these operations read: `DivBackward0` of `div`."""

    def register(reader: Any) -> Any:
        for op in ops:
            READERS[f"{op.title().replace('_', '')}Backward0"] = partial(reader, op)
        return reader

    return register


def _singular(
    op: str,
    *inputs: Operand,
    output: Operand | None = None,
    slope: bool = False,
    remark: str = "",
    **facts: Any,
) -> Origin:
    return Origin(
        step=0,
        phase="backward" if slope else "loss",
        op=f"aten.{op}",
        inputs=inputs,
        output=output,
        evidence=Evidence(**facts),
        remarks=(*filter(None, [remark]), READ_FROM_GRAPH),
    )


def _at(values: Values, name: str, condition: Callable[[Tensor], Tensor]) -> Operand | None:
    """The tensor at its first element that meets the condition; None where no element does."""
    tensor = values.get(name)
    if not isinstance(tensor, Tensor):
        return None
    index = first_true(condition(tensor))
    if index is None:
        return None
    return summarise(name, tensor, index)


@_reads("div")
def _quotient(op: str, values: Values, sources: Sources) -> Origin | None:
    shown = _at(values, "other", lambda divisor: divisor == 0)
    if shown is None:
        return None
    divisor, above = plain(values["other"]), values.get("self")
    finite = divisor[torch.isfinite(divisor)]
    inputs = [shown]
    if above is not None:
        inputs = [summarise("self", above, shown.index), shown]
    return _singular(
        op,
        *inputs,
        zero_denominator=True,
        denominator_learned=sources[1] is not None,
        denominator_fractional=not bool((finite == finite.round()).all()),
    )


@_reads("log", "log2", "log10", "log1p")
def _argument(op: str, values: Values, sources: Sources) -> Origin | None:
    """A logarithm, whose argument has to be above a limit."""
    edge = -1.0 if op == "log1p" else 0.0
    shown = _at(values, "self", lambda argument: argument <= edge)
    if shown is None:
        return None
    return _singular(op, shown, argument="zero" if shown.value == edge else "negative")


@_reads("exp", "expm1", "sqrt", "rsqrt", "reciprocal")
def _result(op: str, values: Values, sources: Sources) -> Origin | None:
    """An operation that keeps its result; the slope of a root is infinite where that is 0."""
    shown = _at(values, "result", broken)
    if shown is not None:
        return _singular(op, output=shown)
    shown = _at(values, "result", lambda result: result == 0.0)
    if shown is None or op != "sqrt":
        return None
    return _singular(op, shown, slope=True, singular_at=0.0)


@_reads("pow")
def _power(op: str, values: Values, sources: Sources) -> Origin | None:
    exponent = values.get("exponent")
    if not isinstance(exponent, int | float):
        return None
    negative = None
    if exponent != int(exponent):
        negative = _at(values, "self", lambda base: base < 0)
    zero = _at(values, "self", lambda base: base == 0)
    given = of_number("exponent", float(exponent))
    if negative is not None:
        return _singular(op, negative, given, argument="negative")
    if zero is not None and exponent < 0:
        return _singular(op, zero, given, negative_power=True)
    if zero is not None and 0 < exponent < 1:
        return _singular(op, zero, given, slope=True, singular_at=0.0)
    return None


@_reads("acos", "asin")
def _inverse_cosine(op: str, values: Values, sources: Sources) -> Origin | None:
    shown = _at(values, "self", lambda argument: argument.abs() > 1)
    if shown is not None:
        return _singular(op, shown)
    shown = _at(values, "self", lambda argument: argument.abs() == 1)
    if shown is None:
        return None
    return _singular(op, shown, slope=True, singular_at=shown.value)


def _signed(number: int) -> int:
    """torch shows a negative number as the unsigned one of the same bits."""
    return number - (1 << 64) if number >= 1 << 63 else number


@_reads("std", "var")
def _spread(op: str, values: Values, sources: Sources) -> Origin | None:
    """A standard deviation or variance of fewer elements than it needs."""
    data = values.get("self")
    if data is None or not is_finite(data):
        return None
    axes = values.get("dim")
    correction = values.get("correction", 1)
    count = math.prod(data.shape[_signed(one)] for one in axes) if axes else data.numel()
    if count > correction:
        return None
    inputs = (summarise("self", data), of_number("correction", float(correction)))
    return _singular(op, *inputs, reduced_elements=count)


@_reads("nll_loss", "nll_loss2d")
def _labels(op: str, values: Values, sources: Sources) -> Origin | None:
    """A mean over targets of which none counts."""
    total, target = values.get("total_weight"), values.get("target")
    if total is None or values.get("reduction") != 1 or total.item() != 0.0:
        return None
    if target is None:
        return _singular("nll_loss_forward")
    ignored = _signed(values["ignore_index"])
    inputs = (summarise("target", target), of_number("ignore_index", float(ignored)))
    counted = int((target != ignored).sum())
    return _singular("nll_loss_forward", *inputs, valid_targets=counted, targets=target.numel())


@_reads("mean")
def _mean(op: str, values: Values, sources: Sources) -> Origin | None:
    if values.get("self_sym_numel") != 0:
        return None
    return _singular(op, reduced_elements=0)


@_reads(
    "mul",
    "mse_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)
def _constant_operand(op: str, values: Values, sources: Sources) -> Origin | None:
    """An operation that is defined everywhere, with a bad operand that no gradient flows into."""
    # a loss has a gradient for its scores alone, unless its targets want one too
    for names, source in zip((("self",), ("other", "target")), (*sources, None), strict=False):
        for name in names:
            value = values.get(name)
            if value is None or source is not None or not numeric(value):
                continue
            if not is_finite(value):
                return _singular(op, summarise(name, value), remark=CAME_IN)
    data = values.get("self")
    if "reduction" in values and isinstance(data, Tensor) and not data.numel():
        return _singular(op, summarise("self", data), reduced_elements=0)
    return None


READERS["MeanBackward1"] = READERS["MeanBackward0"]
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
                origin, phase="forward", output=came_out, reproduced=False, remarks=(NOT_AGAIN,)
            )
        for node in sorted(nodes, key=lambda one: one.sequence):
            reader = READERS.get(node.name)
            found = reader(node.values, node.sources) if reader and node.intact else None
            slope = found is not None and found.phase == "backward"
            # a slope matters only where the value itself did no harm
            if found is None or (slope and loss is not None):
                continue
            return replace(
                origin,
                phase=found.phase,
                op=found.op,
                node=node.name if slope else None,
                inputs=found.inputs,
                output=found.output,
                method="graph",
                micro_batch=index if len(expressions) > 1 else first,
                evidence=origin.evidence | _facts(found, node, nodes, loss),
                remarks=found.remarks,
            )
    return origin


def _facts(found: Origin, node: Saved, nodes: Expression, loss: float | None) -> Evidence:
    """Evidence of the operation, with what its place in the expression adds."""
    facts = found.evidence
    if facts.zero_denominator:
        facts |= Evidence(denominator_from=_made_by(node.sources[1], nodes))
    elif facts.argument is not None:
        facts |= Evidence(argument_from=_made_by(node.sources[0], nodes))
    if loss is None and found.phase == "loss":
        facts |= Evidence(unselected=_deselected(node, nodes))
    elif node.name == "DivBackward0" and loss is not None and math.isnan(loss):
        # x / 0 is infinite unless x is 0 too
        facts |= Evidence(zero_numerator=_leads(node, nodes))
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
            # Nodes that gather the gradient of a leaf have the largest number there is
            if source is None or source in made_here or source >= (1 << 63):
                continue
            for value in map(node.values.get, names):
                if value is not None and numeric(value) and node.intact and not is_finite(value):
                    return summarise("the model's output", value)
    return None
