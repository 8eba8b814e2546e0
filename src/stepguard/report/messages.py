"""One-line messages to people about incidents, notes, stops and faults of the guard's own.

Terminal, readable log and Python's logging say the same words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stepguard.records import Incident
from stepguard.records.place import place
from stepguard.report import phrases
from stepguard.report.decision_words import done

STOPPING = "Stopping training to prevent corruption"


def incident_line(incident: Incident, counted: str = "", *, again: bool = False) -> str:
    """One line about an incident; `counted`: which of its kind it is, `again`: done as before."""
    decision = incident.decision
    what = "is bad" if decision is None else done(decision)
    line = f"step {incident.step} {what}"
    if again:
        line += " again"
    if counted:
        line += f" ({counted})"
    line += f": {_gist(incident)}"
    if decision is not None and decision.reason:
        line += f"; {decision.reason}"
    return line


def _gist(incident: Incident) -> str:
    parts = [incident.verdict.summary or phrases.verdict_title(incident.verdict.kind)]
    origin = incident.origin
    if origin is not None and not incident.verdict.finite_anomaly:
        parts.append(place(origin))
        # the summary of a bad loss names its only bad micro-batch already
        named = incident.reading.bad_micro_batches == (origin.micro_batch,)
        if named and incident.verdict.kind in ("nonfinite_loss", "nonfinite_input"):
            origin = replace(origin, micro_batch=None)
        parts.append(phrases.culprits(origin, len(incident.reading.micro_losses)))
    if incident.findings:
        parts.append(incident.findings[0].code)
    return phrases.joined(parts, "; ")


def note_line(fields: Mapping[str, Any]) -> str:
    """One line about a note of the journal."""
    return f"step {fields.get('step')}: {fields.get('summary')}"


def disarmed(fields: Mapping[str, Any]) -> str:
    """One line about a `fault` line of the journal: the guard itself failed."""
    return (
        "ERROR: the guard failed and is disarmed; training goes on unguarded: "
        f"{fields.get('error')}"
    )


def stopping(incident: Incident) -> str:
    """Say that the policy stops the run, and why."""
    line = f"{STOPPING} at step {incident.step}"
    if incident.decision is not None and incident.decision.reason:
        line += f": {incident.decision.reason}"
    return line
