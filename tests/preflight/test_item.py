"""A function of the inspection becomes an item by its decorator."""

from __future__ import annotations

from pathlib import Path

from stepguard.preflight.inspection import CheckContext, Inspection, item
from stepguard.preflight.run import run_item
from stepguard.preflight.subject import Answer, NotApplicable, NotGiven, Subject, passed

NOTHING = Inspection(Subject(), CheckContext(Path()))


@item("made.up", "something is there")
def made_up(run: Inspection) -> Answer:
    return passed("it is")


@item("made.missing", "a model is there", last=True)
def missing(run: Inspection) -> Answer:
    raise NotGiven("give a model")


@item("made.pointless", "a model is there")
def pointless(run: Inspection) -> Answer:
    raise NotApplicable("there are no models here")


def test_decorated_function_is_an_item() -> None:
    assert (made_up.id, made_up.title, made_up.last) == ("made.up", "something is there", False)
    assert missing.last
    assert run_item(made_up, NOTHING).evidence == ("it is",)


def test_item_without_an_answer_says_why() -> None:
    outcome = run_item(missing, NOTHING)
    assert (outcome.status, outcome.evidence) == ("not_checked", ("give a model",))
    outcome = run_item(pointless, NOTHING)
    assert (outcome.status, outcome.evidence) == ("not_applicable", ("there are no models here",))
