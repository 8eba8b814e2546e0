"""`optimizer.eps`: epsilon still exists in the dtype of the parameters it is added to."""

from __future__ import annotations

from stepguard.diagnose.dtypes import FORMATS, plain, rounds_to_zero
from stepguard.preflight.answers import Pointless, Seen, failed, passed
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item


def _look(seen: Inspection) -> Seen:
    checked, bad = 0, []
    for index, group in enumerate(seen.optimizer.param_groups):
        eps = group.get("eps")
        eps = (
            min((part for part in eps if part), default=None)
            if isinstance(eps, tuple | list)
            else eps
        )
        if eps is None:
            continue
        checked += 1
        dtypes = {plain(str(p.dtype)) for p in group["params"]}
        lost = sorted(name for name in dtypes if eps == 0 or rounds_to_zero(float(eps), name))
        if lost and not group.get("fused"):
            bad.append(
                f"group {index}: eps={eps:g} is 0 in {lost[0]} (smallest "
                f"{FORMATS[lost[0]].smallest:.3g})"
            )
    if not checked:
        raise Pointless(f"{type(seen.optimizer).__name__} has no eps")
    if bad:
        return failed(
            *bad,
            "a weight whose gradient is 0 becomes NaN at the first update (0 / 0)",
            fix="Keep the weights in float32 under autocast; or eps=1e-4; or fused=True, which "
            "computes in float32; "
            "see `stepguard explain SG502`.",
        )
    return passed(
        f"eps of {checked} parameter group{'s' if checked > 1 else ''} is above 0 in its dtype"
    )


ITEM = Item(
    id="optimizer.eps", title="the optimizer's eps survives the parameters' dtype", look=_look
)
