"""`lr.checkpoint`: what loading the checkpoint will do to the learning rate."""

from __future__ import annotations

from stepguard.preflight.answers import Missing, Pointless, Seen, failed, passed
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item
from stepguard.preflight.items.lr_config import configured_rate, same_rate
from stepguard.preflight.schedule import peak_rates

FIX = (
    "After load_state_dict set lr, initial_lr, max_lr and min_lr of every group and the scheduler's base_lrs to the "
    "configured rate, or keep the old rate in the configuration."
)


def _look(seen: Inspection) -> Seen:
    stored = seen.stored
    base = [float(rate) for rate in stored.schedule.get("base_lrs", []) if isinstance(rate, int | float)]
    rates = stored.rates
    if not rates and not base:
        raise Pointless(f"{stored.path.name} holds neither optimizer nor scheduler state that can be read")
    wanted, said = _wanted(seen)
    bad = []
    if rates and not any(same_rate(rate, wanted) for rate in rates):
        key = "max_lr" if "max_lr" in stored.groups[0] else "initial_lr" if "initial_lr" in stored.groups[0] else "lr"
        bad.append(f"its optimizer state brings {key}={rates[0]:.3g} back, {said}")
    one_cycle = bool(stored.groups) and "max_lr" in stored.groups[0]  # its base_lrs are the low start, never used
    if base and not one_cycle and not any(same_rate(rate, wanted) for rate in base):
        bad.append(f"its scheduler state brings base_lrs={base[0]:.3g} back, {said}")
    if bad:
        return failed(*(f"{stored.path.name}: {sentence}" for sentence in bad), fix=FIX)
    return passed(f"{stored.path.name} holds the rate {(rates or base)[0]:.3g}, as {said}")


def _wanted(seen: Inspection) -> tuple[float, str]:
    try:
        rate, said = configured_rate(seen)
    except Missing:
        rate = max(peak_rates(seen.optimizer))
        return rate, f"the optimizer has {rate:.3g}"
    return rate, f"configured is {said}"


ITEM = Item(id="lr.checkpoint", title="loading the checkpoint keeps the configured learning rate", look=_look)
