"""A checklist of ten points, each judged by the real objects or by the project's source."""

from __future__ import annotations

from typing import Any

from stepguard.diagnose.case import FORMATS
from stepguard.preflight.inspection import Inspection, item
from stepguard.preflight.subject import (
    Answer,
    NotApplicable,
    NotGiven,
    failed,
    follows_metric,
    passed,
    peak_rates,
    unread,
    warned,
)
from stepguard.report.phrases import count

LARGEST_RATE = 5e-5 * 1.001
"""5e-5, with room for a rate that was computed."""
LARGE_MODEL = 100_000_000
"""Parameters. The 5e-5 comes from a model of 892 million; small ones take rates far higher."""
LARGEST_CLIP = 0.5
SMALL_DIVISOR = 1e-6
LEAST_DEVIATION = 0.1
LARGEST_DEVIATION = 10.0
WARMUP_STEPS = 2000
WARMUP_SHARE = 0.01
"""Of the run: 2000 steps are meant for runs of 200 000."""
USUAL_ACCUMULATION = (2, 4)
RAREST_CHECKPOINTS = 1000


@item("checklist.lr", "learning rate suits the size (5e-5 or lower)")
def lr(run: Inspection) -> Answer:
    configured = run.number("lr")
    if run.subject.optimizer is None and configured is not None and configured <= LARGEST_RATE:
        return passed(f"{run.setting('lr')} is configured")
    rate = max(peak_rates(run.optimizer))
    parameters = sum(p.numel() for p in run.model.parameters())
    if rate <= LARGEST_RATE:
        return passed(f"lr {rate:.3g} with {parameters:,} parameters")
    if parameters < LARGE_MODEL:
        raise NotApplicable(
            f"lr {rate:.3g} is above 5e-5, which is meant for models above {LARGE_MODEL:,}; this "
            f"has {parameters:,}"
        )
    return warned(
        f"lr {rate:.3g} with {parameters:,} parameters",
        fix="Start at 5e-5 or with a longer warmup, and raise it while the gradient norm stays "
        "calm.",
    )


@item("checklist.clip", "gradients are clipped (to 0.5 or lower; under Adam to any norm)")
def clip(run: Inspection) -> Answer:
    value, said = _guarded_or_configured(run, "clip_norm", "clip")
    place = ""
    if value is None and run.context.script is not None:
        value, place = run.program.clip_norm, run.program.clipping
        place = place or _written(run, "clip_norm")[1]
        said = f"the program clips at {place}" + (f" to {value:g}" if value is not None else "")
    if not place and (value is None or value <= 0):
        if run.subject.config is None and run.subject.guard is None and run.context.script is None:
            raise NotGiven("give TARGET as module:function, --config FILE, or return `guard`")
        return warned(
            "no clipping norm is configured, and the program clips nowhere",
            fix=f"GuardConfig(clip_norm={LARGEST_CLIP}), or clip_grad_norm_(model.parameters(), "
            f"{LARGEST_CLIP}) before optimizer.step().",
        )
    name = "an unknown optimizer"
    if run.subject.optimizer is not None:
        name = type(run.subject.optimizer).__name__
    if value is None:
        return passed(f"{said}, to a norm that is not written there as a number")
    if value <= LARGEST_CLIP:
        return passed(said)
    if "adam" in name.lower():
        return passed(
            f"{said}; above {LARGEST_CLIP}, but {name}'s update does not depend on the gradient's "
            "scale"
        )
    return warned(
        f"{said} with {name}", fix=f"{LARGEST_CLIP}, or a threshold from the run's own norms."
    )


def _settings_of(guard: Any) -> Any:
    """GuardConfig of a guard; the build function may return either of them."""
    return getattr(guard, "config", guard)


def _guarded_or_configured(run: Inspection, field: str, meaning: str) -> tuple[float | None, str]:
    """A number of the GuardConfig, else of the configuration, and which of them names it.

    The GuardConfig is that of the returned guard, else the one that the program's source writes.
    """
    guarded, place = getattr(_settings_of(run.subject.guard), field, None), ""
    if run.subject.guard is None:
        guarded, place = _written(run, field)
    if isinstance(guarded, int | float):
        return float(guarded), f"GuardConfig.{field}={guarded:.12g}{place and f' at {place}'}"
    return run.number(meaning), str(run.setting(meaning))


def _written(run: Inspection, field: str) -> tuple[Any, str]:
    """What the program's source gives GuardConfig or Policy as this field, and where."""
    if run.context.script is None:
        return None, ""
    return run.program.settings.get(field, (None, ""))


