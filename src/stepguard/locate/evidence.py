"""Measure the operation that made a bad value: its operands, and the facts that rules ask for.

Measured while the tensors are alive, since the trace keeps none of them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from stepguard.locate import row_evidence
from stepguard.locate.attribution import Read
from stepguard.locate.bad_op import BadOp
from stepguard.locate.calls import Call, real_maker
from stepguard.locate.finite import numeric, plain
from stepguard.locate.operands import Index, broadcast_index, of_number, summarise
from stepguard.records.evidence import NO_EVIDENCE, Evidence
from stepguard.records.origin import Operand
from stepguard.tensors.dtypes import dtype_name
from stepguard.tensors.torch_private import tree_map
from stepguard.tensors.values import is_finite

MOST_OPERANDS = 6
HUGE = 1e15
"""Half of float32's exponent range: a square overflows, or nearly does."""
EPSILON_DEPTH = 4
"""How many operations back an epsilon that vanished is looked for."""
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}
HALF = (torch.float16, torch.bfloat16)

DIVIDES = {
    "div": "other",
    "true_divide": "other",
    "reciprocal": "self",
    "addcdiv": "tensor2",
    "rsqrt": "self",
}
"""Operation -> the argument it divides by."""
DIVIDED = {"div": "self", "true_divide": "self", "addcdiv": "tensor1"}
"""Operation -> the argument that is divided; the others divide 1."""
ARGUMENT = {
    "log": "self",
    "log2": "self",
    "log10": "self",
    "log1p": "self",
    "xlogy": "other",
    "logit": "self",
    "sqrt": "self",
    "rsqrt": "self",
    "pow": "self",
}
"""Operation -> the argument that must be positive."""
DOMAIN = ("acos", "asin", "acosh", "atanh", "erfinv")


def measure(bad_op: BadOp) -> None:
    """Fill the operands, the output and the evidence of the call."""
    call = bad_op.call
    index = bad_op.index
    operands = [_operand(bad_op, read, index) for read in bad_op.reads[:MOST_OPERANDS]]
    operands += [of_number(name, value) for name, value in bad_op.numbers[:MOST_OPERANDS]]
    call.inputs = tuple(operands)
    call.output = summarise("out", bad_op.out, index)
    evidence = call.evidence
    if call.number is not None:
        argument, value = call.number
        evidence |= Evidence(number_argument=argument, number=value)
    for gather in (
        _division,
        _argument,
        _infinities,
        _gradient,
        row_evidence.rows,
        _precision,
        _stored_huge,
    ):
        evidence |= gather(bad_op)
    call.evidence = evidence


def _operand(bad_op: BadOp, read: Read, index: Index | None) -> Operand:
    """The tensor in numbers, with the element that met the bad one where that is known."""
    shape = tuple(read.tensor.shape)
    spot = None
    if index is not None and (bad_op.operator.pointwise or shape == tuple(bad_op.out.shape)):
        spot = broadcast_index(index, shape)
    return summarise(read.name, read.tensor, spot)


def _division(bad_op: BadOp) -> Evidence:
    name = DIVIDES.get(bad_op.operator.base)
    if name is None or bad_op.at(name) != 0.0:
        return NO_EVIDENCE
    above = DIVIDED.get(bad_op.operator.base)
    found = Evidence(
        zero_denominator=True,
        denominator_from=_computed_by(bad_op, name),
        denominator_root=_only_batch_tensor(bad_op, name),
        eps_vanished=_vanished_epsilon(bad_op, name),
    )
    if above is not None and bad_op.at(above) == 0.0:
        found |= Evidence(zero_numerator=True, numerator_from=_computed_by(bad_op, above))
    read = bad_op.read(name)
    if read is None:
        return found
    fractional = numeric(read.tensor) and not _whole(read.tensor)
    return found | Evidence(
        denominator_learned=_learned(read.maker), denominator_fractional=fractional
    )


