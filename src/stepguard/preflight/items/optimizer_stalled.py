"""`optimizer.stalled`: in half precision a small update rounds back to the old weight."""

from __future__ import annotations

import torch

from stepguard.diagnose.dtypes import FORMATS, plain
from stepguard.preflight.answers import Pointless, Seen, count, passed, warned
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item
from stepguard.preflight.schedule import peak_rates

MOST_LOST = 0.5
ADAPTIVE = ("adam", "lion", "adagrad", "rmsprop", "rprop", "adafactor")
"""Their step is about lr for every weight, whatever the gradient."""


def _look(seen: Inspection) -> Seen:
    optimizer = seen.optimizer
    if (
        not type(optimizer).__name__.lower().endswith(ADAPTIVE)
        and "adam" not in type(optimizer).__name__.lower()
    ):
        raise Pointless(f"the step of {type(optimizer).__name__} is not known beforehand")
    weights = lost = 0
    dtypes: set[str] = set()
    for group, rate in zip(optimizer.param_groups, peak_rates(optimizer), strict=True):
        for parameter in group["params"]:
            name = plain(str(parameter.dtype))
            if name in ("bfloat16", "float16"):
                dtypes.add(name)
                weights += parameter.numel()
                lost += int((_half_a_step(parameter, FORMATS[name].bits) > rate).sum())
    if not weights:
        raise Pointless("the weights are kept in float32 or wider")
    said = (
        f"{lost:,} of {weights:,} weights in {', '.join(sorted(dtypes))} are spaced wider than "
        f"twice the lr"
    )
    if lost > MOST_LOST * weights:
        return warned(
            f"{said}: an update of lr leaves them as they are",
            fix="Keep float32 master weights (autocast instead of a cast model), or round "
            "stochastically.",
        )
    return passed(f"{said}; {count(weights - lost, 'weight')} can move")


def _half_a_step(parameter: torch.Tensor, bits: int) -> torch.Tensor:
    """Half the distance to the next representable number."""
    _, exponent = torch.frexp(parameter.detach().float().abs())
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent - bits - 1)


ITEM = Item(
    id="optimizer.stalled", title="updates of size lr survive the weights' dtype", look=_look
)
