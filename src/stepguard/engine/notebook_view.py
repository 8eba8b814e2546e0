"""What a guard shows of itself, in one line and in a notebook. Never waits for the device."""

from __future__ import annotations

from stepguard.engine.context import Context
from stepguard.records.notebook_html import box

SHOWN = 5
"""Incidents, the newest ones, that a notebook shows."""


def guard_line(context: Context, *, closed: bool, armed: bool) -> str:
    """`Guard of AdamW of Net: 12 steps, 1 incident, armed`."""
    count = len(context.incidents)
    counted = "1 incident" if count == 1 else f"{count} incidents"
    state = "armed" if armed else "disarmed"
    if closed:
        state = "closed"
    return f"Guard of {context.name}: {context.step} steps, {counted}, {state}"


def guard_html(context: Context, *, closed: bool, armed: bool) -> str:
    """The line, and the newest incidents below it."""
    rows = []
    for incident in context.incidents[-SHOWN:]:
        rows.append((f"step {incident.step}", incident.summary))
    title = guard_line(context, closed=closed, armed=armed)
    return box(title, rows, bad=bool(context.incidents))
