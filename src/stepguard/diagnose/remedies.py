"""What to do about an incident in the user's own words: their line, operands, modules and samples.

The page of a rule keeps its examples; what an incident shows is written for the operation that
failed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, replace

from stepguard.diagnose import remedies_of_precision as precision
from stepguard.diagnose import remedies_of_runs as runs
from stepguard.diagnose import remedies_of_settings as settings
from stepguard.diagnose.case import Case
from stepguard.diagnose.ops import words
from stepguard.diagnose.source_line import Expression, bracketed, culprit_line, find_expression
from stepguard.diagnose.wording import spell
from stepguard.records import Finding, Remedy
from stepguard.records.finding import Safety


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """One operation, and what to write instead of it."""

    calls: frozenset[str] = frozenset()
    """Names it has in Python."""
    operator: type[ast.operator] | None = None
    use: str
    """The replacement; `{x}`, `{y}` are the operands, `{bx}` the first in brackets where it needs
    them, `{more}` what else was given, `{biased}` the same without a correction.
    """
    function: str = ""
    """The function of stepguard.numerics it needs; none where empty."""
    why: str
    """What it does where the old one failed; `{x}` and `{y}` again."""
    operands: int = 1
    safety: Safety = "safe"


LOG = Fix(
    calls=words("log"),
    use="safe_log({x})",
    function="safe_log",
    why="where {x} is 0 it is the log of the smallest number, with gradient 0",
)
SQRT = Fix(
    calls=words("sqrt"),
    use="safe_sqrt({x})",
    function="safe_sqrt",
    why="where {x} is 0 the gradient is 0 instead of infinite",
)
DIVISION = Fix(
    calls=words("div divide true_divide"),
    operator=ast.Div,
    use="safe_div({x}, {y})",
    function="safe_div",
    why="where {y} is 0 the result is 0, without a gradient",
    operands=2,
)
POWER = Fix(
    calls=words("pow"),
    operator=ast.Pow,
    use="safe_pow({x}, {y})",
    function="safe_pow",
    why="where {x} is 0 the gradient is 0 instead of infinite",
    operands=2,
)
NORM = Fix(
    calls=words("norm vector_norm"),
    use="safe_norm({x}{more})",
    function="safe_norm",
    why="the gradient of a zero vector is 0",
)
SOFTMAX = Fix(
    calls=words("softmax"),
    use="safe_softmax({x}{more})",
    function="safe_softmax",
    why="a row that is masked throughout gets weight 0",
)
EXP = Fix(
    calls=words("exp"),
    use="{bx}.clamp(max=80.0).exp()",
    why="it is finite in float32 and bfloat16; softmax, logsumexp and softplus need no bound",
    safety="changes-numbers",
)
FIXES: dict[str, dict[str, Fix]] = {
    "SG102": {"div": DIVISION},
    "SG201": {"div": DIVISION},
    "SG202": {"log": LOG},
    "SG203": {"exp": EXP},
    "SG204": {"softmax": SOFTMAX},
    "SG205": {
        "std": Fix(
            calls=words("std"),
            use="safe_sqrt({bx}.var({biased}))",
            function="safe_sqrt",
            why="of one element it is 0, with gradient 0",
            safety="changes-numbers",
        ),
        "var": Fix(
            calls=words("var"),
            use="{bx}.var({biased})",
            why="of one element it is 0, with gradient 0",
            safety="changes-numbers",
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
            function="safe_sqrt",
            why="{x} is negative only by rounding if it is a square or a variance",
            safety="changes-numbers",
        ),
        "pow": Fix(
            calls=words("pow"),
            operator=ast.Pow,
            use="safe_pow({bx}.clamp_min(0), {y})",
            function="safe_pow",
            why="a fractional power needs a base that is not negative",
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
            function="safe_acos",
            why="its slope is bounded where {x} is 1 or -1",
        ),
        "Asin": Fix(
            calls=words("asin arcsin"),
            use="safe_asin({x})",
            function="safe_asin",
            why="its slope is bounded where {x} is 1 or -1",
        ),
        "Atan2": Fix(
            calls=words("atan2 arctan2"),
            use="safe_atan2({x}, {y})",
            function="safe_atan2",
            why="where both are 0 the gradient is 0",
            operands=2,
        ),
        "Std": Fix(
            calls=words("std"),
            use="safe_sqrt({bx}.var({rest}))",
            function="safe_sqrt",
            why="where {x} is constant the gradient is 0",
        ),
        "Rsqrt": Fix(
            calls=words("rsqrt"),
            use="({x} + 1e-6).rsqrt()",
            why="a floor under {x} bounds the slope",
            safety="changes-numbers",
        ),
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
BUILDERS: dict[str, Callable[[Case], tuple[Remedy, ...]]] = {
    "SG206": precision.indeterminate,
    "SG301": precision.overflow_of_half,
    "SG302": precision.underflow_of_half,
    "SG402": precision.unselected_branch,
    "SG403": precision.absorbed_infinity,
    **runs.BUILDERS,
    **settings.BUILDERS,
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


def in_their_words(finding: Finding, case: Case) -> Finding:
    """The finding with remedies for this very incident; else those of the page, titles only."""
    own = _for_operation(finding.code, case) or _for_data(finding.code, case)
    if not own and finding.code in BUILDERS:
        own = BUILDERS[finding.code](case)
    if own:
        return replace(finding, remedies=own)
    # The examples of a page have variables of their own, which would be foreign here.
    titles = tuple(replace(remedy, snippet="") for remedy in finding.remedies)
    return replace(finding, remedies=titles)


def _for_operation(code: str, case: Case) -> tuple[Remedy, ...]:
    known = FIXES.get(code, {})
    operation = case.node if case.phase == "backward" else case.op
    fix = known.get(SAME.get(operation, operation))
    if fix is None or case.origin is None:
        return ()
    line = culprit_line(case.origin)
    found = find_expression(line, fix.calls, fix.operator) if line else None
    if found is None or len(found.operands) < fix.operands:
        return (_in_general(fix, case),)
    return (_rewritten(fix, found),)


def _rewritten(fix: Fix, found: Expression) -> Remedy:
    """Their own line, with the safe function in place of what failed."""
    x = found.operands[0]
    y = found.operands[1] if len(found.operands) > 1 else ""
    rest = (*found.operands[1:], *found.settings)
    more = "".join(f", {part}" for part in rest)
    use = fix.use.format(
        x=x,
        y=y,
        bx=bracketed(x),
        more=more,
        rest=", ".join(rest),
        biased=", ".join((*_dimensions(rest), "correction=0")),
    )
    why = fix.why.format(x=f"`{x}`", y=f"`{y}`")
    snippet = found.rewritten(use)
    if fix.function:
        snippet = f"from stepguard.numerics import {fix.function}\n{snippet}"
    return Remedy(title=f"`{use}` for `{found.text}`: {why}", snippet=snippet, safety=fix.safety)


def _dimensions(given: tuple[str, ...]) -> list[str]:
    """The arguments of a statistic without what says how it is corrected."""
    corrections = ("unbiased=", "correction=", "True", "False")
    return [part for part in given if not part.startswith(corrections)]


def _in_general(fix: Fix, case: Case) -> Remedy:
    """The same without their expression, which is not in the line or is there more than once."""
    use = fix.use.format(x="x", y="y", bx="x", more="", rest="", biased="correction=0")
    name = f"stepguard.numerics.{fix.function}" if fix.function else use
    why = fix.why.format(x="the argument", y="the divisor")
    return Remedy(title=f"Use `{name}` in {case.place}: {why}", safety=fix.safety)


def _for_data(code: str, case: Case) -> tuple[Remedy, ...]:
    """What is wrong with which samples, where the data is to blame."""
    origin = case.origin
    if origin is None:
        return ()
    name = f"`{case.tensor}`"
    who = _samples(case)
    if code == "SG101" and case.tensor.startswith("batch"):
        leave = Remedy(title=f"Leave {who} out where {name} is read, and count what is left out")
        fill = Remedy(
            title=f"Or fill in {name} before the model sees it; in the loss it is too late for the "
            f"gradient",
            safety="changes-numbers",
        )
        return (leave, fill)
    if code == "SG103" and case.evidence.sample_max is not None:
        largest = spell(case.evidence.sample_max)
        others = spell(case.evidence.others_max)
        reach = f"it reaches {largest}, all others {others}"
        return (Remedy(title=f"Leave {who} out, or correct it: {reach}"),)
    if code == "SG104" and case.evidence.target_out_of_domain is not None:
        value = spell(case.evidence.target_out_of_domain)
        return (Remedy(title=f"Correct or leave out {who}: a target there is {value}"),)
    return ()


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
