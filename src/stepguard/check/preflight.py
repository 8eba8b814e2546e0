"""`stepguard check`: every item against one subject, and the state the run would start in.

from stepguard.check.preflight import Subject, check

result = check(Subject(model=model, optimizer=optimizer, loss_fn=loss_fn, loader=loader))
assert result.ok, result.of("fail")
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from stepguard._errors import ConfigError, StepguardError
from stepguard.check import items
from stepguard.check import items_step as step
from stepguard.check.data import READERS as DATA_KINDS
from stepguard.check.data import Progress
from stepguard.check.inspection import (
    Answer,
    Inspection,
    NotApplicable,
    NotGiven,
    Probe,
    one_line,
    peak_rates,
)
from stepguard.check.settings import KINDS as CONFIG_KINDS
from stepguard.check.settings import Tracked, read_settings
from stepguard.check.subject import Subject, subject_of
from stepguard.records.checks import Alignment, Outcome, Preflight
from stepguard.state.capsule import import_function, importable

__all__ = ["Subject", "Tracked", "check"]


TITLES = {
    "precision.configured": "every place asks for the same precision",
    "precision.effective": "the step really runs in the configured precision",
    "precision.unnamed": "mixed precision names its dtype",
    "scaler.missing": "float16 has a loss scale",
    "optimizer.eps": "the optimizer's eps survives the parameters' dtype",
    "optimizer.parameters": "the optimizer holds the model's parameters",
    "optimizer.stalled": "updates of size lr survive the weights' dtype",
    "norm.eps": "norm layers survive a row of zeros",
    "lr.config": "the optimizer has the configured learning rate",
    "lr.schedule": "the schedule keeps to the configured rates to the end",
    "lr.checkpoint": "loading the checkpoint keeps the configured learning rate",
    "config.types": "numbers are numbers",
    "config.values": "values are possible",
    "config.unread": "every key of the configuration is read",
    "config.changed": "the configuration equals the checkpoint's",
    "launcher.agrees": "launcher and program agree",
    "labels.empty": "every example has a target that counts",
    "data.finite": "inputs are finite",
    "data.constant": "inputs vary",
    "data.range": "values lie where they are expected",
    "data.unreadable": "every example can be read",
    "data.leak": "training and validation data are disjoint",
    "model.stored_finite": "stored weights and state are finite",
    "model.fresh_forward": "one step of the model is finite",
    "loss.split": "a split batch gives the gradient of the whole",
    "scalars.limit": "watched values are within their limits",
    "checkpoint.sound": "the checkpoint is complete and finite",
    "code.current": "code and versions in use",
    "disk.space": "the disk holds the checkpoints",
    "memory.estimate": "the step fits into memory",
    "checklist.lr": "learning rate suits the size (5e-5 or lower)",
    "checklist.clip": "gradients are clipped (to 0.5 or lower; under Adam to any norm)",
    "checklist.loss_checked": "the loss is validated before the update",
    "checklist.divisions": "divisors stay away from 0",
    "checklist.latents": "latents are normalised before the squared error",
    "checklist.warmup": "warmup is long enough (2000 steps or 1 %)",
    "checklist.accumulation": "gradient accumulation (2 to 4) is in effect",
    "checklist.norms": "gradient norms are monitored",
    "checklist.checkpoints": "checkpoints every 1000 steps or more often",
    "checklist.recovery": "automatic recovery from the last good state",
}
"""Ids in the order they are shown, and what is expected. The function of `lr.config` is `lr_config`
in one of the modules of items; `checklist` and the other first parts are what `--only` selects by.
"""
LAST = ("config.unread", "checklist.accumulation")
"""Run after all other items, because any of them may read a key of the configuration."""


def check(
    subject: Subject,
    *,
    only: Iterable[str] = (),
    skip: Iterable[str] = (),
    target: str = "",
    progress: Progress | None = None,
) -> Preflight:
    """Check everything the subject has. `only` and `skip` take ids or patterns such as `data.*`.

    The subject's objects are left bit for bit as they were. Raises ConfigError for a subject that
    cannot be used.
    """
    run = Inspection(subject, progress)
    chosen = selected(only, skip)
    answered = {name: run_item(name, run) for name in sorted(chosen, key=LAST.__contains__)}
    result = Preflight(
        target=target,
        outcomes=tuple(answered[name] for name in chosen),
        alignment_why=("precision was not checked",),
    )
    # The probe runs the model: not for a check that leaves precision out.
    if any(name.startswith("precision.") for name in chosen):
        aligned, why = alignment(run)
        facts = status_facts(run)
        result = replace(result, facts=facts, alignment=aligned, alignment_why=why)
    return result


def selected(only: Iterable[str] = (), skip: Iterable[str] = ()) -> list[str]:
    """The items that these ids, sections or patterns leave; one that matches none is a mistake."""

    def matches(name: str, patterns: Iterable[str]) -> bool:
        return any(fnmatchcase(name, one) or fnmatchcase(name, f"{one}.*") for one in patterns)

    only, skip = list(only), list(skip)
    for pattern in only + skip:
        if not any(matches(name, [pattern]) for name in TITLES):
            sections = sorted({name.partition(".")[0] for name in TITLES})
            raise ConfigError(
                f"{pattern!r} is not an item; use an id such as 'lr.config', or one of "
                f"{', '.join(sections)}."
            )
    chosen = [name for name in TITLES if not only or matches(name, only)]
    return [name for name in chosen if not matches(name, skip)]


def run_item(name: str, run: Inspection) -> Outcome:
    """Run one item. Its own exception is a warning, so that it does not hide the other items."""
    try:
        function = name.replace(".", "_")
        (module,) = (module for module in (items, step) if hasattr(module, function))
        answer: Answer = getattr(module, function)(run)
    except NotGiven as missing:
        answer = Answer("not_checked", (str(missing),))
    except NotApplicable as why:
        answer = Answer("not_applicable", (str(why),))
    except StepguardError:
        raise
    except Exception as fault:
        said = f"this check itself failed: {one_line(fault, 160)}"
        answer = Answer("warn", (said,), f"Skip it with --skip {name}, and report this.")
    return Outcome(id=name, title=TITLES[name], **answer._asdict())


# --- The state a run would start in, read from the live objects, and whether all settings agree.


def status_facts(run: Inspection) -> tuple[tuple[str, str], ...]:
    """Label and value of what is known."""
    facts = [
        ("asked for", f"{dtype or step.NO_DTYPE} by {place}")
        for place, dtype in step.asked(run).items()
    ]
    if run.subject.model is not None:
        try:
            facts += _precision_facts(run, run.probe)
        except (NotGiven, NotApplicable) as why:
            facts.append(("mixed precision", f"not probed: {why}"))
    optimizer, setting = run.subject.optimizer, run.setting("lr")
    if optimizer is not None:
        now = float(optimizer.param_groups[0]["lr"])
        peak = max(peak_rates(optimizer))
        facts.append(("learning rate", f"{now:.3g} now, {peak:.3g} at its peak"))
    elif setting is not None:
        facts.append(("learning rate", f"{setting} (configured)"))
    # What the framework says counts; else what the launcher says.
    known = run.launcher.values | run.framework.facts
    for label, name in LAUNCH_FACTS.items():
        if known.get(name) is not None:
            facts.append((label, str(known[name]).removeprefix("DistributedType.")))
    return tuple(facts)


def _precision_facts(run: Inspection, probe: Probe) -> list[tuple[str, str]]:
    amp = "no"
    # Autocast inside of loss_fn is not seen from here, but its products are.
    if probe.autocast:
        amp = f"yes, autocast to {probe.autocast}"
    elif probe.dtype != next(iter(run.param_dtypes), "float32"):
        amp = f"yes, {probe.dtype} inside the step"
    scale = "none"
    if hasattr(run.scaler, "get_scale"):
        scale = f"scale {run.scaler.get_scale():g}"
    sizes = ", ".join(f"{size:,} {name}" for name, size in run.param_dtypes.items())
    return [
        ("AMP enabled", amp),
        ("FP16 enabled", "yes" if probe.dtype == "float16" else "no"),
        ("mixed precision", f"{probe.dtype} (probed: {probe.how})"),
        ("parameters", sizes or "none"),
        ("GradScaler", scale),
        ("device", str(run.device)),
    ]


LAUNCH_FACTS = {
    "distributed type": "distributed_type",
    "processes": "num_processes",
    "GPU IDs": "gpu_ids",
}


def alignment(run: Inspection) -> tuple[Alignment, tuple[str, ...]]:
    """`aligned` only if a probe in the real context agrees with every place that asks."""
    configured = run_item("precision.configured", run)
    effective = run_item("precision.effective", run)
    for outcome in (configured, effective):
        if outcome.status == "fail":
            return "contradicted", outcome.evidence
    places = step.asked(run)
    if effective.status == "not_checked" or not any(places.values()):
        return "unproven", (*configured.evidence, *effective.evidence)
    return "aligned", (f"{' and '.join(places)} ask for {run.probe.dtype}, and the probe agrees",)


# --- TARGET of `stepguard check`: a build function, a configuration file, or data.


def resolve(
    target: str, config: Path | None = None, launcher: Path | None = None, **given: Any
) -> Subject:
    """Say what is to be checked. Runs nothing but the build function, if the target is one.

    `given` are fields of the Subject that options set; None and empty ones do not count.
    """
    path = Path(target)
    kind = path.suffix.lower()
    options = {name: value for name, value in given.items() if value not in (None, {})}
    if path.is_dir() or (path.is_file() and kind in DATA_KINDS):
        options.setdefault("data", target)
    elif path.is_file() and kind in CONFIG_KINDS:
        if config is not None:
            raise ConfigError(f"TARGET {target} is a configuration already; leave --config out.")
        config = path
    elif path.exists():
        kinds = ", ".join([*CONFIG_KINDS, *DATA_KINDS])
        raise ConfigError(
            f"{target}: files of kind {path.suffix or '(none)'} are not known; known are {kinds}."
        )
    elif not re.fullmatch(r"[^:/]+:[^:/]+", target):
        raise ConfigError(
            f"{target!r} is neither a file nor a folder here, nor 'module:function'; give one of "
            "these, for instance stepguard check train:build."
        )
    settings = None if config is None else read_settings(config)
    subject = Subject(config=settings)
    if not path.exists():
        subject = _built(target, settings)
    if launcher is not None:
        options["launcher"] = read_settings(launcher, "launcher")
        options["launcher_name"] = launcher.name
    return replace(subject, config_file=config, **options)


def _built(target: str, settings: dict[str, Any] | None) -> Subject:
    """Call the build function, with the configuration if it takes a parameter."""
    tracked = None
    with importable():
        build = import_function(target, ConfigError)
        if settings is not None and inspect.signature(build).parameters:
            tracked = Tracked(settings)
        subject = subject_of(call_build(build, target, tracked), target)
        script = getattr(sys.modules.get(target.partition(":")[0]), "__file__", None)
    if isinstance(subject.config, Tracked):
        tracked = subject.config
    if settings is not None and (subject.config is None or subject.config is tracked):
        subject = replace(subject, config=settings)
    # A package without an __init__.py has no file.
    return replace(subject, tracked=tracked, script=Path(script) if script else None)


def call_build(build: Callable[..., Any], target: str, tracked: Tracked | None = None) -> Any:
    """Call the user's function. Raises ConfigError with what it raised."""
    try:
        return build() if tracked is None else build(tracked)
    except Exception as fault:
        raise ConfigError(
            f"{target} raised {one_line(fault, 1000)}; it is called with the "
            "configuration, or without arguments if --config is not given."
        ) from fault
