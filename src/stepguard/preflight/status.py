"""The state a run would start in, read from the live objects, and whether all settings agree."""

from __future__ import annotations

from collections.abc import Iterator

from stepguard.preflight.answers import NotApplicable, NotGiven
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.items.precision import NO_DTYPE, asked, disagreeing
from stepguard.preflight.schedule import as_rate, peak_rates
from stepguard.preflight.settings.wanted_precision import contradiction
from stepguard.records.preflight import Alignment

Fact = tuple[str, str]
"""Label and value."""


def status_facts(run: Inspection) -> tuple[Fact, ...]:
    """List only what is known."""
    facts = [*_precision_asked(run), *_precision_probed(run)]
    optimizer = run.subject.optimizer
    setting = run.setting("lr")
    if optimizer is not None:
        now = as_rate(optimizer.param_groups[0]["lr"])
        peak = max(peak_rates(optimizer))
        facts.append(("learning rate", f"{now:.3g} now, {peak:.3g} at its peak"))
    elif setting is not None:
        facts.append(("learning rate", f"{setting} (configured)"))
    return (*facts, *_launch(run))


def _precision_asked(run: Inspection) -> Iterator[Fact]:
    for place, dtype in asked(run).items():
        yield "asked for", f"{dtype or NO_DTYPE} by {place}"


def _precision_probed(run: Inspection) -> Iterator[Fact]:
    if run.subject.model is None:
        return
    try:
        probe = run.probe
    except (NotGiven, NotApplicable) as why:
        yield "mixed precision", f"not probed: {why}"
        return
    amp = "no"
    # Autocast inside of loss_fn is not seen from here, but its products are.
    own = next(iter(run.param_dtypes), "float32")
    if probe.autocast:
        amp = f"yes, autocast to {probe.autocast}"
    elif probe.dtype != own:
        amp = f"yes, {probe.dtype} inside the step"
    yield "AMP enabled", amp
    yield "FP16 enabled", "yes" if probe.dtype == "float16" else "no"
    yield "mixed precision", f"{probe.dtype} (probed: {probe.how})"
    parameters = ", ".join(f"{size:,} {name}" for name, size in run.param_dtypes.items())
    yield "parameters", parameters or "none"
    scale = "none"
    if hasattr(run.scaler, "get_scale"):
        scale = f"scale {run.scaler.get_scale():g}"
    yield "GradScaler", scale
    yield "device", str(run.device)


def _launch(run: Inspection) -> Iterator[Fact]:
    """What the framework says counts; else what the launcher says."""
    known = run.launcher.values | run.framework.facts
    if known.get("distributed_type") is not None:
        yield "distributed type", str(known["distributed_type"]).removeprefix("DistributedType.")
    if known.get("num_processes") is not None:
        yield "processes", str(known["num_processes"])
    if "gpu_ids" in known:
        yield "GPU IDs", str(known["gpu_ids"])


def alignment(run: Inspection) -> tuple[Alignment, tuple[str, ...]]:
    """`aligned` only if a probe in the real context agrees with every place that asks."""
    contradicted = contradiction(run.config)
    if contradicted:
        return "contradicted", (contradicted,)
    places = asked(run)
    named = set(places.values()) - {None}
    if len(named) > 1:
        return "contradicted", tuple(f"{place}: {dtype}" for place, dtype in places.items())
    if run.subject.model is None:
        return "unproven", ("no model was given, so nothing was probed",)
    try:
        wrong = disagreeing(run)
        real = run.probe.dtype
    except (NotGiven, NotApplicable) as why:
        return "unproven", (str(why),)
    if wrong:
        return "contradicted", tuple(f"{place}: {places[place]}, probed {real}" for place in wrong)
    if not named:
        return "unproven", (f"nothing asks for a precision; the step runs in {real}",)
    return "aligned", (f"{' and '.join(places)} ask for {real}, and the probe agrees",)
