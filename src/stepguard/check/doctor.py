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

from torch import Tensor, nn

from stepguard._errors import CapsuleError, ConfigError, StoreError
from stepguard.check.inspection import Inspection, nonfinite_outputs, trace_step
from stepguard.check.items_step import floating_tensors, judge_step
from stepguard.check.preflight import call_build, run_item
from stepguard.check.settings import as_number, flat, read_settings
from stepguard.check.subject import FrameworkContext, Subject, subject_of
from stepguard.check.verify import Plan
from stepguard.check.verify import check_path as verify
from stepguard.checkpoints.seal import read_pointer
from stepguard.records.checks import Status, Verification
from stepguard.records.incident import Examination, Section, SectionStatus, new_section
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
    settings = None if config is None else read_settings(config)

    def watched(name: str) -> bool:
        return any(fnmatch(name.lower(), pattern.lower()) for pattern in watch)

    found = verify(folder, plan=plan, progress=progress, watch=watched, exclude=exclude)
    sections: list[Section | None] = []
    if settings is not None:
        sections.append(_configuration(settings, best_of(found)))
    sections += [_checkpoints(folder, found), journal, _capsules(folder)]
    ranges = {}
    for leaf in found.leaves:
        # a gate's moments and step count in the optimizer are not the gate
        ranges[leaf.path] = [(t.name, t.low, t.high) for t in leaf.watched if t.role != "optimizer"]
    if build is not None:
        fresh, tensors = _fresh_model(build)
        sections += fresh
        ranges["fresh model"] = [
            (name, float(values.min()), float(values.max()))
            for name, values in tensors.items()
            if watched(name)
        ]
    if watch:
        sections.append(_watched_values(ranges, watch))
    sections.append(_recommendations(folder, found))
    return Examination(path=str(folder), sections=tuple(filter(None, sections)))


def _configuration(settings: dict[str, Any], best: Verification | None) -> Section:
    """Judge it by the items of `check`, against the checkpoint to resume from."""
    shown = [f"{leaf.key} = {leaf.value}" for leaf in flat(settings) if leaf.means("shown")]
    lines = [", ".join(shown) or "no known setting is named"]
    run = Inspection(Subject(config=settings), verified=best)
    statuses = set()
    for name in ("config.types", "config.values", "lr.checkpoint"):
        outcome = run_item(name, run)
        if outcome.status in ("fail", "warn"):
            lines += [*outcome.evidence, f"fix: {outcome.fix}"]
            # Many programs convert what they read, so a number in quotes does not stop a run.
            statuses.add("warning" if name == "config.types" else "failed")
    for leaf in flat(settings):
        if leaf.means("lr") and as_number(leaf.value) is None:
            statuses.add("failed")
            lines.append(f"{leaf}: not a positive number")
    status: SectionStatus = "warning" if statuses else "fine"
    if "failed" in statuses:
        status = "failed"
    return new_section("configuration", status, *lines)


def _checkpoints(folder: Path, found: Verification) -> Section:
    if not found.leaves:
        return new_section("checkpoints", "not checked", f"no checkpoint below {folder}")
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
    return new_section("checkpoints", status, *lines)


def _capsules(folder: Path) -> Section | None:
    """Which bad steps are kept on disk, and which of them can be run again."""
    kept = sorted(folder.glob("**/incidents/*/capsule"))
    if not kept:
        return None
    command = ""
    faults = []
    for capsule in kept:
        try:
            check_capsule(capsule)
            command = f"stepguard replay {shlex.quote(str(capsule))}"
        except CapsuleError as fault:
            faults.append(str(fault))
    good = len(kept) - len(faults)
    head = f"{count(len(kept), 'bad step')} recorded by all runs here; {good} can be replayed"
    status: SectionStatus = "fine"
    if faults:
        status = "warning"
    return new_section("capsules", status, head, *faults[:MOST_SHOWN], command=command)


