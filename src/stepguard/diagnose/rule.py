"""A rule: one cause code and how it is recognised; its page and its sentences are in the markdown.

`rules/sg200.py` recognises the causes SG201 to SG208, `rules/sg204.md` is the page of SG204.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from stepguard.diagnose.case import (
    COUNTED,
    CURVED,
    MEASURED,
    NLL,
    NORM_LAYERS,
    PRODUCTS,
    STATISTICS,
    Case,
    base_name,
    elements,
    has_zero,
    high,
    low,
    met,
    reach,
    words,
)
from stepguard.diagnose.wording import RuleText, fill, rule_text
from stepguard.records import Certainty, Finding, Operand, Remedy
from stepguard.records.incident import Safety

# --- Which operand left the domain of an operation: division, logarithm, root and overflow.


DIVISIONS = {
    **dict.fromkeys(words("div true_divide divide floor_divide remainder fmod"), ("other", 1)),
    **dict.fromkeys(words("reciprocal rsqrt"), ("self", 0)),
    "addcdiv": ("tensor2", 2),
}
"""Operation -> which argument it divides by."""
POWERS = ("pow", "float_power")
MASK_NAMES = ("mask", "label", "valid", "length")
LOGS: dict[str, tuple[str, int, float, float]] = {
    **dict.fromkeys(
        words("log log2 log10 special_entr lgamma mvlgamma digamma special_digamma"),
        ("self", 0, 0.0, math.inf),
    ),
    **dict.fromkeys(words("xlogy special_xlogy"), ("other", 1, 0.0, math.inf)),
    **dict.fromkeys(words("logit special_ndtri"), ("self", 0, 0.0, 1.0)),
    **dict.fromkeys(words("atanh erfinv"), ("self", 0, -1.0, 1.0)),
    "log1p": ("self", 0, -1.0, math.inf),
    "special_xlog1py": ("other", 1, -1.0, math.inf),
    "polygamma": ("self", 1, 0.0, math.inf),
}
"""Operation -> argument, its position, and the open interval in which it is finite."""


def zero_divisor(case: Case) -> Operand | None:
    """The operand with a zero that is divided by."""
    name, position = DIVISIONS.get(case.op, ("self", 0))
    divisor = case.argument(name, position)
    if case.op in POWERS:
        exponent = case.argument("exponent", 1)
        divides = exponent is not None and low(exponent) < 0
    else:
        divides = case.op in DIVISIONS
    return divisor if divides and has_zero(divisor) else None


def log_argument(case: Case) -> tuple[Operand, float, float] | None:
    """The operand of a logarithm at or beyond its pole, with the open interval it must stay in."""
    if case.op not in LOGS:
        return None
    name, position, least, most = LOGS[case.op]
    operand = case.argument(name, position)
    if operand is None:
        return None
    smallest, largest = met(operand)
    return (operand, least, most) if smallest <= least or largest >= most else None


def negative_root(case: Case) -> tuple[Operand, str] | None:
    """The operand that has no real root or power, with what was asked of it."""
    if case.op in NORM_LAYERS:
        variance = case.argument("running_var", 4)
        if variance is None or not low(variance) < 0:
            return None
        return variance, "root of a variance"
    operand = case.argument("self", 0)
    if operand is None or operand.nan:
        return None
    asked = _asked(case, *met(operand))
    return (operand, asked) if asked else None


def _asked(case: Case, least: float, most: float) -> str:
    """What was asked of an operand outside its domain; empty where it is inside."""
    if case.op in ("sqrt", "rsqrt") and least < 0:
        return "square root"
    exponent = case.argument("exponent", 1)
    if case.op in POWERS and least < 0 and (exponent is None or fractional(exponent)):
        return "power " if exponent is None else f"power {high(exponent):g}"
    if case.op in ("acos", "asin") and max(abs(least), abs(most)) > 1:
        return (
            f"{case.op}, which is real on [-1, 1] only: beyond, 1 - x*x is negative and has no root"
        )
    if case.op == "acosh" and least < 1:
        return "acosh, which is real from 1 on: below, x*x - 1 is negative and has no root"
    return ""


def fractional(operand: Operand) -> bool:
    """Some element is not a whole number, as far as its range shows."""
    ends = (low(operand), high(operand))
    return any(math.isfinite(end) and end != int(end) for end in ends)


def singular_inputs(case: Case) -> bool:
    """The result is non-finite in any precision: a pole, a missing root, an infinite operand."""
    out_of_domain = zero_divisor(case) or log_argument(case) or negative_root(case)
    return bool(out_of_domain) or not case.finite_inputs


def overflow(case: Case) -> bool:
    """Finite operands and no pole in between: the numbers were too large for the result."""
    if not case.inputs or singular_inputs(case):
        return False
    if case.op in STATISTICS and case.evidence.reduced_elements == 1:
        return False
    if any(operand.dtype and elements(operand) == 0 for operand in case.inputs):
        return False
    return case.op in PRODUCTS | NORM_LAYERS or bool(case.wider)


def counts_nothing(case: Case, divisor: Operand) -> bool:
    """Is the zero divisor a count or a mask's sum, so that the mean runs over no element?"""
    evidence = case.evidence
    made_by = base_name(evidence.denominator_from)
    # counts are whole, never negative, and depend on no weights
    if (
        case.op not in ("div", "true_divide", "reciprocal", "mul")
        or made_by in MEASURED | CURVED
        or evidence.denominator_fractional
        or evidence.denominator_learned
        or low(divisor) < 0
        or fractional(divisor)
    ):
        return False
    root = (evidence.denominator_root or "").lower()
    whole_type = "int" in divisor.dtype or "bool" in divisor.dtype
    if whole_type or any(word in root for word in MASK_NAMES):
        return True
    return _looks_like_count(case, divisor, made_by)


