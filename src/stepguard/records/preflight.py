"""What a preflight found: one outcome an item, and the state the run would start in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["pass", "warn", "fail", "not_applicable", "not_checked"]
Alignment = Literal["aligned", "contradicted", "unproven"]
"""`aligned` needs a probe that agrees with everything configured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One item, evaluated against the real objects."""

    id: str
    """Stable, `section.name`."""
    title: str
    status: Status
    evidence: tuple[str, ...] = ()
    """Sentences with numbers; why it is `not_applicable`, or what to give if `not_checked`."""
    fix: str = ""

    @property
    def section(self) -> str:
        return self.id.partition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """All outcomes in the order of their sections."""

    target: str
    outcomes: tuple[Outcome, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    """State the run would start in, from the live objects: (`AMP enabled`, `yes, bfloat16`)."""
    alignment: Alignment = "unproven"
    alignment_why: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """No item failed; warnings are allowed."""
        return not self.of("fail")

    def of(self, *statuses: Status) -> tuple[Outcome, ...]:
        return tuple(outcome for outcome in self.outcomes if outcome.status in statuses)

    def outcome(self, identity: str) -> Outcome:
        """The outcome of one item; KeyError if it was not run."""
        for outcome in self.outcomes:
            if outcome.id == identity:
                return outcome
        raise KeyError(identity)
