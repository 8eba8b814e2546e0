"""What one item answers, and why it gives none."""

from __future__ import annotations

from pathlib import Path

from stepguard.check.inspection import (
    Answer,
    CheckContext,
    Inspection,
    NotApplicable,
    NotGiven,
    passed,
)
from stepguard.check.preflight import Item, Subject, run_item
from stepguard.records.checks import Outcome

NOTHING = Inspection(Subject(), CheckContext(Path()))


def made_up(run: Inspection) -> Answer:
    return passed("it is")


def missing(run: Inspection) -> Answer:
    raise NotGiven("give a model")


def pointless(run: Inspection) -> Answer:
    raise NotApplicable("there are no models here")


def test_answer_of_an_item_is_its_outcome() -> None:
    outcome = run_item(Item("made.up", "something is there", made_up), NOTHING)
    assert outcome == Outcome(
        id="made.up", title="something is there", status="pass", evidence=("it is",)
    )


def test_item_without_an_answer_says_why() -> None:
    outcome = run_item(Item("made.missing", "a model is there", missing), NOTHING)
    assert (outcome.status, outcome.evidence) == ("not_checked", ("give a model",))
    outcome = run_item(Item("made.pointless", "a model is there", pointless), NOTHING)
    assert (outcome.status, outcome.evidence) == ("not_applicable", ("there are no models here",))
