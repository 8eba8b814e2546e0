"""Incidents of earlier versions are read with the present names of their fields."""

from __future__ import annotations

from typing import Any

import pytest

from stepguard.records import Incident, Origin, Reading, Verdict
from stepguard.records.codec import from_jsonable, to_jsonable
from stepguard.records.incident import upgrade_incident

INCIDENT = Incident(
    id="i",
    step=1,
    verdict=Verdict(kind="nonfinite_loss", severity="incident"),
    reading=Reading(step=1),
    origin=Origin(step=1, phase="loss"),
)


def old_incident(**origin: Any) -> dict[str, Any]:
    fields = to_jsonable(INCIDENT)
    fields["origin"] = {"step": 1, "phase": "loss", **origin}
    return fields


def test_sentences_among_old_notes_become_remarks() -> None:
    sentence = "the bad value came into the model through an argument"
    notes = ["masked_rows=2", "half", "no-replay=the guard did not run the step", sentence]
    incident = from_jsonable(Incident, upgrade_incident(old_incident(notes=notes)))
    assert incident.origin is not None
    assert incident.origin.remarks == (sentence,)


def test_the_old_word_for_a_noted_decision_is_read() -> None:
    fields = {**to_jsonable(INCIDENT), "decision": {"action": "warn"}}
    assert upgrade_incident(fields)["decision"]["action"] == "note"


def test_a_present_incident_is_not_changed() -> None:
    fields = to_jsonable(INCIDENT)
    assert upgrade_incident(fields) == fields


@pytest.mark.parametrize(
    ("confidence", "certainty"), [(0.97, "certain"), (0.75, "likely"), (0.5, "possible")]
)
def test_an_old_confidence_becomes_a_certainty(confidence: float, certainty: str) -> None:
    findings = [{"code": "SG204", "title": "a masked row", "confidence": confidence}]
    fields = upgrade_incident({**to_jsonable(INCIDENT), "findings": findings})
    assert from_jsonable(Incident, fields).findings[0].certainty == certainty
