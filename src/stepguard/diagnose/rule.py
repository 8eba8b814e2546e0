"""A rule: one cause code, how it is recognised, and the page that explains it.

`rules/sg204.py` holds the recognition, `rules/sg204.md` the page.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal, cast, get_args

from stepguard.diagnose.case import (
    COUNTED,
    CURVED,
    FORMATS,
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
    plain,
    reach,
)
from stepguard.records import Certainty, Finding, Operand, Remedy
from stepguard.records.incident import Safety
from stepguard.records.probes import Forecast

# --- Which operand left the domain of an operation: division, logarithm, root and overflow.


DIVISIONS = {
    "div": ("other", 1),
    "true_divide": ("other", 1),
    "divide": ("other", 1),
    "floor_divide": ("other", 1),
    "remainder": ("other", 1),
    "fmod": ("other", 1),
    "addcdiv": ("tensor2", 2),
    "reciprocal": ("self", 0),
    "rsqrt": ("self", 0),
}
"""Operation -> which argument it divides by."""
POWERS = ("pow", "float_power")
MASK_NAMES = ("mask", "label", "valid", "length")

LOGS: dict[str, tuple[str, int, float, float]] = {
    "log": ("self", 0, 0.0, math.inf),
    "log2": ("self", 0, 0.0, math.inf),
    "log10": ("self", 0, 0.0, math.inf),
    "log1p": ("self", 0, -1.0, math.inf),
    "xlogy": ("other", 1, 0.0, math.inf),
    "special_xlogy": ("other", 1, 0.0, math.inf),
    "special_xlog1py": ("other", 1, -1.0, math.inf),
    "special_entr": ("self", 0, 0.0, math.inf),
    "logit": ("self", 0, 0.0, 1.0),
    "special_ndtri": ("self", 0, 0.0, 1.0),
    "atanh": ("self", 0, -1.0, 1.0),
    "erfinv": ("self", 0, -1.0, 1.0),
    "lgamma": ("self", 0, 0.0, math.inf),
    "mvlgamma": ("self", 0, 0.0, math.inf),
    "digamma": ("self", 0, 0.0, math.inf),
    "special_digamma": ("self", 0, 0.0, math.inf),
    "polygamma": ("self", 1, 0.0, math.inf),
}
"""Operation -> argument, its position, and the open interval in which it is finite."""


def zero_divisor(case: Case) -> Operand | None:
    """The operand with a zero that is divided by."""
    if case.op in DIVISIONS:
        name, position = DIVISIONS[case.op]
        divisor = case.argument(name, position)
        if has_zero(divisor):
            return divisor
        return None
    if case.op not in POWERS:
        return None
    base = case.argument("self", 0)
    exponent = case.argument("exponent", 1)
    divides = exponent is not None and low(exponent) < 0
    if divides and has_zero(base):
        return base
    return None


def log_argument(case: Case) -> tuple[Operand, float, float] | None:
    """The operand of a logarithm at or beyond its pole, with the open interval it must stay in."""
    if case.op not in LOGS:
        return None
    name, position, least, most = LOGS[case.op]
    operand = case.argument(name, position)
    if operand is None:
        return None
    smallest, largest = met(operand)
    if smallest <= least or largest >= most:
        return operand, least, most
    return None


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
    asked = _asked_beyond_domain(case, operand)
    if asked:
        return (operand, asked)
    return None


def _asked_beyond_domain(case: Case, operand: Operand) -> str:
    """What was asked of an operand outside its domain; empty where it is inside."""
    least, most = met(operand)
    if case.op in ("sqrt", "rsqrt") and least < 0:
        return "square root"
    if case.op in POWERS and least < 0:
        return _fractional_power(case)
    if case.op in ("acos", "asin") and max(abs(least), abs(most)) > 1:
        return (
            f"{case.op}, which is real on [-1, 1] only: beyond, 1 - x*x is negative and has no root"
        )
    if case.op == "acosh" and least < 1:
        return "acosh, which is real from 1 on: below, x*x - 1 is negative and has no root"
    return ""


def _fractional_power(case: Case) -> str:
    exponent = case.argument("exponent", 1)
    if exponent is None:
        return "power "
    if fractional(exponent):
        return f"power {high(exponent):g}"
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
    if case.op not in ("div", "true_divide", "reciprocal", "mul") or _cannot_count(case, divisor):
        return False
    root = (case.evidence.denominator_root or "").lower()
    whole_type = "int" in divisor.dtype or "bool" in divisor.dtype
    if whole_type or any(word in root for word in MASK_NAMES):
        return True
    return _looks_like_count(case, divisor)


def _cannot_count(case: Case, divisor: Operand) -> bool:
    """Counts are whole, never negative, and depend on no weights."""
    evidence = case.evidence
    if base_name(evidence.denominator_from) in MEASURED | CURVED:
        return True
    if evidence.denominator_fractional or evidence.denominator_learned:
        return True
    return low(divisor) < 0 or fractional(divisor)


def _looks_like_count(case: Case, divisor: Operand) -> bool:
    """Nothing excludes a count: do the values, and what is divided, speak for one?"""
    in_loss = case.phase == "loss"
    if base_name(case.evidence.denominator_from) in COUNTED:
        all_zero = reach(divisor) == 0
        return (in_loss or _nothing_above(case)) and (_counts_rows(divisor) or all_zero)
    if case.op != "div" or not _nothing_above(case):
        return False
    if elements(divisor) == 1:
        # transformers divides the summed cross entropy inside the model, by a count of its own
        return in_loss or base_name(case.evidence.numerator_from) in NLL
    return _counts_rows(divisor)


def _counts_rows(divisor: Operand) -> bool:
    """Several numbers, of which some are 0 and some are not."""
    return elements(divisor) > 1 and high(divisor) >= 1 and low(divisor) == 0


def _nothing_above(case: Case) -> bool:
    """Is what is divided 0 too, as the sum over no element is?"""
    if case.op == "reciprocal" or case.evidence.zero_numerator:
        return True
    return has_zero(case.argument("self", 0))


# --- Numbers and operands as the sentences of a finding say them.


WORDS = {"nan": "NaN", "posinf": "+inf", "neginf": "-inf", "zeros": "zero"}
NON_FINITE: tuple[str, ...] = ("nan", "posinf", "neginf")


def spell(value: float | None) -> str:
    """A number in few digits, exact for whole ones a reader would recognise."""
    if value is None:
        return "unknown"
    if math.isfinite(value) and value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.6g}"


def describe(operand: Operand | None, label: str = "") -> str:
    """`other` (float32, shape (4, 1)) spans 0 to 1.13, 1 of 4 elements is 0; empty for None."""
    if operand is None:
        return ""
    name = call(operand, label)
    is_python_number = not operand.shape and operand.min is None
    if is_python_number and operand.value is not None:
        return f"{name} is {spell(operand.value)}"
    kind = ""
    if operand.dtype:
        kind = f"{plain(operand.dtype)}, "
    text = f"{name} ({kind}shape {operand.shape}){_range(operand)}"
    kinds = NON_FINITE
    # of a tensor of one value, the range has said already whether that is 0
    if low(operand) != high(operand):
        kinds = (*NON_FINITE, "zeros")
    counted = counts(operand, kinds)
    if counted:
        return f"{text}, with {counted}"
    return text


def call(operand: Operand, label: str = "") -> str:
    """`duration` in quotes as the user wrote it, or the divisor in words."""
    name = label or operand.called or "operand"
    in_words = name.startswith(("the ", "what "))
    return name if in_words else f"`{name}`"


def _range(operand: Operand) -> str:
    if low(operand) == high(operand):
        return f" is {spell(low(operand))}"
    if math.isnan(low(operand)):
        return ""
    return f" spans {spell(low(operand))} to {spell(high(operand))}"


def counts(operand: Operand, kinds: tuple[str, ...] = NON_FINITE) -> str:
    """`3 of 12 elements NaN, 1 of 12 elements +inf`; empty when there is none."""
    total = elements(operand)
    parts = []
    for kind in kinds:
        number = int(getattr(operand, kind))
        if number:
            parts.append(f"{number} of {total} elements {WORDS[kind]}")
    return ", ".join(parts)


def at_index(operand: Operand) -> str:
    """` at index (3, 1)` where the element is known."""
    if operand.index:
        return f" at index {operand.index}"
    return ""


def broken_by(operand: Operand) -> str:
    """The element that broke the operation, where it is known."""
    if operand.index is None:
        return ""
    return f"the value that broke it is {spell(operand.value)}{at_index(operand)}"


def limit_of(dtype: str) -> str:
    """`65504, the largest float16`."""
    name = plain(dtype)
    if name not in FORMATS:
        return f"the largest {name}"
    return f"{spell(FORMATS[name].largest)}, the largest {name}"


# --- Read the page of a rule from the markdown file beside it; the headings are fixed.


_SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
_REMEDY = re.compile(r"^### (.+) \((safe|changes-numbers|changes-training)\)$", re.MULTILINE)
_CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleText:
    """What people read about one cause code."""

    title: str
    what: str
    """What it means."""
    why: str
    """Why it happens."""
    how: str
    """How stepguard knows."""
    remedies: tuple[Remedy, ...]
    """Each snippet replaces the lines of `bad` and makes the example healthy (tested)."""
    special: tuple[Remedy, ...]
    """Remedies for single cases, which the rule adds where they apply."""
    setup: str
    """What the example starts from: imports, tensors, modules."""
    bad: str
    """The lines that go wrong."""
    see: tuple[str, ...]
    """Public threads (`owner/repo#number`) and documentation pages."""


@cache
def rule_text(code: str) -> RuleText:
    """The page of a code, for instance `SG204`."""
    name = f"{code.lower()}.md"
    text = files("stepguard.diagnose.rules").joinpath(name).read_text(encoding="utf-8")
    return parse(text)


def parse(text: str) -> RuleText:
    """A page from its markdown; a heading that is missing is a KeyError."""
    heading, sections = _split(_SECTION, text)
    # the first block prepares, the second one goes wrong; remedies replace the second
    setup, bad = _CODE.findall(sections["Example"])
    return RuleText(
        title=heading.partition(": ")[2].strip(),
        what=_paragraph(sections["What it means"]),
        why=_paragraph(sections["Why it happens"]),
        how=_paragraph(sections["How stepguard knows"]),
        remedies=_remedies(sections["What to do"]),
        special=_remedies(sections.get("What to do in special cases", "")),
        setup=setup.strip(),
        bad=bad.strip(),
        see=tuple(line.removeprefix("- ") for line in sections["See also"].split("\n") if line),
    )


def _split(heading: re.Pattern[str], text: str) -> tuple[str, Mapping[str, str]]:
    """The text before the first heading, and the text under each one."""
    before, *rest = heading.split(text)
    return before, dict(zip(rest[::2], rest[1::2], strict=True))


def _paragraph(text: str) -> str:
    return " ".join(text.split())


def _remedies(text: str) -> tuple[Remedy, ...]:
    parts = _REMEDY.split(text)[1:]
    remedies = []
    for title, safety, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        code = _CODE.search(body)
        snippet = ""
        if code is not None:
            snippet = code[1].strip()
        remedies.append(Remedy(title=title, snippet=snippet, safety=cast(Safety, safety)))
    return tuple(remedies)


# --- A rule: one cause code, how it is recognised, and the page that explains it.


ShownBy = Literal["operation", "record", "inference"]
"""What a rule goes by: the operation or stored tensor that was located, with its values; settings
and readings that were recorded as they are; or a conclusion from what was seen later.
"""
SAFETY_ORDER: tuple[str, ...] = get_args(Safety)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What a rule found: sentences with numbers, and how sure it is."""

    certainty: Certainty
    sentences: tuple[str, ...]
    """Empty ones are left out."""
    remedies: tuple[Remedy, ...] = ()
    """Remedies for just this case; they come before the rule's own of the same safety."""
    forecast: Forecast | None = None
    """When it comes, where it has not come yet."""


