"""An incident is valid from its verdict on, and says in one line what is known so far."""

from __future__ import annotations

import pickle

import pytest

from stepguard import Finding, Incident, Origin, TrainingHalted
from stepguard.records import Decision, Reading, Verdict

VERDICT = Verdict(kind="nonfinite_loss", severity="incident", summary="loss is nan")
FINDING = Finding(code="SG204", title="softmax over a fully masked row")
ORIGIN = Origin(
    step=7, phase="forward", module="attn", op="aten._softmax", source="model.py:88", samples=(3, 5)
)


def _incident(**more: object) -> Incident:
    return Incident(id="i", step=7, verdict=VERDICT, reading=Reading(step=7), **more)  # type: ignore[arg-type]


def test_summary_grows_with_what_is_known() -> None:
    assert _incident().summary == "loss is nan"
    everything = _incident(
        origin=ORIGIN,
        findings=(FINDING,),
        decision=Decision(action="stop", reason="no skip: used up"),
    )
    assert everything.summary == (
        "loss is nan; forward: aten._softmax in attn at model.py:88 sample 3, 5; "
        "SG204 softmax over a fully masked row; stop (no skip: used up)"
    )


@pytest.mark.parametrize(
    ("origin", "place"),
    [
        (Origin(step=0, phase="state", tensor="param:emb.weight"), "state: param:emb.weight"),
        (Origin(step=0, phase="forward", module="fc"), "forward: in fc"),
        (Origin(step=0, phase="loss", source="loss.py:3"), "loss: at loss.py:3"),
        (Origin(step=0, phase="backward"), "backward"),
        (
            Origin(step=0, phase="forward", op="aten.log", module=""),
            "forward: aten.log in the model itself",
        ),
    ],
)
def test_summary_names_the_place_as_far_as_it_is_known(origin: Origin, place: str) -> None:
    assert _incident(origin=origin).summary == f"loss is nan; {place}"


def test_verdict_without_words_is_summarised_by_its_kind() -> None:
    bare = Incident(
        id="i", step=0, verdict=Verdict(kind="spike", severity="incident"), reading=Reading(step=0)
    )
    assert bare.summary == "spike"


def test_halt_names_step_and_cause_and_carries_the_incident() -> None:
    halt = TrainingHalted(_incident(findings=(FINDING,)))
    assert (
        str(halt) == "training halted at step 7: loss is nan; SG204 softmax over a fully masked row"
    )
    assert halt.incident.findings == (FINDING,)


def test_halt_crosses_a_process_boundary() -> None:
    halt = pickle.loads(pickle.dumps(TrainingHalted(_incident(origin=ORIGIN))))
    assert halt.incident == _incident(origin=ORIGIN)


def test_only_an_incident_keeps_a_step_from_being_committed() -> None:
    severities = ("ok", "note", "suspicion", "incident")
    assert [Verdict(severity=severity).bad for severity in severities] == [
        False,
        False,
        False,
        True,
    ]


def test_reading_names_its_bad_micro_batches() -> None:
    reading = Reading(step=0, micro_losses=(1.0, float("nan"), -1e308, float("inf"), float("-inf")))
    assert reading.bad_micro_batches == (1, 3, 4)
