"""SG912: a learning rate that is 0, or whose schedule was never stepped."""

from __future__ import annotations

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, certain, likely

IN_A_ROW = 64


def recognise(case: Case) -> Proof | None:
    steps = case.recent[-IN_A_ROW:]
    if len(steps) == IN_A_ROW and all(_is_zero(reading.lr) for reading in steps):
        return certain(
            f"every learning rate has been 0 for the last {len(steps)} steps, up to step "
            f"{steps[-1].step}: nothing is learned"
        )
    if case.schedule_stood_for >= IN_A_ROW:
        return likely(
            f"the schedule that the guard was given was not stepped once in the "
            f"{case.schedule_stood_for:,} steps of this run: the learning rate never moved"
        )
    return None


def _is_zero(rates: tuple[float, ...] | None) -> bool:
    return bool(rates) and not any(rates or ())


RULE = Rule(code="SG912", recognise=recognise)
