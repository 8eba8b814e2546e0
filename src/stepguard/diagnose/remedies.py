"""What to do about an incident in the user's own words: their line, operands, modules and samples.

The page of a rule keeps its examples; what an incident shows is written for the operation that
failed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, replace

from stepguard.diagnose import remedies_of_runs as runs
from stepguard.diagnose import remedies_of_runs as settings
from stepguard.diagnose.case import (
    FORMATS,
    NARROW,
    NLL,
    Case,
    base_name,
    elements,
    floating,
    has_zero,
    plain,
    reach,
    words,
)
from stepguard.diagnose.idioms import stable_form
from stepguard.diagnose.rule import call, counts, describe, limit_of, spell
from stepguard.diagnose.rules.sg100 import CTC
from stepguard.diagnose.source_line import (
    Expression,
    bracketed,
    call_of,
    culprit_line,
    culprit_span,
    expression_of,
    find_expression,
    is_number,
    replace_number,
    rewriting,
    with_roots,
)
from stepguard.records import Finding, Operand, Remedy
from stepguard.records.incident import Safety

# --- What to do about values that left a dtype's range or met an infinity, in the user's own
# words.


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


# --- What to do about an incident in the user's own words: their line, operands, modules and
# samples.


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """One operation, and what to write instead of it."""

    calls: frozenset[str] = frozenset()
    """Names it has in Python."""
    operator: type[ast.operator] | None = None
    use: str
    """The replacement; `{x}`, `{y}` are the operands, `{bx}` the first in brackets where it needs
    them, `{minus_y}` the second with the other sign, `{more}` what else was given, `{biased}` the
    same without a correction, `{most}` the largest exponent for the dtype.
    """
    functions: tuple[str, ...] = ()
    """The functions of stepguard.numerics it needs."""
    why: str
    """What it does where the old one failed; `{x}` and `{y}` again."""
    operands: int = 1
    safety: Safety = "safe"


LOG = Fix(
    calls=words("log"),
    use="safe_log({x})",
    functions=("safe_log",),
    why="where {x} is 0 it is the log of the smallest number, with gradient 0",
)
SQRT = Fix(
    calls=words("sqrt"),
    use="safe_sqrt({x})",
    functions=("safe_sqrt",),
    why="where {x} is 0 the gradient is 0 instead of infinite",
)
DIVISION = Fix(
    calls=words("div divide true_divide"),
    operator=ast.Div,
    use="safe_div({x}, {y})",
    functions=("safe_div",),
    why="where {y} is 0 the result is 0, without a gradient",
    operands=2,
)
RECIPROCAL = replace(
    DIVISION,
    calls=words("reciprocal"),
    operator=None,
    use="safe_div(1.0, {x})",
    why="where {x} is 0 the result is 0, without a gradient",
    operands=1,
)
RSQRT = Fix(
    calls=words("rsqrt"),
    use="safe_div(1.0, safe_sqrt({x}))",
    functions=("safe_div", "safe_sqrt"),
    why="where {x} is 0 the result is 0, without a gradient",
)
POWER = Fix(
    calls=words("pow"),
    operator=ast.Pow,
    use="safe_pow({x}, {y})",
    functions=("safe_pow",),
    why="where {x} is 0 the gradient is 0 instead of infinite",
    operands=2,
)
NORM = Fix(
    calls=words("norm vector_norm"),
    use="safe_norm({x}{more})",
    functions=("safe_norm",),
    why="the gradient of a zero vector is 0",
)
SOFTMAX = Fix(
    calls=words("softmax"),
    use="safe_softmax({x}{more})",
    functions=("safe_softmax",),
    why="a row that is masked throughout gets weight 0",
)
EXP = Fix(
    calls=words("exp"),
    use="{bx}.clamp(max={most}).exp()",
    why="it stays finite; softmax, logsumexp and softplus need no bound",
    safety="changes-numbers",
)
EXPM1 = replace(
    EXP,
    calls=words("expm1"),
    use="{bx}.clamp(max={most}).expm1()",
    why="it stays finite",
)
LARGEST_EXPONENTS = {"float16": ("5.0", "10.0")}
"""What exp may be given: so that room is left for what follows, and where larger values are usual,
nearly all that the dtype holds.
"""
SMALLEST_NUMBER = "1e-3"
"""Floor for a divisor that is a Python number: what suits depends on what it stands for."""
FIXES: dict[str, dict[str, Fix]] = {
    "SG201": {
        "rsqrt": RSQRT,
        "pow": Fix(
            calls=words("pow"),
            operator=ast.Pow,
            use="safe_div(1.0, safe_pow({x}, {minus_y}))",
            functions=("safe_div", "safe_pow"),
            why="where {x} is 0 the result is 0, without a gradient",
            operands=2,
        ),
    },
    "SG202": {
        "log": LOG,
        "log2": replace(LOG, calls=words("log2"), use="(safe_log({x}) * 1.4426950408889634)"),
        "log10": replace(LOG, calls=words("log10"), use="(safe_log({x}) * 0.4342944819032518)"),
        "log1p": Fix(
            calls=words("log1p"),
            use="{bx}.clamp_min(-1 + 1e-6).log1p()",
            why="{x} has reached -1, where its argument is 0",
            safety="changes-numbers",
        ),
        "logit": Fix(
            calls=words("logit"),
            use="torch.logit({bx}.clamp(1e-37, 1 - 1e-7))",
            why="{x} has reached 0 or 1",
            safety="changes-numbers",
        ),
    },
    "SG203": {"exp": EXP, "expm1": EXPM1},
    "SG204": {"softmax": SOFTMAX},
    "SG205": {
        "std": Fix(
            calls=words("std"),
            use="safe_sqrt({bx}.var({biased}))",
            functions=("safe_sqrt",),
            why="of one element it is 0, with gradient 0",
        ),
        "var": Fix(
            calls=words("var"),
            use="{bx}.var({biased})",
            why="of one element it is 0, with gradient 0",
        ),
    },
    "SG403": {
        "exp": replace(
            EXP, why="its gradient is finite; a bound after `exp` comes too late for it"
        ),
        "log": replace(LOG, why=f"{LOG.why}; a bound after it comes too late for the gradient"),
    },
    "SG207": {
        "sqrt": Fix(
            calls=words("sqrt"),
            use="safe_sqrt({bx}.clamp_min(0))",
            functions=("safe_sqrt",),
            why="{x} is negative only by rounding if it is a square or a variance",
            safety="changes-numbers",
        ),
        "pow": Fix(
            calls=words("pow"),
            operator=ast.Pow,
            use="{bx}.clamp_min(1e-12).pow({y})",
            why="a fractional power needs a base that is not negative, a negative one more than 0",
            operands=2,
            safety="changes-numbers",
        ),
    },
    "SG401": {
        "Sqrt": SQRT,
        "Pow": POWER,
        "Div": DIVISION,
        "Log": LOG,
        "Acos": Fix(
            calls=words("acos arccos"),
            use="safe_acos({x})",
            functions=("safe_acos",),
            why="its slope is bounded where {x} is 1 or -1",
        ),
        "Asin": Fix(
            calls=words("asin arcsin"),
            use="safe_asin({x})",
            functions=("safe_asin",),
            why="its slope is bounded where {x} is 1 or -1",
        ),
        "Atan2": Fix(
            calls=words("atan2 arctan2"),
            use="safe_atan2({x}, {y})",
            functions=("safe_atan2",),
            why="where both are 0 the gradient is 0",
            operands=2,
        ),
        "Std": Fix(
            calls=words("std"),
            use="safe_sqrt({bx}.var({rest}))",
            functions=("safe_sqrt",),
            why="where {x} is constant the gradient is 0",
        ),
        "Rsqrt": RSQRT,
        "Acosh": Fix(
            calls=words("acosh arccosh"),
            use="{bx}.clamp_min(1 + 1e-6).acosh()",
            why="the slope is infinite where {x} is 1",
            safety="changes-numbers",
        ),
        "Atanh": Fix(
            calls=words("atanh arctanh"),
            use="{bx}.clamp(-1 + 1e-6, 1 - 1e-6).atanh()",
            why="the slope is infinite where {x} is 1 or -1",
            safety="changes-numbers",
        ),
    },
}
IN_PLACE = {
    DIVISION: ("torch.where({by} == 0, 1, {y})", 1, "where {y} is 0 it is divided by 1"),
    LOG: ("{bx}.clamp_(min=1e-12)", 0, "{x} stays above 0"),
    SQRT: ("{bx}.clamp_(min=1e-12)", 0, "{x} stays above 0, where the slope is finite"),
    EXP: ("{bx}.clamp_(max={most})", 0, "it stays finite"),
}
"""Of operations that change their operand: what to write for which operand, and what that does."""
EIGENVECTORS = (
    "Keep the eigenvalues apart: add a small diagonal of different numbers to the matrix before it "
    "is decomposed, or use the eigenvalues only (`eigvalsh`, `svdvals`), whose slope is finite"
)
SINGULAR_MATRIX = (
    "Keep the matrix away from singular: add a small multiple of the identity before it is "
    "decomposed or inverted"
)
TOO_LONG = (
    "Drop the samples whose target is longer than the model's output for them (each repeat needs "
    "one more position)"
)
IN_WORDS: dict[str, dict[str, tuple[str, Safety]]] = {
    "SG104": dict.fromkeys(CTC, (TOO_LONG, "safe")),
    "SG401": {
        **dict.fromkeys(
            words("LinalgEigh LinalgEig LinalgSvd Svd SymEig"), (EIGENVECTORS, "changes-numbers")
        ),
        **dict.fromkeys(
            words("LinalgQr LinalgInvEx LinalgSolveEx LinalgCholeskyEx LinalgDet LinalgSlogdet")
            | words("Cholesky LinalgPinv"),
            (SINGULAR_MATRIX, "changes-numbers"),
        ),
    },
}
"""Operations for which no line of the user's can be written, or not that alone."""
BUILDERS: dict[str, Callable[[Case], tuple[Remedy, ...]]] = {
    "SG206": indeterminate,
    "SG301": overflow_of_half,
    "SG302": underflow_of_half,
    "SG402": unselected_branch,
    **runs.BUILDERS,
    **settings.SETTINGS_BUILDERS,
}
"""Remedies that are made of more than one expression."""
SAME = {
    "_softmax": "softmax",
    "_safe_softmax": "softmax",
    "true_divide": "div",
    "reciprocal": "div",
    "LinalgVectorNorm": "Norm",
    "LinalgNorm": "Norm",
    "StdMean": "Std",
}
"""Operations that are another one under a further name."""
FIXES["SG401"]["Norm"] = NORM


