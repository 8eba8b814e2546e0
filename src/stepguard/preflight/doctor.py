"""The examination of `stepguard doctor`: what a run's folder holds, and what to do next.

Journal, capsules and checkpoints are read from the folder; configuration, fresh model and watched
values are examined where they are given. Configuration, model and forward pass are judged by the
items of `stepguard check`, the checkpoints by `stepguard verify`, the journal as `stepguard live`
does.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from torch import nn

from stepguard._errors import CapsuleError, ConfigError, JournalError, StoreError
from stepguard.check.verify import Plan
from stepguard.check.verify import check_path as verify
from stepguard.checkpoints.seal import read_pointer
from stepguard.preflight.inspection import CheckContext, Inspection, nonfinite_outputs, trace_step
from stepguard.preflight.items import config as config_items
from stepguard.preflight.items import lr as lr_items
from stepguard.preflight.items.model import floating_tensors, judge_step, stored_finite
from stepguard.preflight.run import call_build, run_item
from stepguard.preflight.settings import (
    RATE_NAMES,
    as_number,
    flat,
    last_part,
    names,
    rate_settings,
    read_settings,
)
from stepguard.preflight.subject import FrameworkFacts, Subject, listed, subject_of
from stepguard.records.checks import Status, Verification
from stepguard.records.incident import Examination, Section, SectionStatus, not_checked
from stepguard.report.health import concerns
from stepguard.report.live import judge_run
from stepguard.report.phrases import count, size
from stepguard.report.story import Run, read_story
from stepguard.report.summary import IncidentGroup, changed_settings, group_incidents
from stepguard.state.capsule import check_capsule, import_function, importable

# --- A model built by the user's function for `stepguard doctor`: its values and its first
# output.


STATUSES: dict[Status, SectionStatus] = {
    "pass": "fine",
    "not_applicable": "fine",
    "warn": "warning",
    "fail": "failed",
    "not_checked": "not checked",
}
GIVE_INPUTS = (
    "let the build function return (model, inputs), or give the model an `example_input_array`"
)


class FreshModel:
    """What `module:function` returns. What it raises is told in a section, not raised."""

    def __init__(self, build: str) -> None:
        self._subject = Subject()
        self._fault = ""
        with importable():
            function = import_function(build, ConfigError)
            try:
                self._subject = _as_subject(call_build(function, build), build)
            except ConfigError as fault:
                self._fault = str(fault)

    @property
    def model(self) -> nn.Module | None:
        return self._subject.model

    def values_section(self) -> Section:
        """Are its first values finite?"""
        if self._fault:
            return Section(title="fresh model", status="failed", lines=(self._fault,))
        outcome = run_item(stored_finite, Inspection(self._subject, CheckContext(Path.cwd())))
        said = f"{type(self.model).__name__}: {', '.join(outcome.evidence)}"
        return Section(title="fresh model", status=STATUSES[outcome.status], lines=(said,))

    def forward_section(self) -> Section:
        """Call it in evaluation mode; name the first module whose output is not finite."""
        model = self.model
        if model is None or any(parameter.is_meta for parameter in model.parameters()):
            return not_checked("forward pass", "there is no model with weights")
        inputs = self._subject.batch
        # Lightning keeps an example under the first name, transformers under the second.
        for name in ("example_input_array", "dummy_inputs"):
            if inputs is None:
                inputs = getattr(model, name, None)
        if inputs is None:
            return not_checked("forward pass", GIVE_INPUTS)
        model.eval()
        with _bad_modules(model) as bad:
            step = trace_step(Subject(model=model, batch=inputs), FrameworkFacts(), inputs)
        answer = judge_step(step)
        said = ", ".join(answer.evidence)
        if bad:
            said += f"; first in {bad[0]}"
        return Section(title="forward pass", status=STATUSES[answer.status], lines=(said,))


def _as_subject(built: Any, build: str) -> Subject:
    """A model, (model, inputs), or whatever the build function of `check` may return."""
    if isinstance(built, nn.Module):
        return Subject(model=built)
    if isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], nn.Module):
        return Subject(model=built[0], batch=built[1])
    return subject_of(built, build)


@contextmanager
def _bad_modules(model: nn.Module) -> Iterator[list[str]]:
    """Collect the names of the modules whose output is not finite, in the order of calls."""
    bad: list[str] = []
    names = {module: name for name, module in model.named_modules()}

    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        if nonfinite_outputs(output):
            bad.append(names[module] or "the model itself")

    handles = [module.register_forward_hook(hook) for module in names]
    try:
        yield bad
    finally:
        for handle in handles:
            handle.remove()


# --- The examination of `stepguard doctor`: what a run's folder holds, and what to do next.


LIMIT = 1.0
"""Above this a gate no longer damps what it multiplies."""
SHOWN = (
    *RATE_NAMES,
    *names(
        "batch_size grad_clip clip_norm max_grad_norm amp fp16 bf16 mixed_precision precision "
        "min_lr weight_decay optimizer scheduler model_type seed"
    ),
)
"""Settings that are shown, by the last part of their key."""
MOST_SHOWN = 8


def examine(
    folder: Path,
    *,
    config: Path | None,
    build: str | None,
    watch: Sequence[str],
    plan: Plan | None = None,
    progress: Callable[[int], None] | None = None,
    exclude: Collection[str] = (),
) -> Examination:
    """Say everything that can be said about the run in this folder. Folders named in `exclude`
    hold checkpoints that were moved out of the way.
    """
    settings = {}
    # Before the checkpoints, which may take minutes to read.
    if config is not None:
        settings = read_settings(config)

    def watched(name: str) -> bool:
        return any(fnmatch(name.lower(), pattern.lower()) for pattern in watch)

    found = verify(folder, plan=plan, progress=progress, watch=watched, exclude=exclude)
    sections = []
    if config is not None:
        sections.append(_configuration(config, settings, best_of(found)))
    for section in (_checkpoints(folder, found), _journal(folder), _incidents(folder)):
        if section is not None:
            sections.append(section)
    model = None
    if build is not None:
        fresh = FreshModel(build)
        sections += [fresh.values_section(), fresh.forward_section()]
        model = fresh.model
    if watch:
        sections.append(_watched_values(_watched_ranges(found, model, watched), watch))
    return Examination(path=str(folder), sections=(*sections, _recommendations(folder, found)))


def _configuration(file: Path, settings: dict[str, Any], best: Verification | None) -> Section:
    """Judge the file by the items of `check`, against the checkpoint to resume from."""
    shown = []
    for leaf in flat(settings):
        if last_part(leaf.key) in SHOWN:
            shown.append(f"{leaf.key} = {leaf.value}")
    lines = [", ".join(shown) or f"{file.name} names no known setting"]
    status: SectionStatus = "fine"
    run = Inspection(
        Subject(config=settings), CheckContext(Path.cwd(), config_file=file), verified=best
    )
    for item in (config_items.types, config_items.values, lr_items.checkpoint):
        outcome = run_item(item, run)
        if outcome.status not in ("fail", "warn"):
            continue
        lines += [*outcome.evidence, f"fix: {outcome.fix}"]
        # Many programs convert what they read, so a number in quotes does not stop a run.
        status = "warning" if item is config_items.types else "failed"
    unusable = [leaf for leaf in rate_settings(settings) if as_number(leaf.value) is None]
    if unusable:
        status = "failed"
        lines.append(f"{', '.join(map(str, unusable))}: not a positive number")
    return Section(title="configuration", status=status, lines=tuple(lines))


def _checkpoints(folder: Path, found: Verification) -> Section:
    if not found.leaves:
        return not_checked("checkpoints", f"no checkpoint below {folder}")
    bad = _corrupt(found)
    diverged = [leaf for leaf in found.leaves if leaf.diverged and not leaf.corrupt]
    good = len(found.leaves) - len(bad) - len(diverged)
    counts = f"{good} good, {len(bad)} corrupt"
    if diverged:
        counts += f", {len(diverged)} diverged"
    lines = [f"{count(len(found.leaves), 'checkpoint')}, {counts}, {size(found.bytes)}"]
    for leaf in bad[:MOST_SHOWN]:
        first = leaf.errors[0]
        where = ""
        if first.tensor and first.role:
            where = f"{first.tensor} ({first.role}): "
        lines.append(f"{leaf.path}: {where}{first.detail}")
    if len(bad) > MOST_SHOWN:
        lines.append(f"and {len(bad) - MOST_SHOWN} more")
    status: SectionStatus = "fine"
    if diverged:
        status = "warning"
    if found.warnings:
        status = "warning"
        lines.append(
            f"{count(len(found.warnings), 'warning')}; `stepguard verify {folder}` lists them"
        )
    if found.corrupt:
        status = "corrupt"
    return Section(title="checkpoints", status=status, lines=tuple(lines))


def _corrupt(found: Verification) -> list[Verification]:
    return [leaf for leaf in found.leaves if leaf.corrupt]


def _watched_ranges(
    found: Verification, model: nn.Module | None, watched: Callable[[str], bool]
) -> dict[str, list[tuple[str, float, float]]]:
    """Name, lowest and highest value of the watched tensors of each checkpoint and of the fresh
    model.
    """
    ranges = {}
    for leaf in found.leaves:
        # a gate's moments and step count in the optimizer are not the gate
        values = [tensor for tensor in leaf.watched if tensor.role != "optimizer"]
        ranges[leaf.path] = [(tensor.name, tensor.low, tensor.high) for tensor in values]
    if model is not None:
        ranges["fresh model"] = [
            (name, float(values.min()), float(values.max()))
            for name, values in floating_tensors(model).items()
            if watched(name)
        ]
    return {source: values for source, values in ranges.items() if values}


def _watched_values(
    ranges: dict[str, list[tuple[str, float, float]]], watch: Sequence[str]
) -> Section:
    """A line for each checkpoint, and in it the largest values first."""
    title = "watched values"
    if not ranges:
        wanted = " or ".join(watch)
        return not_checked(
            title, f"no tensor is named {wanted}; choose others with --watch PATTERN"
        )

    def largest(value: tuple[str, float, float]) -> float:
        size = max(abs(value[1]), abs(value[2]))
        return math.inf if math.isnan(size) else size

    sources = {
        source: sorted(values, key=largest, reverse=True) for source, values in ranges.items()
    }
    lines = []
    for source in sorted(sources, key=lambda source: largest(sources[source][0]), reverse=True):
        said = []
        for name, low, high in sources[source]:
            span = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
            said.append(f"{name} = {span}")
        lines += listed(source, said, 2 * MOST_SHOWN)
    number = sum(map(len, sources.values()))
    large = sum(largest(value) > LIMIT for values in sources.values() for value in values)
    shown = lines[:MOST_SHOWN]
    if len(lines) > MOST_SHOWN:
        shown.append(f"and {len(lines) - MOST_SHOWN} more checkpoints")
    if not large:
        head = f"{count(number, 'value')}, none above {LIMIT:g}"
        return Section(title=title, status="fine", lines=(head, *shown))
    head = f"{large} of {number} above {LIMIT:g}: such a gate amplifies what it multiplies"
    return Section(title=title, status="warning", lines=(head, *shown))


def _recommendations(folder: Path, found: Verification) -> Section:
    lines = []
    best = best_of(found)
    if best is not None:
        at = ""
        if best.step is not None:
            at = f" (step {best.step:,})"
        lines.append(f"resume from {best.path}{at}: {_why_best(found, best)}")
    elif any(leaf.diverged for leaf in found.leaves):
        lines.append("start afresh: every checkpoint that is whole and finite has diverged")
    elif found.leaves:
        lines.append("start afresh: no checkpoint is left that is whole and finite")
    advice = Section(title="recommendations", status="fine", lines=tuple(lines))
    bad = _corrupt(found)
    if bad:
        move = (
            f"move {count(len(bad), 'corrupt checkpoint')} out of the way, so that nothing resumes "
            "from there:"
        )
        return _with_command(advice, f"stepguard quarantine {shlex.quote(str(folder))}", move)
    if not lines:
        return replace(advice, lines=("there is no checkpoint to resume from",))
    return advice


def _journal(folder: Path) -> Section | None:
    """What the run itself has written down: its setting, its end, its incidents by kind."""
    if not (folder / "journal.jsonl").is_file():
        return None
    title = "journal"
    try:
        story = read_story(folder)
    except (JournalError, OSError) as fault:
        said = f"it cannot be read: {str(fault).splitlines()[0]}"
        return Section(title=title, status="warning", lines=(said,))
    run = story.latest
    verdict = judge_run(run, (), None, now=True)
    head = f"{count(len(run.steps), 'step')}, {count(len(run.incidents), 'incident')}"
    if verdict == "waiting":
        head += "; it has not ended"
    else:
        head += f"; {verdict}"
    if run.torn:
        head += f"; {count(run.torn, 'line')} cannot be read"
    lines = [head]
    lines += _ran_with(run)
    for group in group_incidents(run)[:MOST_SHOWN]:
        lines.append(_incidents_of_a_kind(group))
    lines += [concern.text for concern in concerns(run)]
    for other in story.elsewhere:
        lines.append(f"another guard of this run wrote to {other}; examine it too")
    # A killed run tears the last line; a file of which no line can be read is something else.
    readable = len(run.steps) > 0 or not run.torn
    if verdict in ("healthy", "waiting") and not run.incidents and readable:
        return Section(title=title, status="fine", lines=tuple(lines))
    command = f"stepguard report {shlex.quote(str(folder))}"
    return Section(title=title, status="warning", lines=tuple(lines), commands=(command,))


def _ran_with(run: Run) -> list[str]:
    """Optimizer, schedule, learning rates and settings in one line, as far as they are known."""
    header = run.header
    parts = [str(header[name]) for name in ("optimizer", "schedule") if header.get(name)]
    rates = run.steps.values("lr")
    if len(rates):
        parts.append(f"learning rate {rates[0]:.4g} at first, {rates[-1]:.4g} at last")
    changed = [f"{name}={value}" for name, value in changed_settings(header).items()]
    parts += listed("settings", changed, MOST_SHOWN)
    return [", ".join(parts)] if parts else []


def _incidents_of_a_kind(group: IncidentGroup) -> str:
    steps = f"step {group.first_step:,}"
    if group.count > 1:
        steps = f"{group.count} times, steps {group.first_step:,} to {group.last_step:,}"
    said = f"{steps}: {group.summary}"
    if group.code:
        said += f" ({group.code} {group.title})"
    if group.where:
        said += f", {group.where}"
    return said


def _incidents(folder: Path) -> Section | None:
    """Which bad steps are kept on disk, and which of them can be run again."""
    kept = sorted(folder.glob("**/incidents/*/capsule"))
    if not kept:
        return None
    good = []
    lines = []
    for capsule in kept:
        try:
            check_capsule(capsule)
            good.append(capsule)
        except CapsuleError as fault:
            lines.append(str(fault))
    head = f"{count(len(kept), 'bad step')} kept by all runs here, {len(good)} can be replayed"
    commands = [f"stepguard replay {shlex.quote(str(capsule))}" for capsule in good[-1:]]
    return Section(
        title="capsules",
        status="warning" if lines else "fine",
        lines=(head, *lines[:MOST_SHOWN]),
        commands=tuple(commands),
    )


def _with_command(advice: Section, command: str, *lines: str) -> Section:
    return replace(
        advice,
        status="warning",
        lines=(*advice.lines, *lines),
        commands=(*advice.commands, command),
    )


def best_of(found: Verification) -> Verification | None:
    """The good checkpoint with the highest step; without steps, the one written last.

    Where a `last-good` beside it names another good one, that one: after a rewind, steps count
    again from a lower number. A diverged one is not good.
    """

    def newness(leaf: Verification) -> tuple[int, float]:
        step = -1
        if leaf.step is not None:
            step = leaf.step
        return step, Path(leaf.path).stat().st_mtime

    good = [leaf for leaf in found.leaves if leaf.ok and leaf.tensors]
    newest = max(good, key=newness, default=None)
    if newest is None:
        return None
    named = _last_good(Path(newest.path).parent)
    return next((leaf for leaf in good if Path(leaf.path) == named), newest)


def _last_good(folder: Path) -> Path | None:
    try:
        return read_pointer(folder)
    except StoreError:
        return None


def _why_best(found: Verification, best: Verification) -> str:
    why = "the newest one that is whole and finite"
    if Path(best.path) == _last_good(Path(best.path).parent):
        why = "last-good, the newest one that has proved good"
    newer = [leaf for leaf in found.leaves if leaf.diverged and (leaf.step or 0) > (best.step or 0)]
    return f"{why}; {count(len(newer), 'newer one')} diverged" if newer else why