def certain(*sentences: str, remedies: tuple[Remedy, ...] = ()) -> Proof:
    """The operation and its operands leave no doubt."""
    return Proof(certainty="certain", sentences=sentences, remedies=remedies)


def likely(*sentences: str, remedies: tuple[Remedy, ...] = ()) -> Proof:
    """The numbers fit, and another cause is not excluded."""
    return Proof(certainty="likely", sentences=sentences, remedies=remedies)


def possible(*sentences: str, remedies: tuple[Remedy, ...] = ()) -> Proof:
    """True as well, but rather a circumstance than the cause."""
    return Proof(certainty="possible", sentences=sentences, remedies=remedies)


def foretold(forecast: Forecast | None, consequence: str) -> Proof | None:
    """A trend is clear, and has not reached its limit."""
    if forecast is None:
        return None
    sentence = f"{forecast.sentence}: {consequence}"
    return Proof(certainty="likely", sentences=(sentence,), forecast=forecast)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One cause code."""

    code: str
    recognise: Callable[[Case], Proof | None]
    """Examines a case; None when this is not the cause."""
    yields_to: tuple[str, ...] = ()
    """Codes that go before this one where both are found with the same certainty."""
    shown_by: ShownBy = "operation"

    @property
    def text(self) -> RuleText:
        """The page, read when it is first asked for."""
        return rule_text(self.code)

    @property
    def ordered(self) -> tuple[Remedy, ...]:
        """The remedies, those first that change least."""
        return by_safety(self.text.remedies)

    @property
    def fixed(self) -> str:
        """The safest remedy that is code."""
        return next(remedy.snippet for remedy in self.ordered if remedy.snippet)

    def examine(self, case: Case) -> Finding | None:
        """The finding for this case, or None."""
        proof = self.recognise(case)
        if proof is None:
            return None
        return self.finding(proof)

    def finding(self, proof: Proof) -> Finding:
        """What this proof shows, with the words of the page."""
        return Finding(
            code=self.code,
            title=self.text.title,
            evidence=tuple(sentence for sentence in proof.sentences if sentence),
            certainty=proof.certainty,
            remedies=by_safety(proof.remedies + self.text.remedies),
        )


def by_safety(remedies: tuple[Remedy, ...]) -> tuple[Remedy, ...]:
    return tuple(sorted(remedies, key=lambda remedy: SAFETY_ORDER.index(remedy.safety)))
