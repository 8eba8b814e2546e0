"""One bad step: an Incident only ever gains fields on its way through the pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from stepguard.records.decision import Decision
from stepguard.records.finding import Finding
from stepguard.records.origin import Origin
from stepguard.records.place import place_and_phase
from stepguard.records.reading import Reading
from stepguard.records.verdict import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Everything known about one bad step. Valid from the verdict on; the rest may stay empty."""

    id: str
    step: int
    verdict: Verdict
    reading: Reading
    origin: Origin | None = None
    findings: tuple[Finding, ...] = ()
    decision: Decision | None = None
    capsule: str | None = None
    """Folder of the bad step on disk, relative to the run directory."""
    replayable: bool = True
    """The capsule names a script or a build function to run it with; a notebook has neither."""
    run: str | None = None
    """Run directory, or None when nothing is written."""
    rank: int = 0

    @property
    def stopped(self) -> bool:
        """Did the policy end the run with it?"""
        # An exception of the user's ends the run by itself, unless their program catches it.
        if self.verdict.kind == "exception" or self.decision is None:
            return False
        return self.decision.action == "stop"

    @property
    def summary(self) -> str:
        """One line: what was wrong, where, why, and what was done."""
        parts = [self.verdict.summary or self.verdict.kind]
        if self.origin is not None:
            parts.append(_where(self.origin))
        if self.findings:
            parts.append(f"{self.findings[0].code} {self.findings[0].title}")
        if self.decision is not None and self.decision.reason:
            parts.append(f"{self.decision.action} ({self.decision.reason})")
        elif self.decision is not None:
            parts.append(self.decision.action)
        return "; ".join(parts)


def _where(origin: Origin) -> str:
    where = place_and_phase(origin)
    if origin.samples:
        where += " sample " + ", ".join(map(str, origin.samples))
    if origin.rows:
        where += f" ({', '.join(origin.rows)})"
    return where
