"""What to do about an incident in the user's words: their line, operands, modules and samples.

The sentences are in the page of the rule; here is what rewrites a line of the user's program.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stepguard.diagnose.case import FORMATS, Case, base_name, elements, has_zero, reach, words
from stepguard.diagnose.rule import Proof, call, describe, fill, holds, rule_text, spell
from stepguard.diagnose.source_line import (
    SAFE_FUNCTION,
    Expression,
    bracketed,
    call_operands,
    culprit_line,
    culprit_span,
    expression_of,
    find_expression,
    is_number,
    named_expression,
    nodes_of,
)
from stepguard.records import Edit, Finding, Origin, Remedy

# --- Formulas that torch has a stable function for: `log(1 + exp(x))` is `softplus(x)`.


SOFTPLUS = "torch.nn.functional.softplus({X})"
FORMULAS = (
    ("log(1 + exp(X))", SOFTPLUS),
    ("log1p(exp(X))", SOFTPLUS),
    ("log(sigmoid(X))", "torch.nn.functional.logsigmoid({X})"),
    ("log(1 - sigmoid(X))", "torch.nn.functional.logsigmoid(-{bX})"),
    ("log(softmax(X, *D))", "torch.nn.functional.log_softmax({X}, {D})"),
    ("log(sum(exp(X), *D))", "torch.logsumexp({X}, {D})"),
    ("exp(X) / sum(exp(X), *D)", "torch.softmax({X}, {axis})"),
    ("1 / (1 + exp(-X))", "torch.sigmoid({X})"),
    ("1 / (1 + exp(X))", "torch.sigmoid(-{bX})"),
    ("exp(X) / (1 + exp(X))", "torch.sigmoid({X})"),
    ("(exp(X) - exp(-X)) / (exp(X) + exp(-X))", "torch.tanh({X})"),
    (
        "log(cosh(X))",
        "({X} + torch.nn.functional.softplus(-2.0 * {bX}) - 0.6931471805599453)",
    ),
)
"""What is written, and what to write instead. `*D`: the further arguments, `axis` without keepdim,
`bX` in brackets where it needs them.
"""
PATTERNS = tuple((ast.parse(text, mode="eval").body, use) for text, use in FORMULAS)
ROOTS = {"sqrt(X)": "{bX}", "X ** 0.5": "{bX}", "std(X, *D)": "{bX}.var({D})"}
"""Roots, and what they are taken of."""
ROOT_PATTERNS = tuple((ast.parse(text, mode="eval").body, use) for text, use in ROOTS.items())
KEPT = ("keepdim=True", "True")
Bound = dict[str, list[str]]
"""What stands for the names of a pattern: `X` one expression, `D` further arguments."""


def _stable_formula(case: Case) -> tuple[Remedy, ...]:
    """Torch's own function in the place of the formula that the operation is part of."""
    origin = case.where
    span = culprit_span(origin)
    logarithm = named_expression(origin, "log")
    if span is None and logarithm is not None and "log" in (case.op, case.node.lower()):
        span = logarithm.span()
    for node in nodes_of(origin):
        if span is None or not isinstance(node, ast.expr):
            continue
        found = Expression(origin, culprit_line(origin), node)
        start, end = found.span()
        if not start <= span[0] <= span[1] <= end:
            continue
        for pattern, use in PATTERNS:
            bound: Bound = {}
            if _matches(pattern, node, bound) and (text := _as_written(use, bound)):
                return (found.instead(text, "the same function, which stays finite"),)
    return ()


def with_roots(text: str, root: str) -> str:
    """The expression with `root` for its roots, `{}` being the argument; empty without any."""
    roots = _Roots(root)
    tree = roots.visit(ast.parse(text, mode="eval"))
    if roots.found:
        return ast.unparse(tree)
    return ""


class _Roots(ast.NodeTransformer):
    """Writes another root for every square root and standard deviation of tensors."""

    def __init__(self, root: str) -> None:
        self.found = False
        self._root = root

    def visit(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)
        # a root of numbers has no gradient
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("math.", "np.")):
            return node
        for pattern, use in ROOT_PATTERNS:
            bound: Bound = {}
            if _matches(pattern, node, bound):
                self.found = True
                text = self._root.format(_as_written(use, bound))
                return ast.parse(text, mode="eval").body
        return node


