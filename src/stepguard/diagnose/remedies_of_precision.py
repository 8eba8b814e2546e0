"""What to do about values that left a dtype's range or met an infinity, in the user's own words."""

from __future__ import annotations

import ast
from dataclasses import replace

from stepguard.diagnose.case import Case, elements, has_zero, reach
from stepguard.diagnose.dtypes import FORMATS, NARROW, floating, plain
from stepguard.diagnose.operand_names import expression_of
from stepguard.diagnose.source_line import (
    Expression,
    bracketed,
    culprit_line,
    culprit_span,
    find_expression,
    replace_number,
    rewriting,
)
from stepguard.diagnose.wording import call, counts, limit_of, spell
from stepguard.records import Operand, Remedy
from stepguard.records.finding import Safety

MATRIX = ("mm", "bmm", "addmm", "baddbmm", "linear", "matmul")
LONGEST_LINE = 60
"""Characters of a line within a sentence."""
HARMLESS = "1.0"
"""Every function has a finite value and slope there."""
KEPT_EPSILON = "1e-4"
"""float16 keeps it as a normal number."""
NODE_OPERATORS: dict[str, type[ast.operator]] = {"Div": ast.Div, "Pow": ast.Pow}


def indeterminate(case: Case) -> tuple[Remedy, ...]:
    """SG206: 0 * inf, inf - inf."""
    infinite = [operand for operand in case.inputs if not operand.finite]
    if not infinite:
        return ()
    zero = _zero(case)
    if case.op == "mul" and zero is not None:
        return (_masked_factor(case, infinite[0], zero),)
    if case.op in ("sub", "rsub") and len(infinite) > 1:
        return (_masked_term(case),)
    named = call(infinite[0])
    amount = counts(infinite[0], ("posinf", "neginf"))
    title = f"Keep the infinity out of {named} before {case.place}: it has {amount}"
    return (Remedy(title=title, safety="changes-numbers"),)


def _zero(case: Case) -> Operand | None:
    for operand in case.inputs:
        if operand.finite and has_zero(operand):
            return operand
    return None


def _masked_factor(case: Case, infinite: Operand, zero: Operand) -> Remedy:
    found = _forward_expression(case)
    if found is None or not _own(found, infinite) or not _own(found, zero):
        return Remedy(
            title=f"Leave the product out where {call(zero)} is 0: times the infinity of "
            f"{call(infinite)} it is NaN"
        )
    title = f"Put 0 for the infinity of `{infinite.label}` where `{zero.label}` is 0"
    filled = f"{bracketed(infinite.label)}.masked_fill({bracketed(zero.label)} == 0, 0.0)"
    position = found.operands.index(infinite.label)
    line = found.with_operands({position: filled})
    return _rewritten(case, line, f"{title}, before the product")


def _masked_term(case: Case) -> Remedy:
    found = _forward_expression(case)
    if found is None or len(found.operands) != 2:
        return Remedy(
            title=f"Put 0 for the infinity of one of them before {case.place}: both are infinite "
            f"at the same place"
        )
    first, second = found.operands
    name = bracketed(second)
    filled = f"{name}.masked_fill({name}.isinf(), 0.0)"
    title = (
        f"Put 0 for the infinity of `{second}`: where `{first}` is infinite too, their difference "
        f"is NaN"
    )
    return _rewritten(case, found.with_operands({1: filled}), title)


def overflow_of_half(case: Case) -> tuple[Remedy, ...]:
    """SG301."""
    if case.overflows_by_scale:
        return _smaller_scale(case)
    if case.node == "AccumulateGrad":
        return _mean_of_micro_batches(case)
    if case.phase == "optimizer":
        return (_weights_in_float32(case),)
    if case.op == "_to_copy" and case.inputs:
        return (_no_cast(case, case.inputs[0]),)
    if case.phase == "backward":
        return (_gradient_in_float32(case), _bfloat16(case))
    return (*_in_float32(case), _bfloat16(case))


def _smaller_scale(case: Case) -> tuple[Remedy, ...]:
    scale = spell(case.reading.scale)
    dynamic = Remedy(
        title=f"Use a GradScaler, which finds a scale that fits, or a far lower one than {scale}: "
        f"at scale 1 these gradients are finite"
    )
    return (dynamic,)


