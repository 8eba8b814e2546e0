"""SG909: training in evaluation mode."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, likely
from stepguard.diagnose.seen import last_looks, named


def recognise(case: Case) -> Proof | None:
    looks = last_looks(case)
    if not looks or any(look.facts.training for look in looks):
        return None
    facts = looks[-1].facts
    if not facts.dropout and not facts.norms_in_eval:
        return None  # nothing in the model knows the difference
    return likely(
        "the model is in evaluation mode while it trains: call model.train() after evaluating",
        f"dropout does nothing in {named(facts.dropout)}" if facts.dropout else "",
        f"{named(facts.norms_in_eval)} keep their statistics" if facts.norms_in_eval else "",
    )


RULE = Rule(code="SG909", recognise=recognise)
