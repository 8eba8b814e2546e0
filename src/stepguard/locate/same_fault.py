"""Is what a replay shows the fault that was seen? NaN, +inf and -inf are three, and so are two
gradients.
"""

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


def departure(reading: Reading, micro: int, replayer: Replayer) -> str | None:
    """Where the replayed micro-batch goes bad in another way than the step did, in words; None
    where it agrees.
    """
    ran = replayer.first_traced
    if ran is None or replayer.step.model_only:
        return None
    return (
        _loss_departs(reading, micro, ran)
        or _part_departs(reading, ran)
        or _gradient_departs(reading, ran)
    )


def _loss_departs(reading: Reading, micro: int, ran: Ran) -> str | None:
    if micro >= len(reading.micro_losses) or ran.loss is None:
        return None
    seen, given = kind(reading.micro_losses[micro]), kind(float(ran.loss))
    if seen == given:
        return None
    return f"the loss was {seen} and the replay gives {given}"


def _part_departs(reading: Reading, ran: Ran) -> str | None:
    if len(reading.micro_losses) != 1:
        return None  # the parts that were read are sums over the micro-batches
    for name, value in reading.components.items():
        given = kind(ran.parts.get(name, value))
        if given != kind(value):
            return f"the loss part {name!r} was {kind(value)} and the replay gives {given}"
    return None


def _gradient_departs(reading: Reading, ran: Ran) -> str | None:
    """Gradients are compared where both passes name some: a bad loss has no backward in a replay."""
    seen, given = reading.bad_grads, ran.bad_gradients
    if not given or not seen or set(given) & set(seen):
        return None
    return f"the gradient of {seen[0]} was non-finite and the replay breaks that of {given[0]}"
