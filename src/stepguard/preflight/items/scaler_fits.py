"""`scaler.fits`: a GradScaler that is there does something, and can do it."""

from __future__ import annotations

from typing import Any

from stepguard.preflight.answers import Pointless, Seen, failed, passed, warned
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item


def _look(seen: Inspection) -> Seen:
    given: Any = seen.subject.scaler if seen.subject.scaler is not None else seen.around.scaler
    if given is None:
        raise Pointless("there is no GradScaler")
    half = [name for name in seen.param_dtypes if name == "float16"]
    if half:
        return failed(
            f"{seen.param_dtypes['float16']:,} parameters are float16: GradScaler.unscale_ raises "
            "'Attempting to unscale FP16 gradients' at the first step",
            fix="Keep the weights in float32 (model.float()) and let autocast choose float16.",
        )
    if not given.is_enabled():
        return warned(
            f"{type(given).__name__} is switched off here: without its device it does nothing",
            fix=f"GradScaler({seen.device.type!r}), or drop it.",
        )
    if seen.probe.dtype != "float16":
        return warned(
            f"a GradScaler is on, but the step runs in {seen.probe.dtype}: it only adds a scale",
            fix="Drop the GradScaler, or open float16 autocast.",
        )
    return passed(f"scale {given.get_scale():g}, the step runs in float16")


ITEM = Item(id="scaler.fits", title="the GradScaler is on and fits the dtypes", look=_look)