def _as_written(use: str, bound: Bound) -> str:
    """The replacement; empty where the arguments do not fit it."""
    given = bound.get("D", [])
    axis = [part for part in given if part not in KEPT]
    if "torch." in use and "{D}" in use and not axis:
        return ""
    if "{axis}" in use and (len(axis) != 1 or len(given) != 2):
        return ""
    x = bound["X"][0]
    return use.format(X=x, bX=bracketed(x), D=", ".join(given), axis="".join(axis))


def _matches(pattern: ast.AST, node: ast.AST, bound: Bound) -> bool:
    """Whether the node is of this form; `bound` gets what stands for its names."""
    if isinstance(pattern, ast.Name):
        text = [ast.unparse(node)]
        return bound.setdefault(pattern.id, text) == text
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.Constant):
        return bool(pattern.value == getattr(node, "value", None))
    if isinstance(pattern, ast.Call) and isinstance(node, ast.Call):
        operands, settings = call_operands(node, words(ast.unparse(pattern.func)))
        further = [*map(ast.unparse, operands[1:]), *settings]
        if len(pattern.args) > 1:
            bound["D"] = further
        elif further:
            return False
        return bool(operands) and _matches(pattern.args[0], operands[0], bound)
    parts = list(ast.iter_child_nodes(pattern))
    orders = [list(ast.iter_child_nodes(node))]
    if isinstance(getattr(pattern, "op", None), ast.Add):
        # sums match in either order
        orders.append(orders[0][::-1])
    for order in orders:
        trial = dict(bound)
        if all(_matches(part, other, trial) for part, other in zip(parts, order, strict=True)):
            bound.update(trial)
            return True
    return False


# --- What the page of a rule says of such an incident, and lines that are rewritten.


LONGEST_LINE = 60
"""Characters of a line within a sentence."""
FORMULAS_FAIL_AS = ("SG201", "SG202", "SG203", "SG206", "SG301", "SG401", "SG402", "SG403")
"""Codes of what happens to a formula that torch has a function for."""
POLES = ("SG401", "SG201", "SG202")
"""Codes of functions that are singular somewhere."""

Fields = Mapping[str, Any]


def in_their_words(finding: Finding, case: Case, proof: Proof) -> Finding:
    """The finding with remedies for this very incident; else those of the page, titles only."""
    own = _for_incident(finding.code, case, proof)
    if finding.code in FORMULAS_FAIL_AS:
        formula = _stable_formula(case)
        enough = formula and finding.code in ("SG206", "SG301")
        own = formula if enough else (*formula, *own)
    if finding.code == "SG402":
        # a function that is safe at the pole needs no selection before it
        safe = [one for pole in POLES for one in _for_operation(pole, case) if one.edits]
        own = tuple(sorted((*own, *safe), key=lambda remedy: not remedy.edits))
    if not own:
        # the variables of an example would be foreign in an incident
        own = tuple(replace(remedy, snippet="") for remedy in finding.remedies)
    return replace(finding, remedies=own)


def _for_incident(code: str, case: Case, proof: Proof) -> tuple[Remedy, ...]:
    """Another line for theirs, what the page says of such a case, and a function for theirs."""
    line = culprit_line(case.where).removeprefix("return ").rstrip(",")
    fields = {name: name == proof.said for name in rule_text(code).evidence} | proof.fields
    fields["who"] = _samples(case)
    fields["in_batch"] = case.tensor.startswith("batch")
    fields["statement"] = f"`{line}`" if 0 < len(line) <= LONGEST_LINE else case.place
    rewritten = REWRITTEN[code](case, fields) if code in REWRITTEN else ()
    fields["no_line"] = not rewritten
    # The remedies of the page under the first condition that holds.
    own = rewritten
    groups = rule_text(code).incident
    remedies = next((some for condition, some in groups if holds(condition, case, fields)), ())
    for remedy in remedies:
        title = fill(remedy.title, case, fields)
        if title:
            snippet = fill(remedy.snippet, case, fields)
            own = (*own, replace(remedy, title=title, snippet=snippet))
    # a loss of 0 for a batch without labels would only hide it
    if not own or (code == "SG102" and not fields["labels_missing"]):
        own += _for_operation(code, case)
    return own