def _fresh_model(build: str) -> tuple[list[Section], dict[str, Tensor]]:
    """Are the first values of the model finite, and what one call in evaluation mode gives?"""
    with importable():
        function = import_function(build, ConfigError)
        try:
            subject = subject_of(call_build(function, build), build)
        except ConfigError as fault:
            missing = new_section("forward pass", "not checked", "no model with weights was given")
            return [new_section("fresh model", "failed", str(fault)), missing], {}
    model = subject.model
    run = Inspection(subject)
    values = run_item("model.stored_finite", run)
    said = f"{type(model).__name__}: {', '.join(values.evidence)}"
    sections = [new_section("fresh model", STATUSES[values.status], said)]
    if model is None or subject.batch is None or run.device.type == "meta":
        why = "let the build function return (model, inputs), with weights"
        sections.append(new_section("forward pass", "not checked", why))
        return sections, {} if model is None else floating_tensors(model)
    bad = []
    names = {module: name for name, module in model.named_modules()}

    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        if nonfinite_outputs(output):
            bad.append(names[module] or "the model itself")

    handles = [module.register_forward_hook(hook) for module in names]
    model.eval()
    try:
        alone = Subject(model=model, batch=subject.batch)
        answer = judge_step(trace_step(alone, FrameworkContext(), subject.batch))
    finally:
        for handle in handles:
            handle.remove()
    said = ", ".join(answer.evidence) + "".join(f"; first in {name}" for name in bad[:1])
    sections.append(new_section("forward pass", STATUSES[answer.status], said))
    return sections, floating_tensors(model)


def _watched_values(
    ranges: dict[str, list[tuple[str, float, float]]], watch: Sequence[str]
) -> Section:
    """A line for each checkpoint, and in it the largest values first."""
    title = "watched values"
    lines = []
    values = []
    for source, found in ranges.items():
        sized = []
        for name, low, high in found:
            # NaN is larger than anything.
            largest = math.inf if math.isnan(low + high) else max(abs(low), abs(high))
            span = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
            sized.append((largest, f"{name} = {span}"))
        sized.sort(reverse=True)
        values += [largest for largest, _ in sized]
        if sized:
            said = first_few((text for _, text in sized), 2 * MOST_SHOWN)
            lines.append((sized[0][0], f"{source}: {said}"))
    if not lines:
        why = f"no tensor is named {' or '.join(watch)}; choose others with --watch PATTERN"
        return new_section(title, "not checked", why)
    shown = [line for _, line in sorted(lines, reverse=True)[:MOST_SHOWN]]
    if len(lines) > MOST_SHOWN:
        shown.append(f"and {len(lines) - MOST_SHOWN} more checkpoints")
    large = sum(largest > LIMIT for largest in values)
    if not large:
        head = f"{count(len(values), 'value')}, none above {LIMIT:g}"
        return new_section(title, "fine", head, *shown)
    head = f"{large} of {len(values)} above {LIMIT:g}: such a gate amplifies what it multiplies"
    return new_section(title, "warning", head, *shown)


def _recommendations(folder: Path, found: Verification) -> Section:
    lines = []
    best = best_of(found)
    if best is not None:
        at = "" if best.step is None else f" (step {best.step:,})"
        why = "the newest complete and finite one"
        if Path(best.path) == _last_good(Path(best.path).parent):
            why = "last-good, the newest one that proved good"
        newer = sum(leaf.diverged and (leaf.step or 0) > (best.step or 0) for leaf in found.leaves)
        if newer:
            why += f"; {count(newer, 'newer one')} diverged"
        lines.append(f"resume from {best.path}{at}: {why}")
    elif any(leaf.diverged for leaf in found.leaves):
        lines.append("start over: every complete and finite checkpoint comes from a diverged run")
    elif found.leaves:
        lines.append("start over: no complete and finite checkpoint is left")
    else:
        lines.append("there is no checkpoint to resume from")
    bad = sum(leaf.corrupt for leaf in found.leaves)
    if not bad:
        return new_section("recommendations", "fine", *lines)
    lines.append(
        f"move {count(bad, 'corrupt checkpoint')} out of the way, so that nothing resumes "
        "from them:"
    )
    command = f"stepguard quarantine {shlex.quote(str(folder))}"
    return new_section("recommendations", "warning", *lines, command=command)


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
