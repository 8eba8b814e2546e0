"""Numbers at the birth of a bad value: operands, and the facts the rules on causes ask for (see
`facts`).

Measured while the tensors are alive, since the trace keeps none of them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from stepguard.locate import row_evidence
from stepguard.locate.bad_op import Birth
from stepguard.locate.calls import Call, real_maker
from stepguard.locate.facts import fact
from stepguard.locate.finite import numeric, plain
from stepguard.locate.operands import (
    broadcast_index,
    of_number,
    summarise,
)
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
DOMAIN = ("acos", "asin", "acosh", "atanh", "erfinv")
GROWS = {"exp": "self", "exp2": "self", "expm1": "self", "sinh": "self", "cosh": "self"}


def measure(birth: Birth) -> None:
    """Fill the call's operands and notes."""
    call, index = birth.call, birth.index
    pointwise = birth.operator.pointwise
    operands = []
    for read in birth.reads[:MOST_OPERANDS]:
        spot = None
        if index is not None and (pointwise or tuple(read.tensor.shape) == tuple(birth.out.shape)):
            spot = broadcast_index(index, tuple(read.tensor.shape))
        operands.append(summarise(read.name, read.tensor, spot))
    operands += [of_number(name, value) for name, value in birth.numbers[:MOST_OPERANDS]]
    call.inputs = tuple(operands)
    call.output = summarise("out", birth.out, index)
    broken = call.output.nan + call.output.posinf + call.output.neginf
    call.notes.append(fact("bad", f"{broken}/{max(1, birth.out.numel())}"))
    if call.number is not None:
        call.notes.append(fact("number", call.number))
    for gather in (
        _division,
        _argument,
        _growth,
        _infinities,
        _gradient,
        row_evidence.rows,
        _precision,
        _stored_huge,
    ):
        call.notes += gather(birth)


def _division(birth: Birth) -> list[str]:
    name = DIVIDES.get(birth.operator.base)
    below = birth.at(name) if name else None
    if name is None or below is None:
        return []
    if below != 0.0:
        return [fact("denominator_value", below)] if abs(below) < 1e-6 else []
    notes = [fact("denominator", "zero"), *_lineage(birth, name, "denominator")]
    read = birth.read(name)
    if read is not None and _learned(read.maker):
        notes.append("denominator_learned")
    if read is not None and numeric(read.tensor) and not _whole(read.tensor):
        notes.append("denominator_fractional")
    above = birth.at("tensor1" if name == "tensor2" else "self") if name != "self" else None
    return [*notes, fact("numerator", "zero")] if above == 0.0 else notes


def _learned(maker: Call) -> bool:
    """Was it computed from parameters, with no comparison in between? A count of predictions has
    one.
    """
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


def _vanished(maker: Call) -> list[str]:
    """An epsilon on the way to this operand that its dtype could not hold."""
    level = [maker]
    for _ in range(EPSILON_DEPTH):
        for call in level:
            if call.rounded_to_zero is not None:
                return [fact("eps_vanished", call.rounded_to_zero)]
        level = [parent for call in level for parent in call.parents]
    return []


def _argument(birth: Birth) -> list[str]:
    base = birth.operator.base
    if base in DOMAIN:
        value = birth.at("self")
        return (
            [fact("out_of_domain", value), *_lineage(birth, "self", "argument")]
            if value is not None
            else []
        )
    name = ARGUMENT.get(base)
    value = birth.at(name) if name else None
    if name is None or value is None:
        return []
    edge = -1.0 if base == "log1p" else 0.0
    if value > edge or math.isnan(value):
        return []
    if base == "pow" and value == 0.0:
        power = birth.at("exponent")
        return (
            ["negative_power", *_lineage(birth, name, "argument")]
            if power is not None and power < 0
            else []
        )
    if base == "pow" and not birth.call.out.nan:
        return []  # a large negative base overflows like a positive one
    notes = [
        fact("argument", "zero" if value == edge else "negative"),
        fact("argument_value", value),
    ]
    return notes + _lineage(birth, name, "argument")


def _growth(birth: Birth) -> list[str]:
    name = GROWS.get(birth.operator.base)
    value = birth.at(name) if name else None
    if name is None or value is None or not math.isfinite(value) or birth.call.out.nan:
        return []
    return [fact("exponent", value), *_lineage(birth, name, "exponent")]