def _learned(maker: Call) -> bool:
    """Was it computed from parameters without a comparison in between (as counting has)?"""
    seen: set[int] = set()
    stack = [maker]
    while stack:
        one = stack.pop()
        if id(one) in seen or not one.numeric:
            continue
        if one.op.startswith("param:"):
            return True
        seen.add(id(one))
        stack.extend(one.parents)
    return False


def _whole(tensor: Tensor) -> bool:
    """Are all finite elements whole numbers, as counts are?"""
    values = plain(tensor)
    values = values[torch.isfinite(values)]
    return bool((values == values.round()).all())


def _argument(bad_op: BadOp) -> Evidence:
    """The argument of a logarithm, root or power that is outside its domain."""
    base = bad_op.operator.base
    name = "self" if base in DOMAIN else ARGUMENT.get(base)
    if name is None:
        return NO_EVIDENCE
    value = bad_op.at(name)
    if value is None:
        return NO_EVIDENCE
    found = NO_EVIDENCE if base in DOMAIN else _beyond_domain(bad_op, value)
    if found is None:
        return NO_EVIDENCE
    return found | _argument_lineage(bad_op, name)


def _beyond_domain(bad_op: BadOp, value: float) -> Evidence | None:
    """How the argument leaves the domain; None where it is inside."""
    base = bad_op.operator.base
    if base == "pow":
        return _power_of(bad_op, value)
    edge = -1.0 if base == "log1p" else 0.0
    if value == edge:
        return Evidence(argument="zero")
    return Evidence(argument="negative") if value < edge else None


def _power_of(bad_op: BadOp, base: float) -> Evidence | None:
    if base == 0.0:
        power = bad_op.at("exponent")
        falls = power is not None and power < 0
        return Evidence(negative_power=True) if falls else None
    # a large negative base overflows like a positive one: no root is missing where it gives inf
    if base < 0.0 and bad_op.call.out.nan:
        return Evidence(argument="negative")
    return None


def _argument_lineage(bad_op: BadOp, name: str) -> Evidence:
    return Evidence(
        argument_from=_computed_by(bad_op, name),
        argument_root=_only_batch_tensor(bad_op, name),
        eps_vanished=_vanished_epsilon(bad_op, name),
    )


def _infinities(bad_op: BadOp) -> Evidence:
    """Infinities that went in: written on purpose (a mask), times 0, or minus one another."""
    constants = [value for _, value in bad_op.numbers]
    masked = any(read.intended_inf and read.flaws for read in bad_op.reads)
    intended = Evidence(intended_inf=masked or any(map(math.isinf, constants)))
    met = [bad_op.at(read.name) for read in bad_op.reads] + constants
    if not any(value is not None and math.isinf(value) for value in met):
        return intended
    base = bad_op.operator.base
    return intended | Evidence(
        zero_times_inf=base == "mul" and 0.0 in met, inf_minus_inf=base in ("add", "sub")
    )


def _gradient(bad_op: BadOp) -> Evidence:
    """In the backward: the gradient that came in, and the point at which the derivative breaks."""
    call = bad_op.call
    if call.stage != "backward" or call.node is None or not bad_op.operator.pointwise:
        return NO_EVIDENCE
    found = NO_EVIDENCE
    for read in bad_op.reads:
        value = bad_op.at(read.name)
        if value is None:
            continue
        # another node made it, so it is the gradient, not a value that the forward saved
        came_in = read.maker.stage == "backward" and read.maker.sequence != call.sequence
        if came_in:
            found |= Evidence(zero_upstream_gradient=value == 0.0)
        elif math.isfinite(value):
            found |= Evidence(singular_at=value)
    return found