DIVIDING = {"SG102": "div", "SG201": "div", "SG401": "Div", "SG403": "div"}
"""Codes and operations whose remedy depends on what is divided by."""
POLES = ("SG401", "SG201", "SG202")
"""Codes of functions that are singular somewhere."""


def in_their_words(finding: Finding, case: Case) -> Finding:
    """The finding with remedies for this very incident; else those of the page, titles only."""
    own = _for_data(finding.code, case) or _for_operation(finding.code, case)
    own = own or _for_matrix_or_sequence(finding.code, case)
    if finding.code in FORMULAS_FAIL_AS:
        own = (*_stable_formula(case), *own)
    if not own and finding.code in BUILDERS:
        own = BUILDERS[finding.code](case)
    if finding.code == "SG402":
        # a function that is safe at the pole needs no selection before it
        safe = (one for code in POLES for one in _for_operation(code, case) if one.edits)
        own = tuple(sorted((*own, *safe), key=lambda remedy: not remedy.edits))
    if own:
        return replace(finding, remedies=own)
    return replace(finding, remedies=without_examples(finding.remedies))


FORMULAS_FAIL_AS = ("SG201", "SG202", "SG203", "SG206", "SG301", "SG403")
"""Codes of what happens to a formula that torch has a function for."""


def _stable_formula(case: Case) -> tuple[Remedy, ...]:
    """Torch's own function in the place of the formula that the operation is part of."""
    origin = case.origin
    if origin is None:
        return ()
    found = stable_form(culprit_line(origin), culprit_span(origin))
    if found is None:
        return ()
    expression, use = found
    return (_replaced(expression, case, use, "the same function, which stays finite", ()),)


