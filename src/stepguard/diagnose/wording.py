"""What a rule says: numbers and operands in words, sentences with fields, and the page of a rule.

A sentence is text with fields of the case, `{place}`, `{evidence.eps}`. One with a field that is
not known is dropped; `[?...|...?]` is a part that is dropped alone, or replaced by its alternative.
A field that is True, or has the word `if`, adds nothing: it is a condition. Operands take other
words: `{divisor:name}`.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, cast

from stepguard.diagnose.case import FORMATS, Case, elements, high, low, plain, reach
from stepguard.records import Operand, Remedy
from stepguard.records.incident import Safety

NON_FINITE = {"nan": "NaN", "posinf": "+inf", "neginf": "-inf"}
INFINITE = {"posinf": "+inf", "neginf": "-inf"}
ZEROS = {"zeros": "zero"}
MOST_NAMES = 3


def spell(value: float | None) -> str:
    """A number in few digits, exact for whole ones a reader would recognise."""
    if value is None:
        return "unknown"
    if math.isfinite(value) and value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.6g}"


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
    return f" at index {operand.index}" if operand.index else ""


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
