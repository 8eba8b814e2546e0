"""SG902: gradients that are not zeroed between steps, or at the wrong time."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, certain, likely
from stepguard.diagnose.seen import last_looks

MOST = 8
"""Of the last 16 updates: what half of them do is the loop's way."""
SAID = {
    "carried": "the gradients of the update before were still there, and were added to",
    "discarded": "gradients of a backward pass were zeroed before they were used: of several "
    "micro-batches only the last one counts",
    "thrown": "the gradients of the backward pass were gone when the optimizer stepped: nothing "
    "was learned",
    "foreign": "gradients of a loss that another optimizer stepped for were still there, and were "
    "used too",
}


def recognise(case: Case) -> Proof | None:
    looks = last_looks(case)
    if not looks or not all(look.facts.kept_gradients for look in looks):
        return _habit(case)
    return certain(
        f"the backward passes of steps {looks[0].step} and {looks[-1].step} began with the "
        "gradients of the steps before them: they add up over the whole run"
    )


def _habit(case: Case) -> Proof | None:
    """What most of the last updates did with their gradients, without a look."""
    for habit, said in SAID.items():
        count = case.habits.get(habit, 0)
        if count >= MOST:
            return likely(f"in {count} of the last updates, up to step {case.reading.step}, {said}")
    return None


RULE = Rule(code="SG902", recognise=recognise)