def _looks_like_count(case: Case, divisor: Operand, made_by: str) -> bool:
    """Nothing excludes a count: do the values, and what is divided, speak for one?"""
    in_loss = case.phase == "loss"
    # what is divided is 0 too, as the sum over no element is
    nothing_above = (
        case.op == "reciprocal"
        or case.evidence.zero_numerator
        or has_zero(case.argument("self", 0))
    )
    several = elements(divisor) > 1 and high(divisor) >= 1 and low(divisor) == 0
    if made_by in COUNTED:
        return (in_loss or nothing_above) and (several or reach(divisor) == 0)
    if case.op != "div" or not nothing_above:
        return False
    if elements(divisor) == 1:
        # transformers divides the summed cross entropy inside the model, by a count of its own
        return in_loss or base_name(case.evidence.numerator_from) in NLL
    return several


# --- What a rule finds, and the finding that is made of it.


ShownBy = Literal["operation", "record", "inference"]
"""What a rule goes by: the operation or stored tensor that was located, with its values; settings
and readings that were recorded as they are; or a conclusion from what was seen later.
"""
SAFETY_ORDER: tuple[str, ...] = get_args(Safety)


@dataclass(frozen=True, slots=True)
class Proof:
    """What a rule found: how sure it is, which sentences of its page say it, and their fields."""

    certainty: Certainty
    said: str
    fields: dict[str, Any]


def certain(said: str = "", /, **fields: Any) -> Proof:
    """The operation and its operands leave no doubt."""
    return Proof("certain", said, fields)


def likely(said: str = "", /, **fields: Any) -> Proof:
    """The numbers fit, and another cause is not excluded."""
    return Proof("likely", said, fields)


def possible(said: str = "", /, **fields: Any) -> Proof:
    """True as well, but rather a circumstance than the cause."""
    return Proof("possible", said, fields)


Recognise = Callable[[Case], Proof | None]
"""Examines a case; None when this is not the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One cause code."""

    code: str
    recognise: Recognise
    yields_to: frozenset[str]
    """Codes that go before this one where both are found with the same certainty."""
    shown_by: ShownBy
    looks: int
    """How many looks there must be."""

    @property
    def text(self) -> RuleText:
        """The page, read when it is first asked for."""
        return rule_text(self.code)

    @property
    def ordered(self) -> tuple[Remedy, ...]:
        """The remedies, those first that change least."""
        order = sorted(self.text.remedies, key=lambda one: SAFETY_ORDER.index(one.safety))
        return tuple(order)

    @property
    def fixed(self) -> str:
        """The safest remedy that is code."""
        return next(remedy.snippet for remedy in self.ordered if remedy.snippet)

    def examine(self, case: Case) -> Proof | None:
        return self.recognise(case) if len(case.looks) >= self.looks else None

    def finding(self, case: Case, proof: Proof) -> Finding:
        """What this proof shows, with the words of the page."""
        sentences = self.text.evidence[proof.said]
        filled = [fill(sentence, case, proof.fields) for sentence in sentences]
        return Finding(
            code=self.code,
            title=self.text.title,
            evidence=tuple(sentence for sentence in filled if sentence),
            certainty=proof.certainty,
            remedies=self.ordered,
        )


def rule(
    yields_to: str = "", shown_by: ShownBy = "operation", looks: int = 0
) -> Callable[[Recognise], Rule]:
    """The rule that a function recognises; its name is the code."""

    def make(recognise: Recognise) -> Rule:
        return Rule(
            code=recognise.__name__.upper(),
            recognise=recognise,
            yields_to=words(yields_to),
            shown_by=shown_by,
            looks=looks,
        )

    return make
