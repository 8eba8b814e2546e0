"""Compare the fault of a replay with the fault that was seen: NaN, +inf and -inf are different."""

from __future__ import annotations

import math

from stepguard.locate.replay import Ran, Replayer
from stepguard.records.reading import Reading


def kind(value: float) -> str:
    """`nan`, `+inf`, `-inf` or `finite`."""
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "+inf" if value > 0 else "-inf"
    return "finite"


def difference(reading: Reading, micro: int, replayer: Replayer) -> str | None:
    """Say in which way the replayed micro-batch goes bad differently; None if it agrees."""
    ran = replayer.first_traced
    if ran is None or replayer.step.model_only:
        return None
    return (
        _loss_difference(reading, micro, ran)
        or _part_difference(reading, ran)
        or _gradient_difference(reading, ran)
    )


def _loss_difference(reading: Reading, micro: int, ran: Ran) -> str | None:
    if micro >= len(reading.micro_losses) or ran.loss is None:
        return None
    seen = kind(reading.micro_losses[micro])
    given = kind(float(ran.loss))
    if seen == given:
        return None
    return f"the loss was {seen} and the replay gives {given}"


def _part_difference(reading: Reading, ran: Ran) -> str | None:
    # The parts in a reading are sums over the micro-batches.
    if len(reading.micro_losses) != 1:
        return None
    for name, value in reading.components.items():
        given = kind(ran.parts.get(name, value))
        if given != kind(value):
            return f"the loss part {name!r} was {kind(value)} and the replay gives {given}"
    return None


def _gradient_difference(reading: Reading, ran: Ran) -> str | None:
    seen = reading.bad_grads
    given = ran.bad_gradients
    # A replay leaves out the backward of a bad loss, so it may name no gradient at all.
    if not given or not seen or set(given) & set(seen):
        return None
    return f"the gradient of {seen[0]} was non-finite and the replay breaks that of {given[0]}"