def _for_matrix_or_sequence(code: str, case: Case) -> tuple[Remedy, ...]:
    operation = case.node if case.phase == "backward" else case.op
    in_words = IN_WORDS.get(code, {}).get(operation)
    if in_words is None or case.origin is None:
        return ()
    title, safety = in_words
    remedies = [Remedy(title=title, safety=safety)]
    found = find_expression(
        culprit_line(case.origin), words("ctc_loss"), None, culprit_span(case.origin)
    )
    if operation in CTC and found is not None and "zero_infinity=True" not in found.settings:
        kept = [part for part in found.settings if not part.startswith("zero_infinity=")]
        call = found.text.partition("(")[0]
        use = f"{call}({', '.join((*found.operands, *kept, 'zero_infinity=True'))})"
        why = "what cannot be aligned counts 0, without a gradient"
        remedies.append(_replaced(found, case, use, why, (), "changes-training"))
    elif operation in CTC:
        zero = "Or `zero_infinity=True`: what cannot be aligned counts 0, without a gradient"
        remedies.append(Remedy(title=zero, safety="changes-training"))
    return tuple(remedies)


def without_examples(remedies: tuple[Remedy, ...]) -> tuple[Remedy, ...]:
    """The examples of a page have variables of their own, which would be foreign in an incident."""
    return tuple(replace(remedy, snippet="") for remedy in remedies)