@item("checklist.loss_checked", "the loss is validated before the update")
def loss_checked(run: Inspection) -> Answer:
    place = _guarded_at(run)
    if place:
        return passed(f"stepguard reads the loss and every gradient of each step ({place})")
    tests = run.program.loss_tests
    said = ", ".join(f"{name} at {place}" for name, place in tests.items())
    if "isfinite" in tests or {"isnan", "isinf"} <= tests.keys():
        _is_of_this_program(run, said)
        return passed(f"{said}, of the loss")
    why = "nothing tests the loss"
    if said:
        why = f"only {said}: an infinite loss passes isnan, a NaN passes isinf"
    return warned(
        f"{why} in {count(run.program.files, 'source file')}",
        fix="guard = stepguard.watch(model, optimizer), one line before the loop, or start it with "
        "`stepguard run`.",
    )


def _guarded_at(run: Inspection) -> str:
    """Where the program starts a guard of stepguard; empty if it does not."""
    if run.subject.guard is not None:
        return "the returned `guard`"
    if run.subject.model is None and run.subject.config is None:
        raise NotGiven("give TARGET as module:function, or a configuration in the project's folder")
    if not run.program.files:
        raise NotGiven("start the check in the project's folder: there is no source below this one")
    if run.program.guard:
        _is_of_this_program(run, f"a guard at {run.program.guard}")
    return run.program.guard


def _is_of_this_program(run: Inspection, found: str) -> None:
    """Raise NotGiven where what was found may be a line of another program in the folder."""
    if run.context.script is None:
        raise NotGiven(
            f"{found} may belong to another program: give TARGET as module:function of this one"
        )


@item("checklist.divisions", "divisors stay away from 0")
def divisions(run: Inspection) -> Answer:
    step = run.traced_step
    if step.divisor is None:
        if step.fault:
            raise NotApplicable("the step raised before it divided")
        raise NotApplicable("the step divides by nothing")
    least = step.divisor.least
    dtype = step.divisor.dtype
    said = [
        f"{count(step.divisions, 'division')}, smallest divisor {least:.3g} ({dtype}, "
        f"{step.divisor.source or 'torch'})"
    ]
    said += [f"the eps {what} has no effect at {place}" for place, what in step.lost_eps.items()]
    fix = (
        "Select before dividing, or clamp the divisor: x / y.clamp_min(1e-6); an eps below the "
        "dtype's step is lost."
    )
    if least == 0:
        return failed(*said, fix=fix)
    # A small Python number is a constant of the program, not a value that shrank.
    if least < SMALL_DIVISOR and dtype in FORMATS:
        return warned(*said, fix=fix)
    return passed(*said)


@item("checklist.latents", "latents are normalised before the squared error")
def latents(run: Inspection) -> Answer:
    latent = run.traced_step.latent
    if latent is None:
        raise NotApplicable("the step has no squared error")
    mean, deviation = latent
    said = f"target of the squared error: mean {mean:.3g}, standard deviation {deviation:.3g}"
    if LEAST_DEVIATION <= deviation <= LARGEST_DEVIATION and abs(mean) <= LARGEST_DEVIATION:
        return passed(said)
    return warned(
        said,
        fix="Standardise the data once (subtract its mean, divide by its deviation); normalising "
        "each vector inside the loss loses the scale.",
    )


@item("checklist.warmup", "warmup is long enough (2000 steps or 1 %)")
def warmup(run: Inspection) -> Answer:
    setting = run.setting("warmup")
    planned = run.number("warmup")
    if run.subject.optimizer is None and planned is not None and planned >= WARMUP_STEPS:
        return passed(f"{setting} is configured")
    _needs_warmup(run)
    wanted = float(WARMUP_STEPS)
    if run.steps:
        wanted = min(wanted, WARMUP_SHARE * run.steps)
    fix = (
        f"Warm up over {wanted:.0f} steps or more: LinearLR before the schedule, or "
        "OneCycleLR(pct_start=...)."
    )
    if run.subject.scheduler is None:
        why = "there is no scheduler"
        if setting:
            why = f"{setting} is configured but there is no scheduler"
        return warned(f"{why}: the first step takes the full rate", fix=fix)
    tried = run.schedule
    warm = 0
    if tried.first < 0.5 * tried.peak:
        warm = tried.peak_step
    said = f"{warm:,} steps from {tried.first:.3g} to {tried.peak:.3g}"
    if run.steps:
        said += f", {100 * warm / run.steps:.3g} % of {run.steps:,}"
    # a factor of (step + 1) / 2000 reaches the rate in step 1999, one of step / 2000 in step 2000
    if warm and warm + 1 >= wanted:
        return passed(said)
    return warned(said, fix=fix)


