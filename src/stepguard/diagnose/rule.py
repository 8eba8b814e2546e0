"""A rule: one cause code, how it is recognised, and what it says.

`rules/sg200.py` recognises the causes SG201 to SG208, `rules/sg204.md` is the page of SG204. A
sentence of a page is text with fields of the case, `{place}`, `{evidence.eps}`. One with a field
that is not known is dropped; `[?...|...?]` is a part that is dropped alone, or replaced by its
alternative. A field that is True, or has the word `if`, adds nothing: it is a condition. Operands
take other words: `{divisor:name}`.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal, NamedTuple, cast

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
    words,
)
from stepguard.records import Certainty, Finding, Operand, Remedy
from stepguard.records import incident as records
from stepguard.records.incident import Safety

# --- Numbers and operands in words, and sentences with fields.


NON_FINITE = {"nan": "NaN", "posinf": "+inf", "neginf": "-inf"}
INFINITE = {"posinf": "+inf", "neginf": "-inf"}
ZEROS = {"zeros": "zero"}
MOST_NAMES = 3


def spell(value: float | None) -> str:
    """Four significant digits, whole numbers in full."""
    return "unknown" if value is None else records.number(value)


def describe(operand: Operand | None) -> str:
    """`other` (float32, shape (4, 1)) spans 0 to 1.13, 1 of 4 elements is 0; empty for None."""
    if operand is None:
        return ""
    name = call(operand)
    if not operand.shape and operand.min is None and operand.value is not None:
        return f"{name} is {spell(operand.value)}"
    kind = f"{plain(operand.dtype)}, " if operand.dtype else ""
    text = f"{name} ({kind}shape {operand.shape})"
    counted = counts(operand, NON_FINITE | ZEROS)
    if low(operand) == high(operand):
        # the value says already whether it is 0
        text += f" is {spell(low(operand))}"
        counted = counts(operand)
    elif not math.isnan(low(operand)):
        text += f" spans {spell(low(operand))} to {spell(high(operand))}"
    return f"{text}, with {counted}" if counted else text


def call(operand: Operand) -> str:
    """`duration` in quotes as the user wrote it, or the divisor in words."""
    name = operand.called or "operand"
    return name if name.startswith(("the ", "what ")) else f"`{name}`"


def counts(operand: Operand, kinds: Mapping[str, str] = NON_FINITE) -> str:
    """`3 of 12 elements NaN, 1 of 12 elements +inf`; empty when there is none."""
    parts = []
    for kind, word in kinds.items():
        number = getattr(operand, kind)
        if number:
            parts.append(f"{number} of {elements(operand)} elements {word}")
    return ", ".join(parts)


def limit_of(dtype: str) -> str:
    """`65504, the largest float16`."""
    name = plain(dtype)
    if name not in FORMATS:
        return f"the largest {name}"
    return f"{spell(FORMATS[name].largest)}, the largest {name}"


def at_index(operand: Operand) -> str:
    """` at index (3, 1)` where the element is known."""
    if operand.index:
        return f" at index {operand.index}"
    return ""


def _element(operand: Operand) -> str:
    """`-1 at index (3, 1)` where the element that broke the operation is known."""
    return "" if operand.index is None else spell(operand.value) + at_index(operand)


def _infinities(operand: Operand) -> str:
    amount = counts(operand, INFINITE | ZEROS)
    return f"{call(operand)} has {amount}" if amount else describe(operand)


def _shape(operand: Operand) -> str:
    sizes = ",".join(map(str, operand.shape))
    reaches = "" if operand.max is None else f" from {operand.min:.4g} to {operand.max:.4g}"
    return f"{operand.dtype} [{sizes}]{reaches}"


OPERAND_WORDS: dict[str, Callable[[Operand], str]] = {
    "": describe,
    "name": call,
    "at": at_index,
    "counts": counts,
    "element": _element,
    "infinities": _infinities,
    "infinite": lambda operand: counts(operand, INFINITE),
    "shape": _shape,
    "elements": lambda operand: str(elements(operand)),
    "low": lambda operand: spell(low(operand)),
    "high": lambda operand: spell(high(operand)),
    "reach": lambda operand: spell(reach(operand)),
}


class _Sentence(string.Formatter):
    """Looks a field up among those of the proof, then in the case; LookupError: not known."""

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return kwargs[str(key)] if key in kwargs else getattr(args[0], str(key))

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        try:
            value, first = super().get_field(field_name, args, kwargs)
        except AttributeError as error:
            if error.obj is None:
                raise LookupError(field_name) from error
            raise
        if value is None or value is False or value == "" or value == () or value == []:
            raise LookupError(field_name)
        return value, first

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is True or format_spec == "if":
            return ""
        if isinstance(value, Operand):
            text = OPERAND_WORDS[format_spec](value)
            if not text:
                raise LookupError(format_spec)
            return text
        if isinstance(value, list):
            more = f" and {len(value) - MOST_NAMES} more" if len(value) > MOST_NAMES else ""
            return ", ".join(value[:MOST_NAMES]) + more
        if isinstance(value, tuple):
            return ", ".join(self.format_field(one, format_spec) for one in value)
        if isinstance(value, float) and not format_spec:
            return spell(value)
        return format(value, format_spec)


_FORMATTER = _Sentence()
_OPTIONAL = re.compile(r"\[\?(.*?)\?\]")


def fill(text: str, case: Case, fields: Mapping[str, Any]) -> str:
    """The sentence with its fields filled in; empty where one of them is not known."""
    filled = []
    for number, part in enumerate(_OPTIONAL.split(text)):
        optional = number % 2 == 1
        for alternative in part.split("|") if optional else [part]:
            try:
                filled.append(_FORMATTER.vformat(alternative, (case,), fields))
            except LookupError:
                if not optional:
                    return ""
            else:
                break
    return "".join(filled)


def holds(condition: str, case: Case, fields: Mapping[str, Any]) -> bool:
    """Whether every field of `a, not b` is known, or not known; an empty condition holds."""
    for name in filter(None, condition.split(", ")):
        known = bool(fill("{" + name.removeprefix("not ") + "}.", case, fields))
        if known == name.startswith("not "):
            return False
    return True


# --- The page of a rule: the markdown file beside it, with fixed headings.


_SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
_VARIANT = re.compile(r"^### (.+)$", re.MULTILINE)
_REMEDY = re.compile(r"^### (.+) \((safe|changes-numbers|changes-training)\)$", re.MULTILINE)
_CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)


class RuleText(NamedTuple):
    """What people read about one cause code."""

    title: str
    what: str
    """What it means."""
    why: str
    """Why it happens."""
    how: str
    """How stepguard knows."""
    remedies: tuple[Remedy, ...]
    """The remedies that change least come first. Each snippet replaces the lines of `bad` and makes
    the example healthy (tested)."""
    setup: str
    """What the example starts from: imports, tensors, modules."""
    bad: str
    """The lines that go wrong."""
    see: tuple[str, ...]
    """Public threads (`owner/repo#number`) and documentation pages."""
    evidence: Mapping[str, tuple[str, ...]]
    """Sentences with fields, by the name the rule gives to what it found."""
    incident: tuple[tuple[str, tuple[Remedy, ...]], ...]
    """Remedies with fields, and the condition under which they apply: the first one counts."""
    in_line: Mapping[str, tuple[str, Remedy]]
    """Operation -> its name in Python, and what to write for it (as a snippet; its title is what
    that does)."""


@cache
def rule_text(code: str) -> RuleText:
    """The page of a code, for instance `SG204`."""
    name = f"{code.lower()}.md"
    return parse(files("stepguard.diagnose.rules").joinpath(name).read_text(encoding="utf-8"))


def parse(text: str) -> RuleText:
    """A page from its markdown; a heading that is missing is a KeyError."""
    heading, sections = _split(_SECTION, text)
    # the first block prepares, the second one goes wrong; remedies replace the second
    setup, bad = _CODE.findall(sections["Example"])
    only, variants = _split(_VARIANT, sections.get("Evidence", ""))
    evidence = {}
    for name, body in {"": only, **variants}.items():
        evidence[name] = tuple(line[2:] for line in body.split("\n") if line.startswith("- "))
    incident = []
    for name, body in sections.items():
        if name.startswith("In an incident"):
            incident.append((name.partition(": ")[2], _remedies(body)))
    in_line: dict[str, tuple[str, Remedy]] = {}
    for remedy in _remedies(sections.get("In the failing line", "")):
        operations, _, why = remedy.title.partition(": ")
        names = operations.split()
        in_line |= dict.fromkeys(names, (names[0].lower(), replace(remedy, title=why)))
    return RuleText(
        title=heading.partition(": ")[2].strip(),
        what=" ".join(sections["What it means"].split()),
        why=" ".join(sections["Why it happens"].split()),
        how=" ".join(sections["How stepguard knows"].split()),
        remedies=_remedies(sections["What to do"]),
        setup=setup.strip(),
        bad=bad.strip(),
        see=tuple(line.removeprefix("- ") for line in sections["See also"].split("\n") if line),
        evidence=evidence,
        incident=tuple(incident),
        in_line=in_line,
    )


def _split(heading: re.Pattern[str], text: str) -> tuple[str, dict[str, str]]:
    """The text before the first heading, and the text under each one."""
    before, *rest = heading.split(text)
    return before, dict(zip(rest[::2], rest[1::2], strict=True))


def _remedies(text: str) -> tuple[Remedy, ...]:
    parts = _REMEDY.split(text)[1:]
    remedies = []
    for title, safety, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        code = _CODE.search(body)
        snippet = "" if code is None else code[1].strip()
        remedies.append(Remedy(title=title, snippet=snippet, safety=cast(Safety, safety)))
    return tuple(remedies)


# --- Which operand left the domain of an operation: division, logarithm, root and overflow.


DIVISIONS = {
    **dict.fromkeys(words("div true_divide divide floor_divide remainder fmod"), "other"),
    **dict.fromkeys(words("reciprocal rsqrt"), "self"),
    "addcdiv": "tensor2",
}
"""Operation -> which argument it divides by."""
POWERS = ("pow", "float_power")
MASK_NAMES = ("mask", "label", "valid", "length")
LOGS: dict[str, tuple[str, float, float]] = {
    **dict.fromkeys(
        words("log log2 log10 special_entr lgamma mvlgamma digamma special_digamma"),
        ("self", 0.0, math.inf),
    ),
    **dict.fromkeys(words("xlogy special_xlogy"), ("other", 0.0, math.inf)),
    **dict.fromkeys(words("logit special_ndtri"), ("self", 0.0, 1.0)),
    **dict.fromkeys(words("atanh erfinv"), ("self", -1.0, 1.0)),
    "log1p": ("self", -1.0, math.inf),
    "special_xlog1py": ("other", -1.0, math.inf),
    "polygamma": ("self", 0.0, math.inf),
}
"""Operation -> argument, and the open interval in which it is finite."""


def divisor_of(case: Case) -> Operand | None:
    """The operand that is divided by."""
    if case.op in POWERS:
        exponent = case.argument("exponent")
        divides = exponent is not None and low(exponent) < 0
        if divides:
            return case.argument("self")
        return None
    if case.op in DIVISIONS:
        return case.argument(DIVISIONS[case.op])
    return None


def zero_divisor(case: Case) -> Operand | None:
    """The operand with a zero that is divided by."""
    divisor = divisor_of(case)
    if has_zero(divisor):
        return divisor
    return None


def log_argument(case: Case) -> tuple[Operand, float, float] | None:
    """The operand of a logarithm at or beyond its pole, with the open interval it must stay in."""
    if case.op not in LOGS:
        return None
    name, least, most = LOGS[case.op]
    operand = case.argument(name)
    if operand is None:
        return None
    smallest, largest = met(operand)
    if smallest <= least or largest >= most:
        return (operand, least, most)
    return None


def negative_root(case: Case) -> tuple[Operand, str] | None:
    """The operand that has no real root or power, with what was asked of it."""
    if case.op in NORM_LAYERS:
        variance = case.argument("running_var")
        if variance is None or not low(variance) < 0:
            return None
        return variance, "root of a variance"
    operand = case.argument("self")
    if operand is None or operand.nan:
        return None
    asked = _asked(case, *met(operand))
    if asked:
        return (operand, asked)
    return None


def _asked(case: Case, least: float, most: float) -> str:
    """What was asked of an operand outside its domain; empty where it is inside."""
    if case.op in ("sqrt", "rsqrt") and least < 0:
        return "square root"
    exponent = case.argument("exponent")
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
        case.op == "reciprocal" or case.evidence.zero_numerator or has_zero(case.argument("self"))
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


class Proof(NamedTuple):
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


Found = Proof | None
"""What a rule has found; None when this is not the cause."""
Recognise = Callable[[Case], Found]


class Rule(NamedTuple):
    """One cause code."""

    code: str
    recognise: Recognise
    yields_to: frozenset[str]
    """Codes that go before this one where both are found with the same certainty."""
    shown_by: ShownBy
    looks: int
    """How many probes there must be."""

    @property
    def text(self) -> RuleText:
        """The page, read when it is first asked for."""
        return rule_text(self.code)

    @property
    def fixed(self) -> str:
        """The safest remedy that is code."""
        return next(remedy.snippet for remedy in self.text.remedies if remedy.snippet)

    def examine(self, case: Case) -> Found:
        if len(case.looks) >= self.looks:
            return self.recognise(case)
        return None

    def finding(self, case: Case, proof: Proof) -> Finding:
        """What this proof shows, with the words of the page."""
        sentences = self.text.evidence[proof.said]
        filled = [fill(sentence, case, proof.fields) for sentence in sentences]
        return Finding(
            code=self.code,
            title=self.text.title,
            evidence=tuple(sentence for sentence in filled if sentence),
            certainty=proof.certainty,
            remedies=self.text.remedies,
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
