"""`lr.config`: the optimizer will reach the learning rate the configuration names."""

from __future__ import annotations

from stepguard.preflight.answers import Missing, Seen, failed, passed
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item
from stepguard.preflight.schedule import peak_rates

CLOSE = 1e-3
"""Relative; a rate written with three digits is the same rate."""


def same_rate(first: float, second: float) -> bool:
    return abs(first - second) <= CLOSE * max(abs(first), abs(second))


def configured_rate(seen: Inspection) -> tuple[float, str]:
    """The rate that is meant, and who says so."""
    setting, rate = seen.setting("lr"), seen.number("lr")
    if setting is not None and rate is not None:
        return rate, str(setting)
    if seen.around.facts.get("lr") is not None:
        return float(
            seen.around.facts["lr"]
        ), f"TrainingArguments.learning_rate={seen.around.facts['lr']:g}"
    raise Missing("give --config FILE that names the learning rate")


def _look(seen: Inspection) -> Seen:
    wanted, said = configured_rate(seen)
    rates = peak_rates(seen.optimizer)
    shown = ", ".join(f"{rate:.3g}" for rate in rates[:4])
    groups = (
        f"{type(seen.optimizer).__name__} runs its {len(rates)} "
        f"group{'s' if len(rates) > 1 else ''} up to {shown}"
    )
    if any(same_rate(rate, wanted) for rate in rates):
        return passed(f"{said}; {groups}")
    return failed(
        f"{said}, but {groups}",
        fix="Pass the configured rate to the optimizer (and to OneCycleLR as max_lr); a literal in "
        "the code wins.",
    )


ITEM = Item(id="lr.config", title="the optimizer has the configured learning rate", look=_look)