def _needs_warmup(run: Inspection) -> None:
    """Raise NotApplicable for an optimizer or a schedule without warmup."""
    optimizer = type(run.optimizer).__name__
    if "adam" not in optimizer.lower():
        raise NotApplicable(f"{optimizer} has no second moment that has to settle")
    if follows_metric(run.subject.scheduler):
        schedule = type(run.subject.scheduler).__name__
        raise NotApplicable(f"{schedule} follows a metric and knows no warmup")


@item("checklist.accumulation", "gradient accumulation (2 to 4) is in effect", last=True)
def accumulation(run: Inspection) -> Answer:
    setting = run.setting("accumulation")
    real = run.framework.facts.get("gradient_accumulation_steps")
    if not isinstance(real, int):
        real = None
        if setting is not None and _is_read_nowhere(run, setting.key):
            return warned(f"{setting} is read by nothing", fix="Use it in the loop, or remove it.")
    steps = int(run.number("accumulation") or real or 0)
    if not steps:
        raise NotApplicable("no accumulation is configured: one batch is one step")
    batch = ""
    size = run.number("batch_size")
    if size:
        batch = f", effective batch {steps * int(size)} = {steps} x {int(size)} on each rank"
    if steps == 1:
        raise NotApplicable(f"accumulation is 1{batch}")
    least, most = USUAL_ACCUMULATION
    inside = "outside"
    if least <= steps <= most:
        inside = "within"
    return passed(
        f"{steps} micro-batches a step, {inside} the usual 2 to 4{batch}; it enlarges the batch, "
        "not memory"
    )


def _is_read_nowhere(run: Inspection, key: str) -> bool:
    tracked = run.context.tracked
    if tracked is None or key not in unread(tracked):
        return False
    return key.rpartition(".")[2] not in run.project.mentions


@item("checklist.norms", "gradient norms are monitored")
def norms(run: Inspection) -> Answer:
    place = _guarded_at(run)
    if place:
        return passed(f"stepguard records the norm of every step ({place})")
    for name, place in run.program.norms.items():
        _is_of_this_program(run, f"{name} at {place}")
        return passed(f"{name} at {place}")
    return warned(
        f"no gradient norm is computed in {count(run.program.files, 'source file')}",
        fix="guard = stepguard.watch(model, optimizer) records it; clip_grad_norm_ returns it.",
    )


@item("checklist.checkpoints", "checkpoints every 1000 steps or more often")
def checkpoints(run: Inspection) -> Answer:
    every, said = _guarded_or_configured(run, "checkpoint_every", "save_every")
    place = _written(run, "checkpoint_every")[1]
    if every is None and place:
        raise NotGiven(
            f"return `guard`: its checkpoint_every is not written as a number at {place}"
        )
    if every is None and run.subject.config is None and run.subject.guard is None:
        raise NotGiven("give --config FILE, or return `guard`")
    fix = f"checkpoint_every={RAREST_CHECKPOINTS} or less."
    if every is None or every <= 0:
        return warned("no interval between checkpoints is configured", fix=fix)
    cost = f"{int(every):,} steps"
    if run.steps:
        cost += f" of {run.steps:,}"
    if every <= RAREST_CHECKPOINTS and not (run.steps and every > run.steps):
        return passed(f"{said}: a crash costs at most {cost}")
    return warned(f"{said}: a crash costs up to {cost}", fix=fix)


@item("checklist.recovery", "automatic recovery from the last good state")
def recovery(run: Inspection) -> Answer:
    guard = _settings_of(run.subject.guard)
    actions = ", ".join(getattr(getattr(guard, "policy", None), "actions", ()))
    if guard is None:
        written = _written(run, "actions")[0]
        actions = ", ".join(map(str, written)) if isinstance(written, tuple | list) else ""
    if actions and "rewind" not in actions.split(", "):
        return warned(
            f"the policy is {actions}, without rewind", fix="Add 'rewind' to Policy.actions."
        )
    place = _guarded_at(run)
    if not place:
        return warned(
            "nothing goes back to a good state by itself in "
            f"{count(run.program.files, 'source file')}",
            fix="guard = stepguard.Guard(model, optimizer, config=GuardConfig(run_dir=..., "
            "checkpoint_every=1000)).",
        )
    where = "; without a run_dir nothing survives the process"
    written, place_of_folder = _written(run, "run_dir")
    kept = getattr(guard, "run_dir", None) or run.subject.run_dir or written
    if kept:
        where = f", checkpoints below {kept}"
    elif place_of_folder:
        where = f", checkpoints below its run_dir ({place_of_folder})"
    return passed(f"stepguard's policy ({place}): {actions or 'skip, rewind, stop'}{where}")
