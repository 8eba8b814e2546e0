"""The chain of events of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from report.literals import Written, masked_row, step_line, told
from stepguard.records import Incident
from stepguard.report.summary import Event, timeline


def _texts(events: tuple[Event, ...]) -> list[str]:
    return [f"{event.steps}: {event.text}" for event in events]


def _events(
    steps: list[dict[str, Any]],
    incidents: Sequence[Incident] = (),
    notes: Sequence[dict[str, Any]] = (),
) -> tuple[Event, ...]:
    return timeline(told(Written(steps=steps, incidents=list(incidents), notes=list(notes))))


def test_healthy_run_begins_and_ends() -> None:
    steps = [step_line(step, 1.0) for step in range(3)]
    assert _texts(_events(steps, [], [])) == [
        "step 0: the run began, loss 1",
        "step 2: 3 steps committed, no incident",
    ]


def test_run_without_a_step_has_no_events() -> None:
    assert _events([], [], []) == ()


def test_incidents_in_a_row_with_the_same_answer_are_one_event() -> None:
    steps = [step_line(step, 1.0, committed=step not in (5, 6, 7)) for step in range(10)]
    incidents = [masked_row(5), masked_row(6), masked_row(7, "stop")]
    events = [e for e in _events(steps, incidents, []) if e.weight == "incident"]
    assert [event.steps for event in events] == ["steps 5-6", "step 7"]
    assert events[0].text.endswith("skipped 2 times")
    assert "originated in forward" in events[0].text and "originated in" not in events[1].text


def test_gradient_norm_that_rises_before_the_first_incident_is_an_event() -> None:
    steps = [step_line(step, 1.0, grad_norm=1.0 if step < 16 else 9.0) for step in range(20)]
    (rise,) = [e for e in _events(steps, [masked_row(20)], []) if e.weight == "note"]
    assert (rise.steps, rise.text) == (
        "steps 16-19",
        "the gradient norm rose from its usual 1 to 9",
    )


def test_notes_of_one_kind_are_one_event() -> None:
    note = {"type": "note", "kind": "tracing", "summary": "tracing"}
    notes = [{**note, "step": 1}, {**note, "step": 2}, {"type": "end"}]
    texts = _texts(_events([step_line(3, 1.0)], [], notes))
    assert "steps 1-2: tracing (2 times)" in texts
    assert "step 3: the guard was closed" in texts
