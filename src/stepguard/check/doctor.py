"""The examination of `stepguard doctor`: what a run's folder holds, and what to do next.

Capsules and checkpoints are read from the folder; configuration, fresh model and watched values are
examined where they are given. Configuration, model and forward pass are judged by the items of
`stepguard check`, the checkpoints by `stepguard verify`.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from torch import nn

from stepguard._errors import CapsuleError, ConfigError, StoreError
from stepguard.check.inspection import CheckContext, Inspection, nonfinite_outputs, trace_step
from stepguard.check.items_step import floating_tensors, judge_step
from stepguard.check.preflight import call_build, run_item
from stepguard.check.settings import as_number, flat, read_settings
from stepguard.check.subject import FrameworkContext, Subject, subject_of
from stepguard.check.verify import Plan
from stepguard.check.verify import check_path as verify
from stepguard.checkpoints.seal import read_pointer
from stepguard.records.checks import Status, Verification
from stepguard.records.incident import Examination, Section, SectionStatus, not_checked
from stepguard.report.phrases import count, first_few, size
from stepguard.state.capsule import check_capsule, import_function, importable

LIMIT = 1.0
"""Above this a gate no longer damps what it multiplies."""
MOST_SHOWN = 8
STATUSES: dict[Status, SectionStatus] = {
    "pass": "fine",
    "not_applicable": "fine",
    "warn": "warning",
    "fail": "failed",
    "not_checked": "not checked",
}


def examine(
    folder: Path,
    *,
    config: Path | None,
    build: str | None,
    watch: Sequence[str],
    plan: Plan | None = None,
    progress: Callable[[int], None] | None = None,
    exclude: Collection[str] = (),
    journal: Section | None = None,
) -> Examination:
    """Say everything that can be said about the run in this folder.

    Folders named in `exclude` hold checkpoints that were moved out of the way. `journal` is the
    section about the run's journal, for those who read it.
    """
    # Before the checkpoints, which may take minutes to read.
    settings = {} if config is None else read_settings(config)

    def watched(name: str) -> bool:
        return any(fnmatch(name.lower(), pattern.lower()) for pattern in watch)

    found = verify(folder, plan=plan, progress=progress, watch=watched, exclude=exclude)
    sections = [_checkpoints(folder, found), journal, _capsules(folder)]
    if config is not None:
        sections.insert(0, _configuration(config, settings, best_of(found)))
    ranges = {}
    for leaf in found.leaves:
        # a gate's moments and step count in the optimizer are not the gate
        ranges[leaf.path] = [(t.name, t.low, t.high) for t in leaf.watched if t.role != "optimizer"]
    if build is not None:
        subject, fault = _built(build)
        sections += [_fresh_model(subject, fault), _forward_pass(subject)]
        tensors = floating_tensors(subject.model) if subject.model is not None else {}
        ranges["fresh model"] = [
            (name, float(values.min()), float(values.max()))
            for name, values in tensors.items()
            if watched(name)
        ]
    if watch:
        sections.append(_watched_values(ranges, watch))
    sections.append(_recommendations(folder, found))
    return Examination(path=str(folder), sections=tuple(filter(None, sections)))


def _configuration(file: Path, settings: dict[str, Any], best: Verification | None) -> Section:
    """Judge the file by the items of `check`, against the checkpoint to resume from."""
    shown = [f"{leaf.key} = {leaf.value}" for leaf in flat(settings) if leaf.means("shown")]
    lines = [", ".join(shown) or f"{file.name} names no known setting"]
    status: SectionStatus = "fine"
    run = Inspection(
        Subject(config=settings), CheckContext(Path.cwd(), config_file=file), verified=best
    )
    for name in ("config.types", "config.values", "lr.checkpoint"):
        outcome = run_item(name, run)
        if outcome.status in ("fail", "warn"):
            lines += [*outcome.evidence, f"fix: {outcome.fix}"]
            # Many programs convert what they read, so a number in quotes does not stop a run.
            if name != "config.types":
                status = "failed"
            elif status == "fine":
                status = "warning"
    rates = [leaf for leaf in flat(settings) if leaf.means("rate")]
    unusable = [str(leaf) for leaf in rates if as_number(leaf.value) is None]
    if unusable:
        status = "failed"
        lines.append(f"{', '.join(unusable)}: not a positive number")
    return Section(title="configuration", status=status, lines=tuple(lines))


def _checkpoints(folder: Path, found: Verification) -> Section:
    if not found.leaves:
        return not_checked("checkpoints", f"no checkpoint below {folder}")
    bad = [leaf for leaf in found.leaves if leaf.corrupt]
    diverged = sum(leaf.diverged and not leaf.corrupt for leaf in found.leaves)
    counts = f"{len(found.leaves) - len(bad) - diverged} good, {len(bad)} corrupt"
    if diverged:
        counts += f", {diverged} diverged"
    lines = [f"{count(len(found.leaves), 'checkpoint')}, {counts}, {size(found.bytes)}"]
    for leaf in bad[:MOST_SHOWN]:
        first = leaf.errors[0]
        where = f"{first.tensor} ({first.role}): " if first.tensor and first.role else ""
        lines.append(f"{leaf.path}: {where}{first.detail}")
    if len(bad) > MOST_SHOWN:
        lines.append(f"and {len(bad) - MOST_SHOWN} more")
    status: SectionStatus = "warning" if diverged or found.warnings else "fine"
    if found.warnings:
        lines.append(
            f"{count(len(found.warnings), 'warning')}; `stepguard verify {folder}` lists them"
        )
    if found.corrupt:
        status = "corrupt"
    return Section(title="checkpoints", status=status, lines=tuple(lines))


def _capsules(folder: Path) -> Section | None:
    """Which bad steps are kept on disk, and which of them can be run again."""
    kept = sorted(folder.glob("**/incidents/*/capsule"))
    if not kept:
        return None
    commands: list[str] = []
    lines = []
    for capsule in kept:
        try:
            check_capsule(capsule)
            commands.append(f"stepguard replay {shlex.quote(str(capsule))}")
        except CapsuleError as fault:
            lines.append(str(fault))
    head = f"{count(len(kept), 'bad step')} kept by all runs here, {len(commands)} can be replayed"
    return Section(
        title="capsules",
        status="warning" if lines else "fine",
        lines=(head, *lines[:MOST_SHOWN]),
        commands=tuple(commands[-1:]),
    )


def _built(build: str) -> tuple[Subject, str]:
    """A model, (model, inputs), or whatever `check` takes; and what the build function raised."""
    with importable():
        function = import_function(build, ConfigError)
        try:
            built = call_build(function, build)
            if isinstance(built, nn.Module):
                return Subject(model=built), ""
            if isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], nn.Module):
                return Subject(model=built[0], batch=built[1]), ""
            return subject_of(built, build), ""
        except ConfigError as fault:
            return Subject(), str(fault)


def _fresh_model(subject: Subject, fault: str) -> Section:
    """Are the first values of the model finite?"""
    if fault:
        return Section(title="fresh model", status="failed", lines=(fault,))
    outcome = run_item("model.stored_finite", Inspection(subject, CheckContext(Path.cwd())))
    said = f"{type(subject.model).__name__}: {', '.join(outcome.evidence)}"
    return Section(title="fresh model", status=STATUSES[outcome.status], lines=(said,))


def _forward_pass(subject: Subject) -> Section:
    """Call the model in evaluation mode; name the first module whose output is not finite."""
    model, inputs = subject.model, subject.batch
    if model is None or any(parameter.is_meta for parameter in model.parameters()):
        return not_checked("forward pass", "no model with weights was given")
    # Lightning keeps an example under the first name, transformers under the second.
    for name in ("example_input_array", "dummy_inputs"):
        inputs = getattr(model, name, None) if inputs is None else inputs
    if inputs is None:
        return not_checked(
            "forward pass",
            "let the build function return (model, inputs), or give the model an "
            "`example_input_array`",
        )
    bad: list[str] = []
    names = {module: name for name, module in model.named_modules()}

    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        if nonfinite_outputs(output):
            bad.append(names[module] or "the model itself")

    handles = [module.register_forward_hook(hook) for module in names]
    model.eval()
    try:
        step = trace_step(Subject(model=model, batch=inputs), FrameworkContext(), inputs)
    finally:
        for handle in handles:
            handle.remove()
    answer = judge_step(step)
    said = ", ".join(answer.evidence) + "".join(f"; first in {name}" for name in bad[:1])
    return Section(title="forward pass", status=STATUSES[answer.status], lines=(said,))


def _watched_values(
    ranges: dict[str, list[tuple[str, float, float]]], watch: Sequence[str]
) -> Section:
    """A line for each checkpoint, and in it the largest values first."""
    title = "watched values"

    def largest(value: tuple[str, float, float]) -> float:
        ends = max(abs(value[1]), abs(value[2]))
        return math.inf if math.isnan(ends) else ends

    lines = {}
    values = [value for found in ranges.values() for value in found]
    for source, found in ranges.items():
        said = []
        for name, low, high in sorted(found, key=largest, reverse=True):
            said.append(
                f"{name} = {low:.4g}" if low == high else f"{name} = {low:.4g} to {high:.4g}"
            )
        if said:
            lines[f"{source}: {first_few(said, 2 * MOST_SHOWN)}"] = max(map(largest, found))
    if not lines:
        wanted = " or ".join(watch)
        return not_checked(
            title, f"no tensor is named {wanted}; choose others with --watch PATTERN"
        )
    shown = sorted(lines, key=lambda line: lines[line], reverse=True)[:MOST_SHOWN]
    if len(lines) > MOST_SHOWN:
        shown.append(f"and {len(lines) - MOST_SHOWN} more checkpoints")
    large = sum(largest(value) > LIMIT for value in values)
    if not large:
        head = f"{count(len(values), 'value')}, none above {LIMIT:g}"
        return Section(title=title, status="fine", lines=(head, *shown))
    head = f"{large} of {len(values)} above {LIMIT:g}: such a gate amplifies what it multiplies"
    return Section(title=title, status="warning", lines=(head, *shown))


def _recommendations(folder: Path, found: Verification) -> Section:
    lines = []
    best = best_of(found)
    if best is not None:
        at = "" if best.step is None else f" (step {best.step:,})"
        why = "the newest one that is whole and finite"
        if Path(best.path) == _last_good(Path(best.path).parent):
            why = "last-good, the newest one that has proved good"
        newer = sum(leaf.diverged and (leaf.step or 0) > (best.step or 0) for leaf in found.leaves)
        if newer:
            why += f"; {count(newer, 'newer one')} diverged"
        lines.append(f"resume from {best.path}{at}: {why}")
    elif any(leaf.diverged for leaf in found.leaves):
        lines.append("start afresh: every checkpoint that is whole and finite has diverged")
    elif found.leaves:
        lines.append("start afresh: no checkpoint is left that is whole and finite")
    else:
        lines.append("there is no checkpoint to resume from")
    bad = sum(leaf.corrupt for leaf in found.leaves)
    if not bad:
        return Section(title="recommendations", status="fine", lines=tuple(lines))
    lines.append(
        f"move {count(bad, 'corrupt checkpoint')} out of the way, so that nothing resumes from "
        "there:"
    )
    command = f"stepguard quarantine {shlex.quote(str(folder))}"
    return Section(
        title="recommendations", status="warning", lines=tuple(lines), commands=(command,)
    )


def best_of(found: Verification) -> Verification | None:
    """The good checkpoint with the highest step; without steps, the one written last.

    Where a `last-good` beside it names another good one, that one: after a rewind, steps count
    again from a lower number. A diverged one is not good.
    """

    def newness(leaf: Verification) -> tuple[int, float]:
        step = -1 if leaf.step is None else leaf.step
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