def _for_operation(code: str, case: Case) -> tuple[Remedy, ...]:
    operation = case.node if case.phase == "backward" else case.op
    operation = SAME.get(operation, operation)
    divides = DIVIDING.get(code) == operation
    fix = DIVISION if divides else FIXES.get(code, {}).get(operation)
    if fix is None or case.origin is None:
        return ()
    if case.origin.library is not None:
        return (_in_a_library(case),)
    found = _written(case, fix)
    if divides and found is None:
        fix = RECIPROCAL
        found = _written(case, fix)
    if found is not None and found.in_place and len(found.operands) >= fix.operands:
        return _in_place(fix, found, case)
    if found is None or len(found.operands) < fix.operands:
        return (_in_general(DIVISION if divides else fix, case),)
    return _by_expression(code, case, fix, found)


def _by_expression(code: str, case: Case, fix: Fix, found: Expression) -> tuple[Remedy, ...]:
    """What to write for this very expression."""
    if fix is DIVISION:
        return _divisions(code, case, found)
    if fix.calls == LOG.calls:
        return (*_logarithms(case, found), _remedies_rewritten(fix, found, case))
    if "{most}" not in fix.use:
        return (_remedies_rewritten(fix, found, case),)
    first, second = LARGEST_EXPONENTS.get(case.dtype, ("10.0", "80.0"))
    # The second is shown only where a trial has found the first wanting.
    last = replace(_remedies_rewritten(fix, found, case, second), snippet="")
    return (_remedies_rewritten(fix, found, case, first), last)


def _written(case: Case, fix: Fix) -> Expression | None:
    assert case.origin is not None
    line = culprit_line(case.origin)
    calls = fix.calls | {f"{name}_" for name in fix.calls}
    return find_expression(line, calls, fix.operator, culprit_span(case.origin))


def _in_place(fix: Fix, found: Expression, case: Case) -> tuple[Remedy, ...]:
    """The operand made harmless: a safe function would not change it in its place."""
    assert case.origin is not None
    kind = next((one for one in IN_PLACE if one.calls == fix.calls), None)
    if kind is None:
        return (_in_general(fix, case),)
    use, position, why = IN_PLACE[kind]
    most = LARGEST_EXPONENTS.get(case.dtype, ("10.0", "80.0"))[0]
    x = found.operands[0]
    y = found.operands[position]
    use = use.format(bx=bracketed(x), y=y, by=bracketed(y), most=most)
    title = f"`{use}` for `{y}` in `{found.text}`: {why.format(x=f'`{x}`', y=f'`{y}`')}"
    line = found.with_operands({position: use})
    return (rewriting(case.origin, line, title, safety="changes-numbers"),)


def _divisions(code: str, case: Case, found: Expression) -> tuple[Remedy, ...]:
    """What to write for a division by zero: it depends on where the divisor comes from."""
    assert case.origin is not None
    divisor = found.operands[1]
    number = case.argument("other", 1)
    if code == "SG201" and number is not None and number.dtype in ("float", "int"):
        least = "1" if number.dtype == "int" else SMALLEST_NUMBER
        bounded = f"max({divisor}, {least})"
        title = (
            f"`{bounded}` for `{divisor}` in `{found.text}`: it is a Python number that became 0; "
            f"choose the floor that suits it"
        )
        line = found.with_operands({1: bounded})
        floor = rewriting(case.origin, line, title, safety="changes-numbers")
        return floor, _remedies_rewritten(DIVISION, found, case)
    safe = with_roots(divisor, "safe_sqrt({})")
    if safe and code == "SG403":
        # What follows has made a number of the infinity, so that 0 in its place is another value.
        above = with_roots(divisor, "torch.sqrt({}.clamp_min(1e-12))")
        title = f"Keep what `{divisor}` is made of above 0: what follows hides the infinity only"
        line = found.with_operands({1: above})
        code_of_it = rewriting(case.origin, line, title, safety="changes-numbers")
        return replace(code_of_it, snippet=""), Remedy(title=title, safety="changes-numbers")
    if safe:
        why = f"where `{divisor}` is 0 the result is 0 and so is the gradient of the root"
        use = f"safe_div({found.operands[0]}, {safe})"
        rooted = _replaced(found, case, use, why, ("safe_div", "safe_sqrt"))
        return (rooted,)
    zero = _remedies_rewritten(DIVISION, found, case)
    if base_name(case.evidence.denominator_from) in ("sqrt", "std"):
        # The root is in another line: safe_div alone would leave its infinite slope at 0. Only a
        # trial shows which line that is; without one, the remedy is in words.
        words_only = Remedy(
            title=f"`safe_div({', '.join(found.operands)})` for `{found.text}`, and `safe_sqrt` "
            f"where `{divisor}` is computed: without it the gradient is NaN"
        )
        return replace(zero, snippet=""), words_only
    if code != "SG403":
        return (zero,)
    kept = f"torch.where({bracketed(divisor)} == 0, 1e-12, {divisor})"
    title = f"`{kept}` for `{divisor}` in `{found.text}`: what follows hides the infinity only"
    line = found.with_operands({1: kept})
    return rewriting(case.origin, line, title, safety="changes-numbers"), zero


