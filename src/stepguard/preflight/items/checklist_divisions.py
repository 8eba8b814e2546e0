"""`checklist.divisions`: what the step divides by, measured in one real step."""

from __future__ import annotations

from stepguard.diagnose.dtypes import FORMATS
from stepguard.preflight.answers import Pointless, Seen, count, failed, passed, warned
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item

SMALL = 1e-6


def _look(seen: Inspection) -> Seen:
    live = seen.live
    if live.fault and live.divisor is None:
        raise Pointless("the step raised before it divided")
    if live.divisor is None:
        raise Pointless("the step divides by nothing")
    least, dtype, source = live.divisor.least, live.divisor.dtype, live.divisor.source
    lost = tuple(f"the eps {what} has no effect at {place}" for place, what in live.lost.items())
    said = (
        f"{count(live.divisions, 'division')}, smallest divisor {least:.3g} ({dtype}, "
        f"{source or 'torch'})"
    )
    fix = (
        "Select before dividing, or clamp the divisor: x / y.clamp_min(1e-6); an eps below the "
        "dtype's step is lost."
    )
    if least == 0:
        return failed(said, *lost, fix=fix)
    if least < SMALL and dtype in FORMATS:
        return warned(said, *lost, fix=fix)
    return passed(said, *lost)


ITEM = Item(id="checklist.divisions", title="divisors stay away from 0", look=_look)
