"""One bad step: an Incident only ever gains fields on its way through the pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from stepguard.records.decision import Decision
from stepguard.records.field_docs import documented
from stepguard.records.finding import Finding
from stepguard.records.notebook_html import Row, box, code, stacked
from stepguard.records.origin import Origin
from stepguard.records.place import place_and_phase
from stepguard.records.reading import Reading
from stepguard.records.verdict import Verdict

MOST_REMEDIES = 2
"""Of the first finding, in a notebook."""


@documented
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Incident:
    """Everything known about one bad step. Valid from the verdict on; the rest may stay empty.

    For instance:

        for incident in guard.incidents:
            print(incident.summary, incident.origin.source, incident.findings[0].code)
    """

    id: str
    """Step and kind, unique in its run: `00000048-nonfinite_loss`."""
    step: int
    """Optimizer step, counted from 0."""
    verdict: Verdict
    """What was seen: its kind, and a sentence in `verdict.summary`."""
    reading: Reading
    """What was measured of the step: loss, gradient norm, learning rate, bad tensors."""
    origin: Origin | None = None
    """Where the first harmful value was born; None where it was not looked for."""
    findings: tuple[Finding, ...] = ()
    """Causes with evidence, the most certain first."""
    decision: Decision | None = None
    """What was done about it, and why."""
    capsule: str | None = None
    """Folder of the bad step on disk, relative to the run directory."""
    replayable: bool = True
    """The capsule names a script or a build function to run it with; a notebook has neither."""
    run: str | None = None
    """Run directory, or None when nothing is written."""
    rank: int = 0
    """Rank that recorded it; the rank of origin is `origin.rank`."""

    @property
    def stopped(self) -> bool:
        """Did the policy end the run with it?"""
        # An exception of the user's ends the run by itself, unless their program catches it.
        if self.verdict.kind == "exception" or self.decision is None:
            return False
        return self.decision.action == "stop"

    def html_rows(self) -> list[Row]:
        """What a notebook shows of it."""
        rows = [("what", self.verdict.summary or self.verdict.kind)]
        if self.origin is not None:
            rows += self.origin.html_rows()
        for finding in self.findings[:1]:
            cause = f"{finding.code} {finding.title} ({finding.certainty})"
            rows.append(("why", stacked((cause, *finding.evidence))))
        if self.decision is not None:
            rows.append(("done", f"{self.decision.action}: {self.decision.reason}".rstrip(": ")))
        for finding in self.findings[:1]:
            for remedy in finding.remedies[:MOST_REMEDIES]:
                snippet = code(remedy.snippet.splitlines())
                rows.append(("to do", stacked((remedy.title, snippet, remedy.tried))))
        return rows

    def _repr_html_(self) -> str:
        return box(f"Incident at step {self.step}", self.html_rows(), bad=True)

    def __repr__(self) -> str:
        return f"<Incident {self.id}: {self.summary}>"

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
    if origin.samples or origin.rows:
        where += f" {origin.culprits}"
    return where
