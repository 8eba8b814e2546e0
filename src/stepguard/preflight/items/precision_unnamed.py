"""`precision.unnamed`: mixed precision that is switched on without naming a dtype."""

from __future__ import annotations

from stepguard.preflight.answers import Missing, Seen, failed, passed, warned
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item
from stepguard.preflight.settings.precision import wanted
from stepguard.preflight.surroundings import default_dtypes

FIX = (
    "Name the dtype: mixed_precision='bf16' in the Accelerator, or dtype= where autocast is "
    "opened; "
    "see `stepguard explain SG801`."
)


def _look(seen: Inspection) -> Seen:
    if seen.around.unnamed:
        launched = seen.launcher.said("mixed_precision") if seen.launcher.dtype else ""
        ignored = f"the launcher's {launched} is ignored" if launched else ""
        return failed(
            *filter(None, (seen.around.unnamed, ignored, "no GradScaler is made")), fix=FIX
        )
    asks = wanted(seen.config)
    if asks is None and seen.around.name == "no context":
        raise Missing("give --config FILE, or return `autocast`")
    if asks is None or asks.dtype is not None:
        return passed(
            "a dtype is named" if asks is not None else f"{seen.around.name} was opened as it is"
        )
    if seen.subject.model is not None and seen.launcher.dtype == seen.probe.dtype:
        return passed(
            f"{asks.said} names no dtype, the launcher does, and the probe agrees: "
            f"{seen.probe.dtype}"
        )
    return warned(f"{asks.said} names no dtype: {default_dtypes()}", fix=FIX)


ITEM = Item(id="precision.unnamed", title="mixed precision names its dtype", look=_look)
