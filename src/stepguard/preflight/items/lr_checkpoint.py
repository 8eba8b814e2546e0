"""`lr.checkpoint`: what loading the checkpoint will do to the learning rate."""

from __future__ import annotations

from stepguard.preflight.answers import Missing, Pointless, Seen, failed, passed
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item
from stepguard.preflight.items.lr_config import configured_rate, same_rate
from stepguard.preflight.schedule import peak_rates
from stepguard.records.verification import Rate

FIX = (
    "After load_state_dict set lr, initial_lr, max_lr and min_lr of every group and the "
    "scheduler's base_lrs to the "
    "configured rate, or keep the old rate in the configuration."
)


def _look(seen: Inspection) -> Seen:
    found = seen.verified
    name = found.path.rpartition("/")[2]
    if not found.rates:
        raise Pointless(f"{name} holds neither optimizer nor scheduler state that can be read")
    wanted, said = _wanted(seen)
    meant = [
        rates for rates in (_of_the_optimizer(found.rates), _of_the_schedule(found.rates)) if rates
    ]
    bad = [rates[0] for rates in meant if not any(same_rate(rate.value, wanted) for rate in rates)]
    if bad:
        return failed(
            *(f"{name}: {rate.name}={rate.value:.3g} comes back, {said}" for rate in bad), fix=FIX
        )
    shown = meant[0][0] if meant else found.rates[0]
    return passed(f"{name} holds {shown.name}={shown.value:.3g}, {said}")


def _of_the_optimizer(rates: tuple[Rate, ...]) -> list[Rate]:
    """OneCycleLR keeps its peak in the groups, other schedules their base; without a schedule it is
    the rate itself.
    """
    for kind in ("max_lr", "initial_lr", "lr"):
        chosen = [rate for rate in rates if rate.kind == kind]
        if chosen:
            return chosen
    return []


def _of_the_schedule(rates: tuple[Rate, ...]) -> list[Rate]:
    """The base that a LambdaLR and its like multiply; OneCycleLR's is its low start and never used."""
    return [
        rate
        for rate in rates
        if rate.kind == "base_lr" and not any(r.kind == "max_lr" for r in rates)
    ]


def _wanted(seen: Inspection) -> tuple[float, str]:
    try:
        rate, said = configured_rate(seen)
    except Missing:
        rate = max(peak_rates(seen.optimizer))
        return rate, f"the optimizer has {rate:.3g}"
    return rate, f"configured is {said}"


ITEM = Item(
    id="lr.checkpoint",
    title="loading the checkpoint keeps the configured learning rate",
    look=_look,
)