def _mean_of_micro_batches(case: Case) -> tuple[Remedy, ...]:
    count = len(case.reading.micro_losses)
    by = f"{count}, the number of micro-batches," if count > 1 else "the number of micro-batches"
    mean = Remedy(
        title=f"Divide the loss by {by} before backward: added up, their gradients of "
        f"{_parameters(case)} exceed {limit_of(case.dtype)}",
        safety="changes-numbers",
    )
    return mean, _weights_in_float32(case)


def _parameters(case: Case) -> str:
    named = case.reading.bad_grads or (case.tensor.removeprefix("param:"),)
    if not named[0]:
        return "one parameter"
    return f"`{named[0]}`"


def _weights_in_float32(case: Case) -> Remedy:
    return Remedy(
        title=f"Keep {_parameters(case)} in float32 and let autocast choose {case.dtype} for the "
        f"arithmetic: sums of large gradients and updates need the range",
        safety="changes-numbers",
    )


def _no_cast(case: Case, given: Operand) -> Remedy:
    wide = plain(given.dtype) if floating(given.dtype) else "float32"
    title = f"Leave {call(given)} in {wide}: it reaches {spell(reach(given))}, beyond "
    return Remedy(title=title + limit_of(case.dtype), safety="changes-numbers")


def _gradient_in_float32(case: Case) -> Remedy:
    return Remedy(
        title=f"Compute {_statement(case)} in float32, or with smaller factors: its gradient "
        f"exceeds {limit_of(case.dtype)}",
        safety="changes-numbers",
    )


def _statement(case: Case) -> str:
    """Their line, where it is short enough to be read; else its place."""
    line = culprit_line(case.origin) if case.origin is not None else ""
    text = line.removeprefix("return ").rstrip(",")
    if not text or len(text) > LONGEST_LINE:
        return case.place
    return f"`{text}`"


def _in_float32(case: Case) -> tuple[Remedy, ...]:
    found = _product(case) or _forward_expression(case)
    what = f"`{found.text}`" if found is not None else _module(case)
    # Autocast would make half precision of the operands of a product again.
    inside = case.op in MATRIX and bool(case.evidence.autocast)
    leave = ""
    if inside:
        leave = " and outside of autocast (`torch.autocast(..., enabled=False)`)"
    snippet = ""
    if found is not None and not inside:
        snippet = _with_floats(found, case)
    limit = spell(FORMATS[case.dtype].largest)
    title = f"Compute {what} in float32{leave}: {_reached(case)}, and {case.dtype} ends at {limit}"
    in_words = Remedy(title=title, safety="changes-numbers")
    if not snippet:
        return (in_words,)
    # What follows may take half precision only, which a trial shows: else it is said in words.
    assert case.origin is not None
    code = _rewritten(case, snippet, title, "changes-numbers")
    if case.origin.statement is None:
        return (code,)
    return replace(code, snippet=""), in_words


def _product(case: Case) -> Expression | None:
    """A product of matrices written with `@`, whichever way torch has folded it."""
    if case.op not in MATRIX or case.origin is None:
        return None
    span = culprit_span(case.origin)
    return find_expression(culprit_line(case.origin), frozenset({"matmul"}), ast.MatMult, span)


def _with_floats(found: Expression, case: Case) -> str:
    """Their line with operands in float32."""
    changed = {}
    for position, text in enumerate(found.operands):
        if case.op in MATRIX or _is_tensor(text, case):
            changed[position] = f"{bracketed(text)}.float()"
        if changed and case.op not in MATRIX:
            # One operand in float32 makes the result so.
            break
    return found.with_operands(changed) if changed else ""


def _is_tensor(text: str, case: Case) -> bool:
    """Is this expression the name of an operand that is a tensor?"""
    return any(operand.label == text and operand.max is not None for operand in case.inputs)


def _module(case: Case) -> str:
    module = case.origin.module if case.origin is not None else None
    return f"`{module}`" if module else case.place


def _reached(case: Case) -> str:
    if case.op == "sum" and case.inputs:
        added = case.inputs[0]
        return f"it adds {elements(added)} elements up to {spell(reach(added))}"
    shown = []
    for operand in case.inputs:
        if operand.dtype and operand.max is not None:
            shown.append(f"{call(operand)} reaches {spell(reach(operand))}")
    return " and ".join(shown[:2])


