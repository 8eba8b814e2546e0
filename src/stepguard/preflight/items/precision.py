"""Precision: what is asked for, what the step really runs in, and the dtype of the weights."""

from __future__ import annotations

import torch

from stepguard.preflight.inspection import Inspection, Probe, item
from stepguard.preflight.settings import Setting, contradiction, meant, wanted
from stepguard.preflight.subject import Answer, NotGiven, default_dtypes, failed, passed, warned
from stepguard.tensors.values import dtype_name

NO_DTYPE = "mixed precision without a dtype"


def asked(run: Inspection) -> dict[str, str | None]:
    """Map every place that asks for a precision to its dtype; None is AMP without a dtype."""
    found: dict[str, str | None] = {}
    from_config = wanted(run.config)
    if from_config is not None:
        found[f"the configuration ({from_config.said})"] = from_config.dtype
    if "mixed_precision" in run.launcher.values:
        found[f"the launcher ({run.launcher.said('mixed_precision')})"] = run.launcher.dtype
    if run.framework.dtype is not None:
        found[f"the code ({run.framework.said})"] = run.framework.dtype
    return found


def disagreeing(run: Inspection) -> list[str]:
    """List the places that ask for another dtype than the probe found."""
    found = []
    for place, dtype in asked(run).items():
        if dtype is not None and dtype != run.probe.dtype:
            found.append(place)
    return found


@item("precision.configured", "every place asks for the same precision")
def configured(run: Inspection) -> Answer:
    contradicted = contradiction(run.config)
    if contradicted:
        return failed(contradicted, fix="Keep one of the two settings.")
    places = asked(run)
    if not places:
        raise NotGiven("give --config FILE or --launcher FILE that names a precision")
    said = [f"{place} asks for {dtype or NO_DTYPE}" for place, dtype in places.items()]
    named = set(places.values()) - {None}
    if len(named) <= 1 and not run.launcher.conflicts:
        return passed(*said)
    winner = "one of them silently"
    if run.framework.dtype:
        winner = "the code silently"
    return failed(
        *said,
        *run.launcher.conflicts,
        fix="Name one precision in one place and leave it out elsewhere; at present "
        f"{winner} wins over the others.",
    )


@item("precision.effective", "the step really runs in the configured precision")
def effective(run: Inspection) -> Answer:
    probe = run.probe
    wrong = disagreeing(run)
    if wrong:
        places = asked(run)
        said = [f"{place} asks for {places[place]}" for place in wrong]
        return failed(probe.how, *said, fix=_fix_of_context(run, str(places[wrong[0]])))
    if emulated(probe):
        return warned(
            probe.how,
            f"this {probe.device} device has no bfloat16 arithmetic and emulates it",
            fix="Use float16 with a GradScaler, or float32: "
            "torch.cuda.is_bf16_supported(including_emulation=False).",
        )
    return passed(probe.how)


def emulated(probe: Probe) -> bool:
    """True for bfloat16 on a CUDA device that has no such arithmetic."""
    if probe.device != "cuda" or probe.dtype != "bfloat16":
        return False
    # By default torch answers yes for an emulated dtype as well.
    return not torch.cuda.is_bf16_supported(including_emulation=False)


def _fix_of_context(run: Inspection, wanted: str) -> str:
    probe = run.probe
    if wanted == "float16" and probe.device == "cpu" and probe.dtype == "float32":
        # Both libraries switch autocast off for fp16 on a CPU and say nothing.
        return (
            "On a CPU fp16 is ignored by accelerate and transformers; use bf16 there, or ask "
            "for no."
        )
    context = f"torch.autocast({probe.device!r}, dtype=torch.{wanted})."
    if probe.autocast is not None:
        return f"Name the dtype where the context is opened: {context}"
    if probe.dtype != "float32" and next(iter(run.param_dtypes), "") == probe.dtype:
        return (
            f"The weights themselves are {probe.dtype}: load them in float32, or ask for "
            f"{probe.dtype}."
        )
    return f"Open the context around the forward pass: {context}"


@item("precision.unnamed", "mixed precision names its dtype")
def unnamed(run: Inspection) -> Answer:
    fix = (
        "Name the dtype: mixed_precision='bf16' in the Accelerator, or dtype= where autocast is "
        "opened; see `stepguard explain SG801`."
    )
    if run.framework.unnamed:
        said = [run.framework.unnamed]
        if run.launcher.dtype:
            said.append(f"the launcher's {run.launcher.said('mixed_precision')} is ignored")
        return failed(*said, "no GradScaler is made", fix=fix)
    asks = wanted(run.config)
    if asks is None:
        if run.framework.name == "no context":
            raise NotGiven("give --config FILE, or return `autocast`")
        return passed(f"{run.framework.name} was opened as it is")
    if asks.dtype is not None:
        return passed("a dtype is named")
    if run.subject.model is not None and run.launcher.dtype == run.probe.dtype:
        return passed(
            f"{asks.said} names no dtype, the launcher does, and the probe agrees: "
            f"{run.probe.dtype}"
        )
    return warned(f"{asks.said} names no dtype: {default_dtypes()}", fix=fix)


@item("precision.weights", "parameters have the configured dtype")
def weights(run: Inspection) -> Answer:
    said = ", ".join(f"{size:,} in {name}" for name, size in run.param_dtypes.items())
    setting = run.setting("weights")
    if setting is not None and not _has_dtype(run, setting):
        dtype = meant(setting.value)
        return failed(
            f"{setting} is configured, the parameters are: {said}",
            fix=f"Pass the dtype on to the model: model.to(torch.{dtype}), or change "
            f"{setting.key}.",
        )
    trained = {dtype_name(p.dtype) for p in run.model.parameters() if p.requires_grad}
    if len(trained) > 1:
        return warned(
            f"trained parameters mix dtypes: {said}",
            fix="Train parameters of one dtype; load adapters and heads in the dtype of the rest, "
            "or all in float32.",
        )
    return passed(f"parameters: {said or 'none'}")


def _has_dtype(run: Inspection, setting: Setting) -> bool:
    """True if parameters have the dtype, or if a plain `dtype` is met by autocast over float32."""
    dtype = meant(setting.value)
    if dtype is None or dtype in run.param_dtypes:
        return True
    # `dtype` may mean the arithmetic; `model_dtype` and its like cannot.
    if setting.key.rpartition(".")[2] != "dtype" or "float32" not in run.param_dtypes:
        return False
    try:
        return run.probe.dtype == dtype
    except NotGiven:
        return False
