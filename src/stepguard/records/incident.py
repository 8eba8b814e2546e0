"""One bad step: an Incident only ever gains fields on its way through the pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from stepguard.records.decision import Decision
from stepguard.records.finding import Finding
from stepguard.records.origin import Origin
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
    run: str | None = None
    """Run directory, or None when nothing is written."""
    rank: int = 0

    @property
    def stopped(self) -> bool:
        """Did the policy end the run with it? An exception of the user's ends it by itself, if
        nobody catches it.
        """
        raised = self.verdict.kind == "exception"
        return self.decision is not None and self.decision.action == "stop" and not raised

    @property
    def summary(self) -> str:
        """One line: what was wrong, where, why, and what was done."""
        parts = [self.verdict.summary or self.verdict.kind]
        if self.origin is not None:
            parts.append(_place(self.origin))
        if self.findings:
            parts.append(f"{self.findings[0].code} {self.findings[0].title}")
        if self.decision is not None:
            parts.append(
                self.decision.action
                + (f" ({self.decision.reason})" if self.decision.reason else "")
            )
        return "; ".join(part for part in parts if part)


def _place(origin: Origin) -> str:
    parts = [
        origin.tensor or origin.op or "",
        f"in {origin.module}" if origin.module else "",
        f"at {origin.source}" if origin.source else "",
        "sample " + ", ".join(map(str, origin.samples)) if origin.samples else "",
        f"({', '.join(origin.rows)})" if origin.rows else "",
    ]
    where = " ".join(part for part in parts if part)
    return f"{origin.phase}: {where}" if where else origin.phase