def _infinities(birth: Birth) -> list[str]:
    values = [v for v in (birth.at(read.name) for read in birth.reads) if v is not None]
    values += [value for _, value in birth.numbers]
    infinite = any(map(math.isinf, values))
    constant = any(math.isinf(value) for _, value in birth.numbers)
    notes = ["tame_inf"] if constant or any(r.intended_inf and r.flaws for r in birth.reads) else []
    if infinite and birth.operator.base == "mul" and 0.0 in values:
        notes.append("zero_times_inf")
    if infinite and birth.operator.base in ("add", "sub"):
        notes.append("inf_minus_inf")
    return notes


def _gradient(birth: Birth) -> list[str]:
    """In the backward pass: the gradient that came in, and the point at which the derivative
    breaks.
    """
    call = birth.call
    if call.stage != "backward" or call.node is None:
        return []
    notes: list[str] = []
    for read in birth.reads if birth.operator.pointwise else ():
        came_in = read.maker.stage == "backward" and read.maker.sequence != call.sequence
        value = birth.at(read.name)
        if came_in and value == 0.0:
            notes.append(fact("upstream_grad", "zero"))
        elif not came_in and value is not None and math.isfinite(value):
            notes.append(fact("singular_at", value))
    return notes


def _precision(birth: Birth) -> list[str]:
    """Is the same operation finite in a wider dtype? Then the number format is what broke it."""
    tensors = [r.tensor for r in birth.reads if numeric(r.tensor)]
    kinds = {t.dtype for t in [*tensors, birth.out]}
    notes = ["half"] if kinds & set(HALF) else []
    wider = WIDER.get(birth.out.dtype)
    if wider is None or any(r.flaws for r in birth.reads):
        return notes
    notes.append(fact("dtype_limit", float(torch.finfo(birth.out.dtype).max)))
    again = _widened(birth, wider)
    if again is not None and is_finite(again):
        notes.append(fact("finite_in", dtype_name(again.dtype)))
    return notes


def _stored_huge(birth: Birth) -> list[str]:
    """Which stored tensor went in with values that one more product overflows."""
    for read, operand in zip(birth.reads, birth.call.inputs, strict=False):
        maker = real_maker(read.maker).op
        reach = max(abs(operand.min or 0.0), abs(operand.max or 0.0))
        if maker.startswith("param:") and operand.finite and reach >= HUGE:
            return [fact("huge", maker)]
    return []


def _widened(birth: Birth, wider: torch.dtype) -> Tensor | None:
    def widen(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return wider if value.is_floating_point else value
        return (
            value.to(wider, copy=True)
            if isinstance(value, Tensor) and value.is_floating_point()
            else value
        )

    try:
        made = birth.made_by
        result = made.func(*tree_map(widen, made.args), **tree_map(widen, made.kwargs))
    except (
        RuntimeError,
        NotImplementedError,
        TypeError,
    ):  # no kernel for the wider dtype: then it stays unknown
        return None
    parts = result if isinstance(result, list | tuple) else [result]
    same = [p for p in parts if isinstance(p, Tensor) and p.shape == birth.out.shape]
    return plain(same[0]) if same else None


def _lineage(birth: Birth, name: str, role: str) -> list[str]:
    """Who computed this operand, and from which stored tensor if only from one kind of it."""
    read = birth.read(name)
    if read is None:
        return []
    maker = _before_epsilon(real_maker(read.maker))
    notes = [fact(f"{role}_from", maker.op)] if maker.stage != "stored" else []
    roots = {root.op for root in _stored_roots(maker) if not root.op.startswith("constant")}
    if len(roots) == 1 and next(iter(roots)).startswith("batch:"):
        notes.append(fact(f"{role}_root", next(iter(roots))))
    return notes + _vanished(read.maker)


def _before_epsilon(maker: Call) -> Call:
    """Behind a constant that was added and kept nothing above 0; one that its dtype could not hold
    is told apart.
    """
    while (
        maker.op in ("aten.add", "aten.add_")
        and len(maker.parents) == 1
        and maker.rounded_to_zero is None
    ):
        maker = real_maker(maker.parents[0])
    return maker


def _stored_roots(call: Call) -> list[Call]:
    seen: set[int] = set()
    stack, roots = [call], []
    while stack:
        one = stack.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if one.stage == "stored":
            roots.append(one)
        stack.extend(one.parents)
    return roots
