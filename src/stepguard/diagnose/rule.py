"""A rule: one cause, how it is recognised, and what to do. One file a code in `rules/`, like a
linter's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from textwrap import dedent
from typing import get_args

from stepguard.diagnose.case import Case
from stepguard.records import Finding, Remedy
from stepguard.records.finding import Safety

CERTAIN = 0.97
"""The numbers leave no other cause."""
STRONG = 0.9
"""The operation and its operands say so; a more special rule may still know better."""
LIKELY = 0.75
PLAUSIBLE = 0.5
"""True as well, but rather a circumstance than the cause."""
HINT = 0.35

SAFETY_ORDER: tuple[str, ...] = get_args(Safety)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What a rule found: sentences with numbers, and how sure it is."""

    confidence: float
    evidence: tuple[str, ...]
    remedies: tuple[Remedy, ...] = ()
    """Remedies for just this case; they come before the rule's own of the same safety."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One cause code with the text of its page."""

    code: str
    title: str
    what: str
    """What it means."""
    why: str
    """Why it happens."""
    how: str
    """How stepguard knows."""
    evidence: Callable[[Case], Proof | None]
    """Looks at a case; None when this is not the cause."""
    remedies: tuple[Remedy, ...]
    """Each snippet replaces the lines of `bad` and makes the example healthy (tested)."""
    setup: str
    """What the example starts from: imports, tensors, modules."""
    bad: str
    """The lines that go wrong."""
    see: tuple[str, ...] = ()
    """Public threads (`owner/repo#number`) and documentation pages."""

    @property
    def fixed(self) -> str:
        """The safest remedy that is code."""
        return next(remedy.snippet for remedy in self.ordered if remedy.snippet)

    @property
    def ordered(self) -> tuple[Remedy, ...]:
        """The remedies, those first that change least."""
        return by_safety(self.remedies)

    def examine(self, case: Case) -> Finding | None:
        """The finding for this case, or None."""
        proof = self.evidence(case)
        if proof is None:
            return None
        sentences = tuple(sentence for sentence in proof.evidence if sentence)
        return Finding(
            code=self.code,
            title=self.title,
            evidence=sentences,
            confidence=proof.confidence,
            remedies=by_safety(proof.remedies + self.remedies),
        )


def by_safety(remedies: tuple[Remedy, ...]) -> tuple[Remedy, ...]:
    return tuple(sorted(remedies, key=lambda remedy: SAFETY_ORDER.index(remedy.safety)))


def prose(text: str) -> str:
    """A paragraph written over several lines of a rule's file, as one."""
    return " ".join(text.split())


def code(text: str) -> str:
    """Lines of code written inside a rule's file, without the indentation they have there."""
    return dedent(text).strip()
