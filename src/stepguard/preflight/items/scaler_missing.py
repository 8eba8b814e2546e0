"""`scaler.missing`: float16 arithmetic needs a loss scale, or small gradients become 0."""

from __future__ import annotations

from stepguard.preflight.answers import Pointless, Seen, failed, passed
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item
from stepguard.preflight.settings.keys import as_number


def _look(seen: Inspection) -> Seen:
    dtype = seen.probe.dtype
    if dtype != "float16":
        raise Pointless(f"the step runs in {dtype}, which needs no loss scale")
    if seen.scaler is not None:
        return passed(f"float16 with {type(seen.scaler).__name__}")
    scale = _static_scale(seen)
    if scale is not None and scale > 1:
        return passed(f"float16 with a static loss scale of {scale:g}")
    return failed(
        seen.probe.how,
        "no GradScaler that is switched on was found: gradients below 6e-08 are 0",
        fix="scaler = torch.amp.GradScaler(device), and return it as `scaler`; or use bfloat16, "
        "which needs none.",
    )


def _static_scale(seen: Inspection) -> float | None:
    given = getattr(seen.subject.guard, "loss_scale", None)
    nested = seen.config.get("loss")
    spelt = nested.get("loss_scale") if isinstance(nested, dict) else seen.config.get("loss_scale")
    return as_number(given if given is not None else spelt)


ITEM = Item(id="scaler.missing", title="float16 has a loss scale", look=_look)