def _samples(case: Case) -> str:
    """`sample 3 (row 48211)`; empty without a proof."""
    samples, rows = case.where.samples, case.where.rows
    if not samples:
        return ""
    text = f"sample{'s' if len(samples) > 1 else ''} {', '.join(map(str, samples[:8]))}"
    return f"{text} ({', '.join(rows[:4])})" if rows else text


# --- Values that left a dtype's range or met an infinity, and branches that were not selected.


MATRIX = ("mm", "bmm", "addmm", "baddbmm", "linear", "matmul")
KEPT_EPSILON = "1e-4"
"""float16 keeps it as a normal number."""
HARMLESS = "1.0"
"""Every function has a finite value and slope there."""


def _masked(case: Case, fields: Fields) -> tuple[Remedy, ...]:
    """SG206: 0 for the infinity, in 0 * inf and inf - inf."""
    found = _forward_expression(case)
    if found is None:
        return ()
    if fields["product"]:
        infinite, zero = fields["infinite"].label, fields["zero"].label
        if infinite in found.operands and zero in found.operands:
            use = f"{bracketed(infinite)}.masked_fill({bracketed(zero)} == 0, 0.0)"
            title = (
                f"Put 0 for the infinity of `{infinite}` where `{zero}` is 0, before the product"
            )
            return (found.with_operand(found.operands.index(infinite), use, title),)
    elif fields["difference"] and len(found.operands) == 2:
        first, second = found.operands
        use = f"{bracketed(second)}.masked_fill({bracketed(second)}.isinf(), 0.0)"
        title = (
            f"Put 0 for the infinity of `{second}`: where `{first}` is infinite too, their "
            f"difference is NaN"
        )
        return (found.with_operand(1, use, title),)
    return ()


def _forward_expression(case: Case) -> Expression | None:
    """The expression that can be written anew; one that works in place cannot."""
    in_place = (case.where.op or "").endswith("_")
    return None if case.backward or in_place else expression_of(case.where)


def _in_float32(case: Case, fields: Fields) -> tuple[Remedy, ...]:
    """SG301, where a result of the forward pass is too large."""
    origin = case.where
    if not fields["result"] or case.in_update or fields["cast"] or case.backward:
        return ()
    matrix = case.op in MATRIX
    # a product written with `@`, whichever way torch has folded it
    found = named_expression(origin, "matmul") if matrix else None
    found = found or _forward_expression(case)
    # autocast would make half precision of the operands of a product again
    inside = matrix and case.evidence.autocast
    leave = " and outside of autocast (`torch.autocast(..., enabled=False)`)" if inside else ""
    what = f"`{origin.module}`" if origin.module else case.place
    changes: dict[Any, str] = {}
    if found is not None:
        what = f"`{found.text}`"
        changes = {} if inside else _as_floats(case, found)
    limit = spell(FORMATS[case.dtype].largest)
    title = f"Compute {what} in float32{leave}: {_reached(case)}, and {case.dtype} ends at {limit}"
    in_words = Remedy(title=title, safety="changes-numbers")
    if found is None or not changes:
        return (in_words,)
    code = found.rewritten(changes, title, "changes-numbers")
    # what follows may take half precision only, which a trial shows: else it is said in words
    return (code,) if origin.statement is None else (replace(code, snippet=""), in_words)


def _as_floats(case: Case, found: Expression) -> dict[Any, str]:
    """Operands in float32; none where they are not known as tensors."""
    tensors = {operand.label for operand in case.inputs if operand.max is not None}
    changes: dict[Any, str] = {}
    for argument, text in zip(found.arguments, found.operands, strict=True):
        # one operand in float32 makes the result so, except that of a product of matrices
        if case.op in MATRIX or (text in tensors and not changes):
            changes[argument] = f"{bracketed(text)}.float()"
    return changes


def _reached(case: Case) -> str:
    if case.op == "sum":
        added = case.inputs[0]
        return f"it adds {elements(added)} elements up to {spell(reach(added))}"
    known = [operand for operand in case.inputs if operand.dtype and operand.max is not None]
    return " and ".join(f"{call(one)} reaches {spell(reach(one))}" for one in known[:2])


