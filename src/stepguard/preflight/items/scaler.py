"""The loss scale: float16 needs one, and a GradScaler that is there must have an effect."""

from __future__ import annotations

from stepguard.preflight.inspection import Inspection, item
from stepguard.preflight.settings import as_number
from stepguard.preflight.subject import Answer, NotApplicable, failed, passed, warned


@item("scaler.missing", "float16 has a loss scale")
def missing(run: Inspection) -> Answer:
    dtype = run.probe.dtype
    if dtype != "float16":
        raise NotApplicable(f"the step runs in {dtype}, which needs no loss scale")
    if run.scaler is not None:
        return passed(f"float16 with {type(run.scaler).__name__}")
    scale = _static_scale(run)
    if scale is not None and scale > 1:
        return passed(f"float16 with a static loss scale of {scale:g}")
    fix = "scaler = torch.amp.GradScaler(device), and return it as `scaler`"
    if "float16" in run.param_dtypes:
        fix = "Keep the weights in float32 under autocast to float16, with a torch.amp.GradScaler"
    # 6e-08 is the smallest number of float16.
    return failed(
        run.probe.how,
        "no GradScaler that is switched on was found: gradients below 6e-08 are 0",
        fix=f"{fix}; or use bfloat16, which needs none.",
    )


def _static_scale(run: Inspection) -> float | None:
    given = getattr(run.subject.guard, "loss_scale", None)
    if given is not None:
        return as_number(given)
    section = run.config.get("loss")
    if not isinstance(section, dict):
        section = run.config
    return as_number(section.get("loss_scale"))


@item("scaler.fits", "the GradScaler is on and fits the dtypes")
def fits(run: Inspection) -> Answer:
    given = run.subject.scaler
    if given is None:
        given = run.framework.scaler
    if given is None:
        raise NotApplicable("there is no GradScaler")
    if "float16" in run.param_dtypes:
        return failed(
            f"{run.param_dtypes['float16']:,} parameters are float16: GradScaler.unscale_ raises "
            "'Attempting to unscale FP16 gradients' at the first step",
            fix="Keep the weights in float32 (model.float()) and let autocast choose float16.",
        )
    # A GradScaler is made for CUDA by default, and switches itself off where there is none.
    if not given.is_enabled():
        return warned(
            f"{type(given).__name__} is switched off here: without its device it does nothing",
            fix=f"GradScaler({run.device.type!r}), or drop it.",
        )
    if run.probe.dtype != "float16":
        return warned(
            f"a GradScaler is on, but the step runs in {run.probe.dtype}: it only adds a scale",
            fix="Drop the GradScaler, or open float16 autocast.",
        )
    return passed(f"scale {given.get_scale():g}, the step runs in float16")
