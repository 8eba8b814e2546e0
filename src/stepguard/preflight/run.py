"""`check`: every item against one subject, and the state the run would start in."""

from __future__ import annotations

import fnmatch
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stepguard._errors import ConfigError, StepguardError
from stepguard.preflight.data import READERS as DATA_KINDS
from stepguard.preflight.data import Progress
from stepguard.preflight.inspection import CheckContext, Inspection, Item
from stepguard.preflight.items import ITEMS
from stepguard.preflight.items.precision import NO_DTYPE, asked, disagreeing
from stepguard.preflight.project import is_own_source
from stepguard.preflight.settings import READERS as CONFIG_KINDS
from stepguard.preflight.settings import UnquotedNumber, contradiction, flat, read_settings
from stepguard.preflight.subject import (
    Answer,
    NotApplicable,
    NotGiven,
    Subject,
    Tracked,
    as_rate,
    one_line,
    peak_rates,
    plain,
    subject_of,
)
from stepguard.records.checks import Alignment, Outcome, Preflight
from stepguard.state.capsule import import_function, importable

# --- TARGET of `stepguard check`: a build function, a configuration file, or data.


FUNCTION = re.compile(r"[^:/]+:[^:/]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The words of the command line."""

    target: str
    config: Path | None = None
    launcher: Path | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the Subject that options set; None and empty ones do not count."""


def resolve(request: Request) -> tuple[Subject, CheckContext]:
    """Say what is to be checked. Runs nothing but the build function, if the target is one."""
    kind = _kind(request.target)
    file = request.config
    if kind == "config":
        if file is not None:
            raise ConfigError(
                f"TARGET {request.target} is a configuration already; leave --config out."
            )
        file = Path(request.target)
    config = None
    if file is not None:
        config = read_settings(file)
    context = CheckContext(Path.cwd(), config_file=file)
    subject = Subject(config=config)
    if kind == "function":
        subject, context = _built(request.target, config, context)
    elif kind == "data":
        subject = replace(subject, data=request.target)
    if request.launcher is not None:
        facts = read_settings(request.launcher, "launcher")
        subject = replace(subject, launcher=facts, launcher_name=request.launcher.name)
    return subject.with_given(**request.given), context


def _kind(target: str) -> str:
    path = Path(target)
    suffix = path.suffix.lower()
    if path.is_dir() or (path.is_file() and suffix in DATA_KINDS):
        return "data"
    if path.is_file() and suffix in CONFIG_KINDS:
        return "config"
    if path.exists():
        kinds = ", ".join([*CONFIG_KINDS, *DATA_KINDS])
        raise ConfigError(
            f"{target}: files of kind {path.suffix or '(none)'} are not known; known are {kinds}."
        )
    if FUNCTION.fullmatch(target):
        return "function"
    raise ConfigError(
        f"{target!r} is neither a file nor a folder here, nor 'module:function'; give one of "
        "these, for instance stepguard check train:build."
    )


def _built(
    target: str, config: dict[str, Any] | None, context: CheckContext
) -> tuple[Subject, CheckContext]:
    """Call the build function, with the configuration if it takes a parameter."""
    tracked = None
    with importable():
        build = import_function(target, ConfigError)
        _fits(build, target, config)
        if config is not None:
            if _parameters(build):
                tracked = Tracked(config)
            else:
                why = f"{target} takes no parameter, so it cannot be given the configuration"
                context = replace(context, why_untracked=why)
        subject = subject_of(call_build(build, target, tracked), target)
        script = getattr(sys.modules.get(target.partition(":")[0]), "__file__", None)
    if isinstance(subject.config, Tracked):
        tracked = subject.config
    if config is not None and (subject.config is None or subject.config is tracked):
        subject = replace(subject, config=config)
    # A package without an __init__.py has no file.
    return subject, replace(context, tracked=tracked, script=Path(script) if script else None)


def call_build(build: Callable[..., Any], target: str, tracked: Tracked | None = None) -> Any:
    """Call the user's function. Raises ConfigError with what it raised."""
    try:
        if tracked is None:
            return build()
        return build(tracked)
    except Exception as fault:
        text = " ".join(str(fault).split()).replace(UnquotedNumber.__name__, "str")
        for leaf in flat(plain(tracked)) if isinstance(fault, TypeError) and tracked else ():
            if isinstance(leaf.value, UnquotedNumber):
                text += (
                    f" ({leaf.key}: {leaf.value} is text to PyYAML; write it with a dot: 1.0e-4)"
                )
                break
        raise ConfigError(f"{target} raised {type(fault).__name__}: {text}") from fault


def _parameters(build: Any) -> list[inspect.Parameter]:
    try:
        found = inspect.signature(build).parameters.values()
    except (TypeError, ValueError):
        # Functions written in C may have no signature.
        return []
    return [p for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _fits(build: Any, target: str, config: dict[str, Any] | None) -> None:
    needed = []
    for parameter in _parameters(build):
        if parameter.default is parameter.empty:
            needed.append(parameter.name)
    if len(needed) > 1:
        raise ConfigError(
            f"{target} needs {', '.join(needed)}; it is called with the configuration and nothing "
            "else."
        )
    if needed and config is None:
        raise ConfigError(
            f"{target} takes {needed[0]!r}; give --config FILE, which it is called with."
        )


# --- The state a run would start in, read from the live objects, and whether all settings agree.


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


# --- `check`: every item against one subject, and the state the run would start in.


def check(
    subject: Subject,
    *,
    only: Iterable[str] = (),
    skip: Iterable[str] = (),
    target: str = "",
    context: CheckContext | None = None,
    progress: Progress | None = None,
) -> Preflight:
    """Check everything the subject has. `only` and `skip` take ids or patterns such as `data.*`.

    The subject's objects are left bit for bit as they were. Raises ConfigError for a subject that
    cannot be used.
    """
    if context is None:
        context = CheckContext(
            Path.cwd(),
            script=_running_script(),
            why_untracked="wrap the configuration in stepguard.preflight.Tracked",
        )
    inspection = Inspection(subject, context, progress)
    chosen = selected(tuple(only), tuple(skip))
    answered = {}
    for item in sorted(chosen, key=lambda item: item.last):
        answered[item.id] = run_item(item, inspection)
    outcomes = tuple(answered[item.id] for item in chosen)
    # The probe runs the model: not for a check that leaves precision out.
    if not fnmatch.filter(answered, "precision.*"):
        return Preflight(
            target=target, outcomes=outcomes, alignment_why=("precision was not checked",)
        )
    aligned, why = alignment(inspection)
    return Preflight(
        target=target,
        outcomes=outcomes,
        facts=status_facts(inspection),
        alignment=aligned,
        alignment_why=why,
    )


def _running_script() -> Path | None:
    """The program that asks for its own check, if it was started from below this folder."""
    started = getattr(sys.modules.get("__main__"), "__file__", None)
    if started is None or not is_own_source(Path(started), Path.cwd()):
        return None
    return Path(started)


def selected(only: tuple[str, ...], skip: tuple[str, ...]) -> list[Item]:
    """The items these patterns leave; a pattern that matches none is a mistake."""
    chosen = _matching(only or ("*",)) - _matching(skip)
    return [item for item in ITEMS if item.id in chosen]


def _matching(patterns: tuple[str, ...]) -> set[str]:
    """Ids that are meant by an id, a section or a pattern."""
    found: set[str] = set()
    ids = [item.id for item in ITEMS]
    for pattern in patterns:
        matches = {*fnmatch.filter(ids, pattern), *fnmatch.filter(ids, f"{pattern}.*")}
        if not matches:
            sections = sorted({item.partition(".")[0] for item in ids})
            raise ConfigError(
                f"{pattern!r} is not an item; use an id such as 'lr.config', or one of "
                f"{', '.join(sections)}."
            )
        found |= matches
    return found


def run_item(item: Item, inspection: Inspection) -> Outcome:
    """Run one item. Its own exception is a warning, so that it does not hide the other items."""
    try:
        answer = item.look(inspection)
    except NotGiven as missing:
        answer = Answer("not_checked", (str(missing),))
    except NotApplicable as why:
        answer = Answer("not_applicable", (str(why),))
    except StepguardError:
        raise
    except Exception as fault:
        said = f"this check itself failed: {one_line(fault, 160)}"
        answer = Answer("warn", (said,), f"Leave it out with --skip {item.id}, and report it.")
    return Outcome(
        id=item.id,
        title=item.title,
        status=answer.status,
        evidence=answer.evidence,
        fix=answer.fix,
    )