def _logarithms(case: Case, found: Expression) -> tuple[Remedy, ...]:
    """Where a probability is taken the log of: the log of it comes from what it was made of."""
    x = found.operands[0]
    inverse = _one_minus(x)
    for names, function in ((SIGMOID, "logsigmoid"), (SOFTMAX.calls, "log_softmax")):
        given = call_of(inverse or x, names)
        if not given or (inverse and names is not SIGMOID):
            continue
        logits = f"-{bracketed(given[0])}" if inverse else given[0]
        use = f"torch.nn.functional.{function}({', '.join((logits, *given[1:]))})"
        return (_replaced(found, case, use, f"it stays finite where `{x}` rounds to 0", ()),)
    made_by = base_name(case.evidence.argument_from)
    if made_by in SATURATES:
        instead = SATURATES[made_by]
        title = (
            f"Compute the loss from the logits, by {instead}: `{x}` comes from a "
            f"{made_by.strip('_')} that has rounded to exactly 0 or 1, where it has no gradient"
        )
        return (Remedy(title=title, safety="changes-numbers"),)
    return ()


SIGMOID = words("sigmoid")
SATURATES = {
    "sigmoid": "`binary_cross_entropy_with_logits` or `logsigmoid`",
    "_softmax": "`cross_entropy` or `log_softmax`",
    "softmax": "`cross_entropy` or `log_softmax`",
}
"""What makes probabilities, and what takes their logarithm without making them."""


def _one_minus(text: str) -> str:
    """`p` of `1 - p`; empty for everything else."""
    node = ast.parse(text, mode="eval").body
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Sub):
        return ""
    one = isinstance(node.left, ast.Constant) and node.left.value == 1
    return ast.unparse(node.right) if one else ""


def _remedies_rewritten(fix: Fix, found: Expression, case: Case, most: str = "") -> Remedy:
    """Their own line, with the safe function in place of what failed."""
    x = found.operands[0]
    y = found.operands[1] if len(found.operands) > 1 else ""
    rest = (*found.operands[1:], *found.settings)
    use = fix.use.format(
        x=x,
        y=y,
        bx=bracketed(x),
        minus_y=y[1:] if y.startswith("-") and is_number(y) else f"-{bracketed(y)}" if y else "",
        more="".join(f", {part}" for part in rest),
        rest=", ".join(rest),
        biased=_corrected(x, rest),
        most=most,
    )
    why = fix.why.format(x=f"`{x}`", y=f"`{y}`")
    return _replaced(found, case, use, why, fix.functions, fix.safety)


def _replaced(
    found: Expression,
    case: Case,
    use: str,
    why: str,
    functions: tuple[str, ...],
    safety: Safety = "safe",
) -> Remedy:
    assert case.origin is not None
    title = f"`{use}` for `{' '.join(found.text.split())}`: {why}"
    line = found.rewritten(use)
    return rewriting(case.origin, line, title, functions=functions, safety=safety)


def _in_a_library(case: Case) -> Remedy:
    """The line is not the user's: what they pass to it is."""
    assert case.origin is not None
    package = (case.origin.library or "").partition("/")[0]
    given = next((operand for operand in case.inputs if has_zero(operand)), None)
    facts = describe(given or next(iter(case.inputs), None))
    title = f"Look at what {case.origin.source} passes to {package}, which fails on it"
    if case.origin.samples:
        title += f": leave {_samples(case)} out, or correct it"
    return Remedy(title=f"{title}; {facts}" if facts else title)


