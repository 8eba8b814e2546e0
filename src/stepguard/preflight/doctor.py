"""The examination of `stepguard doctor`: six sections on a run that will not train.

Configuration, model and forward pass are judged by the items of `stepguard check`, the checkpoints
by `stepguard verify`, the journal by `stepguard report`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from torch import nn

from stepguard._errors import JournalError
from stepguard.preflight.answers import listed
from stepguard.preflight.fresh_model import FreshModel
from stepguard.preflight.inspection import CheckContext, Inspection
from stepguard.preflight.items import config as config_items
from stepguard.preflight.items import lr as lr_items
from stepguard.preflight.items.model import floating_tensors
from stepguard.preflight.run import run_item
from stepguard.preflight.settings.keys import as_number, flat, last_part, names
from stepguard.preflight.settings.rates import RATE_NAMES, rate_settings
from stepguard.preflight.settings.settings_file import read_settings
from stepguard.preflight.subject import Subject
from stepguard.records.examination import Examination, Section, SectionStatus, not_checked
from stepguard.records.verification import Verification
from stepguard.report.health import concerns
from stepguard.report.live_view import judge_run
from stepguard.report.phrases import count, size
from stepguard.report.story import read_story
from stepguard.verification import Plan
from stepguard.verification import check_path as verify

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
) -> Examination:
    """Say everything that can be said about the run in this folder."""
    settings = {}
    # Before the checkpoints, which may take minutes to read.
    if config is not None:
        settings = read_settings(config)

    def watched(name: str) -> bool:
        return any(fnmatch(name.lower(), pattern.lower()) for pattern in watch)

    found = verify(folder, plan=plan, progress=progress, watch=watched)
    configuration = not_checked("configuration", "not checked: give --config FILE")
    if config is not None:
        configuration = _configuration(config, settings, best_of(found))
    fresh = FreshModel(build)
    sections = (
        configuration,
        _checkpoints(folder, found),
        fresh.values_section(),
        fresh.forward_section(),
        _watched_values(_watched_ranges(found, fresh.model, watched), watch),
    )
    last = _with_journal(folder, _recommendations(folder, found, sections))
    return Examination(path=str(folder), sections=(*sections, last))


def _configuration(file: Path, settings: dict[str, Any], best: Verification | None) -> Section:
    """Judge the file by the items of `check`, against the checkpoint to resume from."""
    shown = []
    for leaf in flat(settings):
        if last_part(leaf.key) in SHOWN:
            shown.append(f"{leaf.key} = {leaf.value}")
    lines = [", ".join(shown) or f"{file.name} names no known setting"]
    status: SectionStatus = "fine"
    run = Inspection(Subject(config=settings), CheckContext(Path.cwd(), file), verified=best)
    for item in (config_items.types, config_items.values, lr_items.checkpoint):
        outcome = run_item(item, run)
        if outcome.status != "fail":
            continue
        lines += [*outcome.evidence, f"fix: {outcome.fix}"]
        status = "failed"
        # Many programs convert what they read, so a number in quotes does not stop a run.
        if item is config_items.types:
            status = "warning"
    unusable = [leaf for leaf in rate_settings(settings) if as_number(leaf.value) is None]
    if unusable:
        status = "failed"
        lines.append(f"{', '.join(map(str, unusable))}: not a positive number")
    return Section(title="configuration", status=status, lines=tuple(lines))


def _checkpoints(folder: Path, found: Verification) -> Section:
    if not found.leaves:
        return not_checked("checkpoints", f"no checkpoint below {folder}")
    bad = _corrupt(found)
    lines = [
        f"{count(len(found.leaves), 'checkpoint')}, {len(found.leaves) - len(bad)} good, "
        f"{len(bad)} corrupt, {size(found.bytes)}"
    ]
    for leaf in bad[:MOST_SHOWN]:
        first = leaf.errors[0]
        where = ""
        if first.tensor and first.role:
            where = f"{first.tensor} ({first.role}): "
        lines.append(f"{leaf.path}: {where}{first.detail}")
    if len(bad) > MOST_SHOWN:
        lines.append(f"and {len(bad) - MOST_SHOWN} more")
    status: SectionStatus = "fine"
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
) -> list[tuple[str, float, float]]:
    """Name, lowest and highest value of every watched tensor of checkpoints and fresh model."""
    ranges = []
    for leaf in found.leaves:
        for tensor in leaf.watched:
            ranges.append((f"{leaf.path}: {tensor.name}", tensor.low, tensor.high))
    if model is not None:
        for name, values in floating_tensors(model).items():
            if watched(name):
                ranges.append((f"fresh model: {name}", float(values.min()), float(values.max())))
    return ranges


def _watched_values(ranges: list[tuple[str, float, float]], watch: Sequence[str]) -> Section:
    title = "watched values"
    if not ranges:
        wanted = " or ".join(watch)
        return not_checked(
            title, f"no tensor is named {wanted}; choose others with --watch PATTERN"
        )
    lines = []
    large = []
    for name, low, high in ranges:
        span = f"{low:.4g}"
        if low != high:
            span += f" to {high:.4g}"
        lines.append(f"{name} = {span}")
        if max(abs(low), abs(high)) > LIMIT:
            large.append(lines[-1])
    if not large:
        head = f"{count(len(lines), 'value')}, none above {LIMIT:g}"
        return Section(title=title, status="fine", lines=(head, *lines[-MOST_SHOWN:]))
    head = f"{len(large)} of {len(lines)} above {LIMIT:g}: such a gate amplifies what it multiplies"
    return Section(title=title, status="warning", lines=(head, *large[:MOST_SHOWN]))


def _recommendations(folder: Path, found: Verification, sections: Sequence[Section]) -> Section:
    lines = []
    best = best_of(found)
    if best is not None:
        at = ""
        if best.step is not None:
            at = f" (step {best.step:,})"
        lines.append(f"resume from {best.path}{at}: the newest one that is whole and finite")
    elif found.leaves:
        lines.append("start afresh: no checkpoint is left that is whole and finite")
    missing = [section.title for section in sections if section.status == "not checked"]
    lines += listed("not checked", missing, len(missing))
    advice = Section(title="recommendations", status="fine", lines=tuple(lines))
    bad = _corrupt(found)
    if bad:
        move = (
            f"move {count(len(bad), 'corrupt checkpoint')} out of the way, so that nothing resumes "
            "from there:"
        )
        return _with_command(advice, f"stepguard quarantine {shlex.quote(str(folder))}", move)
    if not lines:
        return replace(advice, lines=("nothing to do",))
    return advice


def _with_journal(folder: Path, advice: Section) -> Section:
    """Add what the run's journal holds against it: whole checkpoints say nothing of that."""
    if not (folder / "journal.jsonl").is_file():
        return advice
    try:
        run = read_story(folder).latest
    except (JournalError, OSError) as fault:
        said = f"the journal cannot be read: {str(fault).splitlines()[0]}"
        return replace(advice, status="warning", lines=(*advice.lines, said))
    verdict = judge_run(run, (), None, now=True)
    # A killed run tears the last line; a file of which no line can be read is something else.
    readable = len(run.steps) > 0 or not run.torn
    if verdict in ("healthy", "waiting") and not run.incidents and readable:
        return advice
    said = (
        f"its journal: {verdict}, {count(len(run.incidents), 'incident')} in "
        f"{count(len(run.steps), 'step')}"
    )
    if run.torn:
        said += f", {count(run.torn, 'line')} cannot be read"
    told = [concern.text for concern in concerns(run)]
    return _with_command(advice, f"stepguard report {shlex.quote(str(folder))}", said, *told)


def _with_command(advice: Section, command: str, *lines: str) -> Section:
    return replace(
        advice,
        status="warning",
        lines=(*advice.lines, *lines),
        commands=(*advice.commands, command),
    )


def best_of(found: Verification) -> Verification | None:
    """The good checkpoint with the highest step; without steps, the one written last."""

    def newness(leaf: Verification) -> tuple[int, float]:
        step = -1
        if leaf.step is not None:
            step = leaf.step
        return step, Path(leaf.path).stat().st_mtime

    good = [leaf for leaf in found.leaves if leaf.ok and leaf.tensors]
    return max(good, key=newness, default=None)
