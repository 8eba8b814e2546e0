"""SG802: loading state brought an old learning rate back."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, certain, possible
from stepguard.diagnose.trends import ABOVE_CONFIGURED
from stepguard.diagnose.wording import spell


def recognise(case: Case) -> Proof | None:
    if not case.facts.resumed:
        return None
    rates = _rates_above_configured(case)
    mismatch = case.verdict.kind == "lr_mismatch"
    if not rates and not mismatch:
        return None
    loaded = (
        "optimizer or scheduler state was loaded in this process: it carries the old run's rates"
    )
    prove = possible
    if mismatch:
        prove = certain
    return prove(*rates, case.verdict.summary, loaded)


def _rates_above_configured(case: Case) -> list[str]:
    pairs = zip(case.facts.configured_lr, case.reading.lr, strict=False)
    sentences = []
    for group, (allowed, rate) in enumerate(pairs):
        if allowed > 0 and rate > ABOVE_CONFIGURED * allowed:
            sentences.append(
                f"group {group} is configured with lr {spell(allowed)} but runs with {spell(rate)}"
            )
    return sentences


RULE = Rule(code="SG802", recognise=recognise, shown_by="record")
