"""SG909: training in evaluation mode."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, likely
from stepguard.diagnose.seen import in_all, last_looks, named


def recognise(case: Case) -> Proof | None:
    looks = last_looks(case)
    if not looks:
        return None
    if any(look.facts.training for look in looks):
        return _left_off(case)
    facts = looks[-1].facts
    if not facts.dropout and not facts.norms_in_eval:
        return None  # nothing in the model knows the difference
    return likely(
        "the model is in evaluation mode while it trains: call model.train() after evaluating",
        f"dropout does nothing in {named(facts.dropout)}" if facts.dropout else "",
        f"{named(facts.norms_in_eval)} keep their statistics" if facts.norms_in_eval else "",
    )


def _left_off(case: Case) -> Proof | None:
    """Dropout that worked when the run began, and does not any more in a model that trains.

    What was off from the beginning is taken as meant; so are norms, which people freeze on the way.
    """
    looks = last_looks(case)
    first = case.looks[0]
    now_off = in_all(looks, lambda look: set(look.facts.dropout))
    left = [name for name in now_off if name not in first.facts.dropout]
    if not left:
        return None
    return likely(
        f"{named(left)} dropped values at step {first.step} and does not any more at steps "
        f"{looks[0].step} and {looks[-1].step}: a part of the model was left in evaluation mode"
    )


RULE = Rule(code="SG909", recognise=recognise)