def _bfloat16(case: Case) -> Remedy:
    where = "Or autocast to" if case.evidence.autocast else "Or hold the weights in"
    return Remedy(
        title=f"{where} bfloat16 instead of {case.dtype}: it has the range of float32 and needs no "
        f"loss scale",
        safety="changes-numbers",
    )


def underflow_of_half(case: Case) -> tuple[Remedy, ...]:
    """SG302."""
    eps = case.evidence.eps_vanished
    if eps is None:
        eps = _epsilon_argument(case)
    line = culprit_line(case.origin) if case.origin is not None else ""
    wide = Remedy(
        title=f"Compute {_statement(case)} in float32 and cast the result back: {case.dtype} "
        f"rounds what is to keep it above 0 away",
        safety="changes-numbers",
    )
    if eps is None or case.dtype not in NARROW:
        return (wide,)
    return _larger_epsilon(case, eps, line), wide


def _epsilon_argument(case: Case) -> float | None:
    """The eps of a norm layer, which is an argument of its operation."""
    for operand in case.inputs:
        if operand.name == "eps":
            return operand.value
    return None


def _larger_epsilon(case: Case, eps: float, line: str) -> Remedy:
    changed = replace_number(line, eps, KEPT_EPSILON)
    if changed is not None:
        written, snippet = changed
        title = f"Write {KEPT_EPSILON} for `{written}`, which is 0 in {case.dtype}"
        return _rewritten(case, snippet, title, "changes-numbers")
    title = f"Give {_module(case)} an epsilon of {KEPT_EPSILON}: {spell(eps)} is 0 in {case.dtype}"
    return Remedy(title=title, safety="changes-numbers")


def unselected_branch(case: Case) -> tuple[Remedy, ...]:
    """SG402: make the argument harmless before it is used, not the result after."""
    line = culprit_line(case.origin) if case.origin is not None else ""
    name = case.node or case.op
    operator = NODE_OPERATORS.get(name)
    span = culprit_span(case.origin) if case.origin is not None else None
    found = find_expression(line, frozenset({name.lower()}), operator, span)
    if found is None:
        return (_harmless_in_general(case),)
    position = 1 if operator is ast.Div else 0
    argument = found.operands[position]
    chosen = _chosen(line, found, argument)
    if not chosen:
        title = (
            f"Replace `{argument}` where its result is not wanted, before `{found.text}`: a "
            f"selection after it comes too late for the gradient"
        )
        return (Remedy(title=title),)
    title = (
        f"`{chosen}` for `{argument}` in `{found.text}`: what is not selected gets a harmless "
        f"argument"
    )
    return (_rewritten(case, found.with_operands({position: chosen}), title),)


def _harmless_in_general(case: Case) -> Remedy:
    return Remedy(
        title=f"Make the argument harmless where the result is not wanted, before {case.place}: a "
        f"selection after it comes too late for the gradient"
    )


def _chosen(line: str, found: Expression, argument: str) -> str:
    """The argument behind the same condition, where the `where` stands in the line."""
    where = find_expression(line, frozenset({"where"}))
    if where is None or len(where.operands) != 3 or not where.text.startswith("torch."):
        return ""
    condition = where.operands[0]
    inside = [start <= found.start and found.end <= end for start, end in where.spans]
    if inside[1]:
        return f"torch.where({condition}, {argument}, {HARMLESS})"
    if inside[2]:
        return f"torch.where({condition}, {HARMLESS}, {argument})"
    return ""


def _forward_expression(case: Case) -> Expression | None:
    """The expression that can be written anew; one that works in place cannot."""
    if case.origin is None or case.phase == "backward":
        return None
    found = expression_of(case.origin)
    in_place = (case.origin.op or "").endswith("_")
    return None if in_place else found


def _rewritten(case: Case, line: str, title: str, safety: Safety = "safe") -> Remedy:
    assert case.origin is not None
    return rewriting(case.origin, line, title, safety=safety)


def _own(found: Expression, operand: Operand) -> bool:
    return operand.label in found.operands