def _larger_epsilon(case: Case, fields: Fields) -> tuple[Remedy, ...]:
    """SG302: an epsilon that the dtype can hold, where it is written once."""
    lost = fields["lost_epsilon"]
    found = []
    for node in nodes_of(case.where):
        if isinstance(node, ast.Constant) and node.value == lost and lost is not None:
            found.append(Expression(case.where, culprit_line(case.where), node))
    if len(found) != 1:
        return ()
    title = f"Write {KEPT_EPSILON} for `{found[0].text}`, which is 0 in {case.dtype}"
    return (found[0].rewritten({found[0].node: KEPT_EPSILON}, title, "changes-numbers"),)


def _harmless_argument(case: Case, fields: Fields) -> tuple[Remedy, ...]:
    """SG402: make the argument harmless before it is used, not the result after."""
    name = case.node or case.op
    operator = {"Div": ast.Div, "Pow": ast.Pow}.get(name)
    found = find_expression(case.where, words(name.lower()), operator)
    if found is None:
        return ()
    position = 1 if operator is ast.Div else 0
    argument = found.operands[position]
    # behind the same condition, where the `where` stands in the line
    where = find_expression(case.where, words("where"), anywhere=True)
    if where is not None and len(where.operands) == 3 and where.text.startswith("torch."):
        start, end = found.span()
        for branch, chosen in ((1, f"{argument}, {HARMLESS}"), (2, f"{HARMLESS}, {argument}")):
            first, last = where.span(where.arguments[branch])
            if first <= start and end <= last:
                use = f"torch.where({where.operands[0]}, {chosen})"
                title = (
                    f"`{use}` for `{argument}` in `{found.text}`: what is not selected gets a "
                    f"harmless argument"
                )
                return (found.with_operand(position, use, title),)
    title = (
        f"Replace `{argument}` where its result is not wanted, before `{found.text}`: a "
        f"selection after it comes too late for the gradient"
    )
    return (Remedy(title=title),)


WIDER_CALL = {"float32": "double()", "float16": "float()", "bfloat16": "float()"}
MATH_ATTENTION = "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"


def _another_path(case: Case, fields: Fields) -> tuple[Remedy, ...]:
    """SG209: the line by the path that was finite."""
    origin = case.where
    if fields["math"] and origin.statement is not None:
        # in one line: the lines after it keep their numbers
        statement = origin.statement
        indent = statement.text[: len(statement.text) - len(statement.text.lstrip())]
        line = f"with {MATH_ATTENTION}: {statement.text.lstrip()}"
        edit = Edit(
            file=statement.file,
            line=statement.line,
            old=tuple(statement.text.split("\n")),
            new=tuple(f"{indent}{line}".split("\n")),
        )
        title = f"Run this attention with the math backend: {fields['kernel']} fails on its inputs"
        return (Remedy(title=title, snippet=line, safety="safe", edits=(edit,)),)
    found = find_expression(origin, words("apply"))
    if found is None or len(found.operands) < 2:
        return ()
    # `Kernel.apply(x)`: the class is the method's own object
    tensors = [operand.dtype for operand in case.inputs]
    arguments, texts = found.arguments[1:], found.operands[1:]
    changes: dict[Any, str] = {}
    for argument, text, dtype in zip(arguments, texts, tensors, strict=False):
        if fields["contiguous"]:
            changes[argument] = f"{bracketed(text)}.contiguous()"
        elif fields["wider"] and dtype in WIDER_CALL:
            changes[argument] = f"{bracketed(text)}.{WIDER_CALL[dtype]}"
    if not changes:
        return ()
    title = (
        f"Pass {', '.join(changes.values())} to {fields['kernel']}: with it, the result is "
        "finite here"
    )
    return (found.rewritten(changes, title, "safe" if fields["contiguous"] else "changes-numbers"),)


REWRITTEN: dict[str, Callable[[Case, Fields], tuple[Remedy, ...]]] = {
    "SG206": _masked,
    "SG209": _another_path,
    "SG301": _in_float32,
    "SG302": _larger_epsilon,
    "SG402": _harmless_argument,
}
"""Remedies that are made of more than one expression."""


# --- One operation of the user's line, and what to write instead of it.