def _precision(bad_op: BadOp) -> Evidence:
    """Is the same operation finite in a wider dtype? Then the number format is what broke it."""
    kinds = {read.tensor.dtype for read in bad_op.reads if numeric(read.tensor)}
    kinds.add(bad_op.out.dtype)
    found = Evidence(half_precision=bool(kinds & set(HALF)))
    wider = WIDER.get(bad_op.out.dtype)
    if wider is None or any(read.flaws for read in bad_op.reads):
        return found
    found |= Evidence(dtype_limit=float(torch.finfo(bad_op.out.dtype).max))
    if bad_op.operator.custom:
        # The user's own kernel is not ours to run again.
        return found
    again = _widened(bad_op, wider)
    if again is not None and is_finite(again):
        found |= Evidence(finite_in=dtype_name(again.dtype))
    return found


def _stored_huge(bad_op: BadOp) -> Evidence:
    """Which stored tensor went in with values that one more product overflows?"""
    for read, operand in zip(bad_op.reads, bad_op.call.inputs, strict=False):
        maker = real_maker(read.maker).op
        reach = max(abs(operand.min or 0.0), abs(operand.max or 0.0))
        if maker.startswith("param:") and operand.finite and reach >= HUGE:
            return Evidence(huge_parameter=maker)
    return NO_EVIDENCE


def _widened(bad_op: BadOp, wider: torch.dtype) -> Tensor | None:
    """The result of the same call in a wider dtype; None where torch has no kernel for it."""

    def widen(value: Any) -> Any:
        if isinstance(value, torch.dtype) and value.is_floating_point:
            return wider
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(wider, copy=True)
        return value

    made = bad_op.invocation
    try:
        result = made.func(*tree_map(widen, made.args), **tree_map(widen, made.kwargs))
    except (RuntimeError, NotImplementedError, TypeError):
        # an operator without a kernel of that dtype: then nothing is known of a wider one
        return None
    parts = result if isinstance(result, list | tuple) else [result]
    for part in parts:
        if isinstance(part, Tensor) and part.shape == bad_op.out.shape:
            return plain(part)
    return None


def _computed_by(bad_op: BadOp, name: str) -> str | None:
    """The operation that computed this operand; None for a stored tensor."""
    read = bad_op.read(name)
    if read is None:
        return None
    maker = _before_epsilon(real_maker(read.maker))
    if maker.stage == "stored":
        return None
    return maker.op


def _only_batch_tensor(bad_op: BadOp, name: str) -> str | None:
    """The batch tensor this operand was computed from, if from nothing else that is stored."""
    read = bad_op.read(name)
    if read is None:
        return None
    maker = _before_epsilon(real_maker(read.maker))
    roots = {root.op for root in _stored_roots(maker) if not root.op.startswith("constant")}
    if len(roots) != 1:
        return None
    root = roots.pop()
    if root.startswith("batch:"):
        return root
    return None


def _vanished_epsilon(bad_op: BadOp, name: str) -> float | None:
    """An epsilon on the way to this operand that its dtype could not hold."""
    read = bad_op.read(name)
    level = [read.maker] if read is not None else []
    for _ in range(EPSILON_DEPTH):
        for call in level:
            if call.rounded_to_zero is not None:
                return call.rounded_to_zero
        level = [parent for call in level for parent in call.parents]
    return None


def _before_epsilon(maker: Call) -> Call:
    """The call behind added constants; one that its dtype could not hold is reported by itself.

    So is the probability behind `1 - p`.
    """
    while len(maker.parents) == 1 and maker.rounded_to_zero is None:
        behind = real_maker(maker.parents[0])
        inverse = maker.op == "aten.rsub" and behind.op in ("aten.sigmoid", "aten._softmax")
        if maker.op not in ("aten.add", "aten.add_") and not inverse:
            break
        maker = behind
    return maker


def _stored_roots(call: Call) -> list[Call]:
    seen: set[int] = set()
    stack = [call]
    roots = []
    while stack:
        one = stack.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if one.stage == "stored":
            roots.append(one)
        stack.extend(one.parents)
    return roots