def _corrected(x: str, given: tuple[str, ...]) -> str:
    """The arguments of a statistic, with a correction that leaves at least one element."""
    correction = "1"
    dimensions: list[str] = []
    for part in given:
        name, _, value = part.partition("=")
        if name in ("True", "False"):
            correction = str(int(name == "True"))
        elif name == "unbiased":
            correction = f"int({value})"
        elif name == "correction":
            correction = value
        else:
            dimensions.append(part)
    reduced = [part.removeprefix("dim=") for part in dimensions if not part.startswith("keepdim=")]
    count = f"{bracketed(x)}.numel()"
    if reduced:
        one = reduced[0].removeprefix("-").isidentifier() or is_number(reduced[0])
        count = f"{bracketed(x)}.shape[{reduced[0]}]" if one else ""
    correction = f"min({correction}, {count} - 1)" if count else "0"
    return ", ".join((*dimensions, f"correction={correction}"))


def _in_general(fix: Fix, case: Case) -> Remedy:
    """The same without their expression, which is not in the line or is there more than once."""
    use = fix.use.format(
        x="x", y="y", bx="x", minus_y="-y", more="", rest="", biased="correction=0", most="10.0"
    )
    name = f"stepguard.numerics.{fix.functions[0]}" if fix.functions else use
    why = fix.why.format(x="the argument", y="the divisor")
    return Remedy(title=f"Use `{name}` in {case.place}: {why}", safety=fix.safety)


def _for_data(code: str, case: Case) -> tuple[Remedy, ...]:
    """What is wrong with which samples, where the data is to blame."""
    origin = case.origin
    if origin is None:
        return ()
    name = f"`{case.tensor}`"
    who = _samples(case)
    if code == "SG102":
        return _for_empty(case, who)
    if code == "SG101" and case.tensor.startswith("batch"):
        leave = Remedy(title=f"Leave {who} out where {name} is read, and count what is left out")
        fill = Remedy(
            title=f"Or fill in {name} before the model sees it; in the loss it is too late for the "
            f"gradient",
            safety="changes-numbers",
        )
        return (leave, fill)
    if code == "SG101" and (case.evidence.constant or case.evidence.number is not None):
        kind = "tensor" if case.evidence.constant else "number"
        title = f"Correct the {kind} that {case.place} reads where your program makes it"
        return (Remedy(title=f"{title}: it comes neither from the batch nor from the model"),)
    if code == "SG103" and case.evidence.sample_max is not None:
        largest = spell(case.evidence.sample_max)
        others = spell(case.evidence.others_max)
        reach = f"it reaches {largest}, all others {others}"
        return (Remedy(title=f"Leave {who} out, or correct it: {reach}"),)
    if code == "SG104" and case.evidence.target_out_of_domain is not None:
        value = spell(case.evidence.target_out_of_domain)
        return (Remedy(title=f"Correct or leave out {who}: a target there is {value}"),)
    return ()


def _for_empty(case: Case, who: str) -> tuple[Remedy, ...]:
    """The data has nothing to take a mean of: mend the data; a line of the user's own comes next.

    Not where labels are missing: a loss of 0 for such a batch would only hide it.
    """
    evidence = case.evidence
    root = evidence.denominator_root or ""
    labels = (
        evidence.valid_targets == 0
        or case.reading.labels == 0
        or case.op in NLL
        or base_name(evidence.numerator_from) in NLL
        or any(word in root for word in ("label", "target"))
    )
    if not labels:
        title = f"Leave {who} out before batching (filter or collate function): no element counts"
        return (Remedy(title=title), *_for_operation("SG102", case))
    if case.origin is not None and not case.origin.samples:
        who = "the samples of this batch"
    title = (
        f"Leave {who} out before batching (filter or collate function), or keep at least one label "
        f"in each: every label here is ignored, often because truncation (max_length) has cut the "
        f"answer off"
    )
    return (Remedy(title=title),)


def _samples(case: Case) -> str:
    """`sample 3 (row 48211)`; without a proof, such samples."""
    origin = case.origin
    if origin is None or not origin.samples:
        return "such samples"
    noun = "sample" if len(origin.samples) == 1 else "samples"
    text = f"{noun} {', '.join(map(str, origin.samples[:8]))}"
    if origin.rows:
        text += f" ({', '.join(origin.rows[:4])})"
    return text
