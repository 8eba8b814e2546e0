"""Read the page of a rule from the markdown file beside it; the headings are fixed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import cast

from stepguard.records import Remedy
from stepguard.records.finding import Safety

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