RECIPROCAL = Remedy(
    title="where {x} is 0 the result is 0, without a gradient", snippet="safe_div(1.0, {x})"
)
IN_PLACE = {
    "div": ("torch.where({by} == 0, 1, {y})", "where {y} is 0 it is divided by 1"),
    "log": ("{by}.clamp_(min=1e-12)", "{y} stays above 0"),
    "sqrt": ("{by}.clamp_(min=1e-12)", "{y} stays above 0, where the slope is finite"),
    "exp": ("{by}.clamp_(max={most})", "it stays finite"),
}
"""In-place operations: what to write instead of the one that fails, and what that does.
"""
EXPONENTS = {"float16": ("5.0", "10.0")}
"""What exp may be given: so that room is left for what follows, and where larger values are usual,
nearly all that the dtype holds.
"""
EXPONENTS_WIDE = ("10.0", "80.0")
SMALLEST_NUMBER = "1e-3"
"""Floor for a divisor that is a Python number: what suits depends on what it stands for."""
ROOT_NAMES = ("sqrt", "std")
"""Operations whose slope is infinite at 0: a safe quotient behind one has a NaN gradient."""
SATURATES = {
    "sigmoid": "`binary_cross_entropy_with_logits` or `logsigmoid`",
    "_softmax": "`cross_entropy` or `log_softmax`",
    "softmax": "`cross_entropy` or `log_softmax`",
}
"""What makes probabilities, and what takes their logarithm without making them."""


def _for_operation(code: str, case: Case) -> tuple[Remedy, ...]:
    """What to write for the operation that failed."""
    origin = case.where
    name, fix = rule_text(code).in_line.get(case.node if case.backward else case.op, ("", None))
    if fix is None:
        return ()
    if name == "ctc_loss":
        return fix, _zero_infinity(origin)
    if not fix.snippet:
        return (fix,)
    if origin.library is not None:
        return (_in_a_library(case, origin),)
    found = named_expression(origin, name)
    if found is None and name == "div":
        found = named_expression(origin, "reciprocal")
        if found is not None and not found.in_place:
            return (_written(RECIPROCAL, found, ""),)
    if found is None or len(found.operands) < 1 + ("y}" in fix.snippet):
        return (_in_general(fix, case),)
    return _in_expression(code, case, name, fix, found)


def _in_expression(
    code: str, case: Case, name: str, fix: Remedy, found: Expression
) -> tuple[Remedy, ...]:
    first, second = EXPONENTS.get(case.dtype, EXPONENTS_WIDE)
    if found.in_place:
        known = name in IN_PLACE
        return (_made_harmless(found, name, first) if known else _in_general(fix, case),)
    written = _written(fix, found, first)
    if name == "div":
        return _divisions(code, case, found, written)
    if "{most}" in fix.snippet:
        # the second is shown only where a trial has found the first wanting
        return written, replace(_written(fix, found, second), snippet="")
    return (*_from_logits(case, found, name), written)


def _from_logits(case: Case, found: Expression, name: str) -> tuple[Remedy, ...]:
    """The log of a probability that another line has made; a formula in one line is rewritten."""
    made_by = base_name(case.evidence.argument_from)
    if name != "log" or made_by not in SATURATES or _stable_formula(case):
        return ()
    title = (
        f"Compute the loss from the logits, by {SATURATES[made_by]}: `{found.operands[0]}` comes "
        f"from a {made_by.strip('_')} that has rounded to exactly 0 or 1, where it has no gradient"
    )
    return (Remedy(title=title, safety="changes-numbers"),)


def _made_harmless(found: Expression, name: str, most: str) -> Remedy:
    """The operand before an operation in place: a safe function would not change it there."""
    template, why = IN_PLACE[name]
    position = 1 if name == "div" else 0
    y = found.operands[position]
    use = template.format(y=y, by=bracketed(y), most=most)
    title = f"`{use}` for `{y}` in `{found.text}`: {why.format(y=f'`{y}`')}"
    return found.with_operand(position, use, title, "changes-numbers")


def _written(fix: Remedy, found: Expression, most: str) -> Remedy:
    """Write the user's line with the safe function in place of what failed."""
    x, *others = found.operands
    why = fix.title.format(x=f"`{x}`", y=f"`{''.join(others[:1])}`")
    return found.instead(_filled(fix, x, others, found.settings, most), why, fix.safety)


def _filled(
    fix: Remedy, x: str, others: Sequence[str], settings: tuple[str, ...] = (), most: str = "10.0"
) -> str:
    """The replacement for an operation on `x`, and on what else it was given."""
    y = others[0] if others else ""
    minus_y = f"-{bracketed(y)}" if y else ""
    if y.startswith("-") and is_number(y):
        minus_y = y[1:]
    rest = (*others, *settings)
    return fix.snippet.format(
        x=x,
        y=y,
        bx=bracketed(x),
        minus_y=minus_y,
        more="".join(f", {part}" for part in rest),
        rest=", ".join(rest),
        biased=_corrected(x, rest),
        most=most,
    )


