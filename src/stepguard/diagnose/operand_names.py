"""Call operands what the user calls them: by their expression in the source line, or by their part.

torch's schemas say `self` and `other`, which no line of the user's says.
"""

from __future__ import annotations

import ast
import re
from dataclasses import replace

from stepguard.diagnose.ops import base_name
from stepguard.diagnose.source_line import (
    Expression,
    culprit_line,
    culprit_span,
    find_expression,
    is_number,
)
from stepguard.records import Operand, Origin

LONGEST = 40
"""Characters of an expression; a longer one tells no more than its part does."""
OPERATORS: dict[str, type[ast.operator]] = {
    "add": ast.Add,
    "sub": ast.Sub,
    "rsub": ast.Sub,
    "mul": ast.Mult,
    "div": ast.Div,
    "reciprocal": ast.Div,
    "pow": ast.Pow,
    "remainder": ast.Mod,
    # matmul folds a batch into `mm` and may swap its sides then; `bmm` keeps them.
    "bmm": ast.MatMult,
}
COMMUTES = frozenset({"add", "mul"})
"""Here torch takes the tensor first where the other side is a Python number."""
ALIASES = {
    "div": "div divide true_divide",
    "mul": "mul multiply",
    "sub": "sub subtract",
    "_to_copy": "to half bfloat16 type type_as",
    "_softmax": "softmax",
    "_log_softmax": "log_softmax",
    "linalg_vector_norm": "norm vector_norm",
    "acos": "acos arccos",
    "asin": "asin arcsin",
    "atan2": "atan2 arctan2",
}
PARTS: dict[str, dict[str, str]] = {
    "div": {"self": "the dividend", "other": "the divisor"},
    "true_divide": {"self": "the dividend", "other": "the divisor"},
    "floor_divide": {"self": "the dividend", "other": "the divisor"},
    "remainder": {"self": "the dividend", "other": "the divisor"},
    "reciprocal": {"self": "the divisor"},
    "addcdiv": {"tensor1": "the dividend", "tensor2": "the divisor", "self": "the sum so far"},
    "addcmul": {"tensor1": "the first factor", "tensor2": "the second factor"},
    "mul": {"self": "the first factor", "other": "the second factor"},
    "add": {"self": "the first term", "other": "the second term"},
    "sub": {"self": "the first term", "other": "the second term"},
    "rsub": {"self": "the second term", "other": "the first term"},
    "pow": {"self": "the base", "exponent": "the exponent"},
    "mm": {"self": "the left matrix", "mat2": "the right matrix"},
    "bmm": {"self": "the left matrix", "mat2": "the right matrix"},
    "addmm": {"self": "what is added", "mat1": "the left matrix", "mat2": "the right matrix"},
    "baddbmm": {"self": "what is added", "batch1": "the left matrix", "batch2": "the right matrix"},
}
ANYWHERE = {
    "other": "the second argument",
    "mat2": "the second argument",
    "grad_output": "the incoming gradient",
    "grad_out": "the incoming gradient",
}
_LISTED = re.compile(r"^(\w+)\[(\d+)\]$")


def name_operands(origin: Origin) -> Origin:
    """The origin whose operands carry a label, where torch's own name says nothing."""
    own = _own_expressions(origin)
    inputs = tuple(_labelled(operand, origin, own) for operand in origin.inputs)
    return replace(origin, inputs=inputs)


def expression_of(origin: Origin) -> Expression | None:
    """The expression of a forward operation in its source line, where it is there once."""
    operation = _operation(origin)
    names = ALIASES.get(operation, operation).split()
    # In place, a method has the same name and an underscore.
    calls = frozenset(names) | {f"{name}_" for name in names}
    operator = OPERATORS.get(operation)
    return find_expression(culprit_line(origin), calls, operator, culprit_span(origin))


def _labelled(operand: Operand, origin: Origin, own: dict[str, str]) -> Operand:
    if operand.label:
        return operand
    label = own.get(operand.name) or _part(operand.name, origin)
    return replace(operand, label=label)


def _part(name: str, origin: Origin) -> str:
    """`the divisor`; empty where torch's name is the one that users write (`dim`, `eps`)."""
    listed = _LISTED.match(name)
    if listed:
        # foreach operators take lists of tensors
        part = _part(listed[1], origin)
        return f"{part} of tensor {listed[2]}" if part else ""
    known = PARTS.get(_operation(origin), {})
    if name in known:
        return known[name]
    if name == "self":
        several = any(operand.name in ANYWHERE for operand in origin.inputs)
        return "the first argument" if several else "the argument"
    return ANYWHERE.get(name, "")


def _operation(origin: Origin) -> str:
    return base_name(origin.op).removeprefix("_foreach_").partition(".")[0].rstrip("_")


def _own_expressions(origin: Origin) -> dict[str, str]:
    """What the user wrote for each argument; empty where the line does not say it beyond doubt."""
    if origin.phase == "backward" or origin.node:
        # The operands of a slope stand in no line.
        return {}
    if any(":" in operand.name for operand in origin.inputs):
        # A stored tensor stands for itself: these are not all arguments, in their order.
        return {}
    found = expression_of(origin)
    if found is None:
        return {}
    sides = _sides(_operation(origin), found, origin.inputs)
    own = {}
    for operand, text in zip(origin.inputs, sides, strict=False):
        if len(text) <= LONGEST and not is_number(text):
            own[operand.name] = text
    return own


def _sides(operation: str, found: Expression, inputs: tuple[Operand, ...]) -> tuple[str, ...]:
    """The expressions in the order in which torch takes them; empty where that is not certain."""
    given = found.operands
    if found.by_operator and operation in ("rsub", "reciprocal"):
        given = tuple(reversed(given))
    if not found.by_operator and operation == "reciprocal":
        return given[:1]
    if _fits(given, inputs, strict=operation in COMMUTES):
        return given
    swapped = tuple(reversed(given))
    if operation in COMMUTES and _fits(swapped, inputs, strict=True):
        return swapped
    return ()


def _fits(given: tuple[str, ...], inputs: tuple[Operand, ...], *, strict: bool) -> bool:
    """Is a number in the line a number in the operation, and a tensor a tensor?

    `strict`: a Python number must be written as one, since a name could be on either side.
    """
    for text, operand in zip(given, inputs, strict=False):
        number = operand.dtype in ("float", "int", "bool") and not operand.shape
        if is_number(text) and not number:
            return False
        if number and strict and not is_number(text):
            return False
    return True
