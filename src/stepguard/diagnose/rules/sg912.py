"""SG912: a learning rate that is 0, or whose schedule was never stepped."""

from __future__ import annotations

from statistics import median

from stepguard.diagnose.case import Case
from stepguard.diagnose.rule import Proof, Rule, certain, likely

IN_A_ROW = 64
LONG = 32
"""Steps with next to no learning rate that are too many."""
STILL = 1e-3
"""Gradient norm, beside that of the first step, that leaves something to learn."""


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
    return _faded(case)


def _faded(case: Case) -> Proof | None:
    """Next to nothing for longer than a schedule's end lasts, with gradients that still ask."""
    now, since = case.reading.step, case.faded_since
    if since is None or now - since < max(LONG, since // 2):
        return None
    norms = [reading.grad_norm for reading in case.recent if reading.grad_norm is not None]
    if not norms or not case.first_norm or median(norms) < STILL * case.first_norm:
        return None
    return likely(
        f"every learning rate has been below 1/10,000 of its highest since step {since} of "
        f"{now:,}, while the gradient norm is {norms[-1]:.3g} ({case.first_norm:.3g} at the "
        "beginning): a schedule meant for epochs may be stepped with every batch"
    )


def _is_zero(rates: tuple[float, ...] | None) -> bool:
    return bool(rates) and not any(rates or ())


RULE = Rule(code="SG912", recognise=recognise)