def _in_general(fix: Remedy, case: Case) -> Remedy:
    """Write the remedy without the user's expression, which is not in the line or not unique."""
    use = _filled(fix, "x", ["y"] if "y}" in fix.snippet else [])
    for function in SAFE_FUNCTION.findall(fix.snippet)[:1]:
        use = f"stepguard.numerics.{function}"
    why = fix.title.format(x="the argument", y="the divisor")
    place = case.place
    if "safe_div" in use and base_name(case.evidence.denominator_from) in ROOT_NAMES:
        place += ", and `stepguard.numerics.safe_sqrt` where the divisor is computed"
        why = "without it the gradient is NaN"
    return Remedy(title=f"Use `{use}` in {place}: {why}", safety=fix.safety)


def _in_a_library(case: Case, origin: Origin) -> Remedy:
    """The line is not the user's: what they pass to it is."""
    package = (origin.library or "").partition("/")[0]
    title = f"Check what {origin.source} passes to {package}, which fails on it"
    if origin.samples:
        title += f": drop or correct {_samples(case)}"
    for operand in sorted(case.inputs, key=has_zero, reverse=True)[:1]:
        title += f"; {describe(operand)}"
    return Remedy(title=title)


def _divisions(code: str, case: Case, found: Expression, zero: Remedy) -> tuple[Remedy, ...]:
    """What to write for a division by zero: it depends on where the divisor comes from."""
    divisor = found.operands[1]
    absorbed = code == "SG403"
    number = case.argument("other")
    if code == "SG201" and number is not None and number.dtype in ("float", "int"):
        least = "1" if number.dtype == "int" else SMALLEST_NUMBER
        use = f"max({divisor}, {least})"
        title = (
            f"`{use}` for `{divisor}` in `{found.text}`: it is a Python number that became 0; "
            f"choose the floor that suits it"
        )
        return found.with_operand(1, use, title, "changes-numbers"), zero
    safe = with_roots(divisor, "safe_sqrt({})")
    if safe and absorbed:
        # what follows has made a number of the infinity, so that 0 in its place is another value
        above = with_roots(divisor, "torch.sqrt({}.clamp_min(1e-12))")
        title = f"Keep what `{divisor}` is made of above 0: what follows hides the infinity only"
        code_of = found.with_operand(1, above, title, "changes-numbers")
        return replace(code_of, snippet=""), Remedy(title=title, safety="changes-numbers")
    if safe:
        why = f"where `{divisor}` is 0 the result is 0 and so is the gradient of the root"
        return (found.instead(f"safe_div({found.operands[0]}, {safe})", why),)
    if base_name(case.evidence.denominator_from) in ROOT_NAMES:
        # The root is in another line: safe_div alone would leave its infinite slope at 0. Only a
        # trial shows which line that is; without one, the remedy is in words.
        title = (
            f"`safe_div({', '.join(found.operands)})` for `{found.text}`, and `safe_sqrt` where "
            f"`{divisor}` is computed: without it the gradient is NaN"
        )
        return replace(zero, snippet=""), Remedy(title=title)
    if not absorbed:
        return (zero,)
    kept = f"torch.where({bracketed(divisor)} == 0, 1e-12, {divisor})"
    title = f"`{kept}` for `{divisor}` in `{found.text}`: what follows hides the infinity only"
    return found.with_operand(1, kept, title, "changes-numbers"), zero


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


def _zero_infinity(origin: Origin) -> Remedy:
    """CTC that counts 0 for what cannot be aligned."""
    found = named_expression(origin, "ctc_loss")
    why = "what cannot be aligned counts 0, without a gradient"
    if found is None or "zero_infinity=True" in found.settings:
        return Remedy(title=f"Or `zero_infinity=True`: {why}", safety="changes-training")
    kept = [part for part in found.settings if not part.startswith("zero_infinity=")]
    name = found.text.partition("(")[0]
    use = f"{name}({', '.join((*found.operands, *kept, 'zero_infinity=True'))})"
    return found.instead(use, why, "changes-training")
