"""The state a run would start in, read from the live objects, and whether everything asked for
agrees with it.
"""

from __future__ import annotations

from collections.abc import Iterator

from stepguard.preflight.answers import Missing, Pointless
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.items.precision_configured import asked
from stepguard.preflight.items.precision_effective import disagreeing
from stepguard.preflight.schedule import as_rate, peak_rates
from stepguard.preflight.settings.precision import contradiction
from stepguard.records.preflight import Alignment


def status_facts(seen: Inspection) -> tuple[tuple[str, str], ...]:
    """Label and value; only what is known."""
    facts = list(_precision(seen))
    if seen.subject.optimizer is not None:
        now = as_rate(seen.subject.optimizer.param_groups[0]["lr"])
        facts.append(
            (
                "learning rate",
                f"{now:.3g} now, {max(peak_rates(seen.subject.optimizer)):.3g} at its peak",
            )
        )
    elif (setting := seen.setting("lr")) is not None:
        facts.append(("learning rate", f"{setting} (configured)"))
    facts += _launched(seen)
    return tuple(facts)


def _precision(seen: Inspection) -> Iterator[tuple[str, str]]:
    for place, dtype in asked(seen).items():
        yield "asked for", f"{dtype or 'mixed precision without a dtype'} by {place}"
    if seen.subject.model is None:
        return
    try:
        probe = seen.probe
    except (Missing, Pointless) as why:
        yield "mixed precision", f"not probed: {why}"
        return
    yield "AMP enabled", f"yes, autocast to {probe.autocast}" if probe.autocast else _amp_off(seen)
    yield "FP16 enabled", "yes" if probe.dtype == "float16" else "no"
    yield "mixed precision", f"{probe.dtype} (probed: {probe.how})"
    yield (
        "parameters",
        ", ".join(f"{size:,} {name}" for name, size in seen.param_dtypes.items()) or "none",
    )
    yield (
        "GradScaler",
        f"scale {seen.scaler.get_scale():g}" if hasattr(seen.scaler, "get_scale") else "none",
    )
    yield "device", str(seen.device)


def _amp_off(seen: Inspection) -> str:
    own = next(iter(seen.param_dtypes), "float32")
    return "no" if seen.probe.dtype == own else f"yes, {seen.probe.dtype} inside the step"


def _launched(seen: Inspection) -> Iterator[tuple[str, str]]:
    launcher, facts = seen.launcher, seen.around.facts
    kind = facts.get("distributed_type", launcher.values.get("distributed_type"))
    if kind is not None:
        yield "distributed type", str(kind).removeprefix("DistributedType.")
    processes = facts.get("num_processes", launcher.values.get("num_processes"))
    if processes is not None:
        yield "processes", str(processes)
    if "gpu_ids" in launcher.values:
        yield "GPU IDs", str(launcher.values["gpu_ids"])


def alignment(seen: Inspection) -> tuple[Alignment, tuple[str, ...]]:
    """`aligned` only when a probe in the real context agrees with every place that asks for a
    precision.
    """
    inside = contradiction(seen.config)
    places = asked(seen)
    named = {dtype for dtype in places.values() if dtype is not None}
    if inside or len(named) > 1:
        return "contradicted", (inside,) if inside else tuple(
            f"{p}: {d}" for p, d in places.items()
        )
    if seen.subject.model is None:
        return "unproven", ("no model was given, so nothing was probed",)
    try:
        wrong, real = disagreeing(seen), seen.probe.dtype
    except (Missing, Pointless) as why:
        return "unproven", (str(why),)
    if wrong:
        return "contradicted", tuple(f"{place}: {places[place]}, probed {real}" for place in wrong)
    if not named:
        return "unproven", (f"nothing asks for a precision; the step runs in {real}",)
    return "aligned", (f"{' and '.join(places)} ask for {real}, and the probe agrees",)
