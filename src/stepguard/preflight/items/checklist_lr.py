"""`checklist.lr`: the report's first point, a learning rate of at most 5e-5, for models of the size
it speaks of.
"""

from __future__ import annotations

from stepguard.preflight.answers import Pointless, Seen, passed, warned
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item
from stepguard.preflight.schedule import peak_rates

LIMIT = 5e-5
LARGE = 100_000_000
"""Parameters. The point comes from a model of 892 million; small ones take rates a hundred times
higher.
"""


def _look(seen: Inspection) -> Seen:
    configured = seen.number("lr")
    if seen.subject.optimizer is None and configured is not None and configured <= LIMIT * 1.001:
        return passed(f"{seen.setting('lr')} is configured")
    rate = max(peak_rates(seen.optimizer))
    size = sum(p.numel() for p in seen.model.parameters())
    if rate <= LIMIT * 1.001:
        return passed(f"lr {rate:.3g} with {size:,} parameters")
    if size < LARGE:
        raise Pointless(
            f"lr {rate:.3g} is above 5e-5, which is meant for models above {LARGE:,}; this has "
            f"{size:,}"
        )
    return warned(
        f"lr {rate:.3g} with {size:,} parameters",
        fix="Start at 5e-5 or with a longer warmup, and raise it while the gradient norm stays "
        "calm.",
    )


ITEM = Item(id="checklist.lr", title="learning rate suits the size (5e-5 or lower)", look=_look)
