"""SG914: probabilities, logits and their logarithms mixed up."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, certain, likely
from stepguard.diagnose.seen import in_all, last_looks, newest_look

TAKES = {
    "cross_entropy": "logits",
    "binary_cross_entropy_with_logits": "logits",
    "nll_loss": "log-probabilities",
    "kl_div": "log-probabilities",
}


def recognise(case: Case) -> Proof | None:
    look = newest_look(case)
    if look is None:
        return None
    if not look.facts.softmax_twice:
        return _mixed_up(case)
    return certain(
        f"every row that goes into the cross entropy of step {look.step} is positive and sums to "
        "1: it has been through a softmax, and cross_entropy takes another one"
    )


def _mixed_up(case: Case) -> Proof | None:
    looks = last_looks(case)
    names = in_all(looks, lambda look: set(look.facts.mixed_up))
    if not names:
        return None
    name = names[0]
    given = looks[-1].facts.mixed_up[name]
    sentence = (
        f"{name} of steps {looks[0].step} and {looks[-1].step} takes {TAKES[name]} and is given "
        f"{given}"
    )
    if given == "logits":
        return likely(f"{sentence}: the exponentials of a row do not sum to 1")
    return certain(sentence)


RULE = Rule(code="SG914", recognise=recognise)
