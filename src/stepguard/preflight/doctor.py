"""The examination of `stepguard doctor`: six sections on a run that will not train.

Configuration, model and forward pass are judged by the items of `stepguard check`, the checkpoints
by `stepguard verify`, the journal by `stepguard report`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from torch import nn

from stepguard._errors import ConfigError, JournalError
from stepguard.journal import read_run
from stepguard.preflight.framework import Framework
from stepguard.preflight.inspection import Inspection, Invocation
from stepguard.preflight.items import config as config_items
from stepguard.preflight.items import lr as lr_items
from stepguard.preflight.items import model as model_items
from stepguard.preflight.run import run_item
from stepguard.preflight.settings.files import read_settings
from stepguard.preflight.settings.keys import as_number, flat, last_part, names
from stepguard.preflight.settings.rates import RATE_NAMES, rate_settings
from stepguard.preflight.subject import Subject, subject_of
from stepguard.preflight.target import call_build
from stepguard.preflight.traced_step import nonfinite_outputs, trace_step
from stepguard.records.examination import Examination, Section, SectionStatus
from stepguard.records.preflight import Status
from stepguard.records.verification import Verification
from stepguard.report.health import concerns
from stepguard.report.live_view import judge_run
from stepguard.report.phrases import count, size
from stepguard.state.importing import import_function, importable
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
STATUSES: dict[Status, SectionStatus] = {
    "pass": "fine",
    "not_applicable": "fine",
    "warn": "warning",
    "fail": "failed",
    "not_checked": "not checked",
}
GIVE_BUILD = "not checked: give --build module:function"
GIVE_INPUTS = (
    "not checked: let the build function return (model, inputs), or give the model an "
    "`example_input_array`"
)


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
    settings = None
    if config is not None:
        settings = read_settings(config)

    def watched(name: str) -> bool:
        return any(fnmatch(name.lower(), pattern.lower()) for pattern in watch)

    found = verify(folder, plan=plan, progress=progress, watch=watched)
    subject: Subject | Section | None = None
    if build is not None:
        subject = _built(build)
    sections = [
        _configuration(config, settings, best_of(found)),
        _checkpoints(folder, found),
        _fresh_model(subject),
        _forward_pass(subject),
        _watched_values(_ranges(found, subject, watched), watch),
    ]
    last = _with_journal(folder, _recommendations(folder, found, sections))
    return Examination(path=str(folder), sections=(*sections, last))


def _configuration(
    file: Path | None, settings: dict[str, Any] | None, best: Verification | None
) -> Section:
    if file is None or settings is None:
        return _not_checked("configuration", "not checked: give --config FILE")
    shown = []
    for leaf in flat(settings):
        if last_part(leaf.key) in SHOWN:
            shown.append(f"{leaf.key} = {leaf.value}")
    lines = [", ".join(shown) or f"{file.name} names no known setting"]
    status: SectionStatus = "fine"
    checkpoint = None
    if best is not None:
        checkpoint = best.path
    subject = Subject(config=settings, checkpoint=checkpoint)
    run = Inspection(subject, Invocation(Path.cwd(), file), verified=best)
    types = run_item(config_items.types, run)
    if types.status == "fail":
        # Many programs convert what they read, so this alone does not stop a run.
        status = "warning"
        lines += [*types.evidence, f"fix: {types.fix}"]
    for leaf in rate_settings(settings):
        if as_number(leaf.value) is None:
            status = "failed"
            lines.append(f"{leaf} is not a positive number")
    for item in (config_items.values, lr_items.checkpoint):
        outcome = run_item(item, run)
        if outcome.status == "fail":
            status = "failed"
            lines += [*outcome.evidence, f"fix: {outcome.fix}"]
    return Section(title="configuration", status=status, lines=tuple(lines))


def _checkpoints(folder: Path, found: Verification) -> Section:
    if not found.leaves:
        return _not_checked("checkpoints", f"no checkpoint below {folder}")
    bad = [leaf for leaf in found.leaves if leaf.corrupt]
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


def _built(build: str) -> Subject | Section:
    """Call the build function; what goes wrong in it is the section on the fresh model."""
    with importable():
        function = import_function(build, ConfigError)
        try:
            built = call_build(function, build)
            if isinstance(built, nn.Module):
                return Subject(model=built)
            if isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], nn.Module):
                return Subject(model=built[0], batch=built[1])
            return subject_of(built, build)
        except ConfigError as fault:
            return Section(title="fresh model", status="failed", lines=(str(fault),))


def _fresh_model(subject: Subject | Section | None) -> Section:
    if subject is None:
        return _not_checked("fresh model", GIVE_BUILD)
    if isinstance(subject, Section):
        return subject
    outcome = run_item(model_items.stored_finite, Inspection(subject, Invocation(Path.cwd())))
    lines = [f"{type(subject.model).__name__}: {outcome.evidence[0]}", *outcome.evidence[1:]]
    return Section(title="fresh model", status=STATUSES[outcome.status], lines=tuple(lines))


def _forward_pass(subject: Subject | Section | None) -> Section:
    """One call in evaluation mode; names the first module whose output is not finite."""
    if subject is None:
        return _not_checked("forward pass", GIVE_BUILD)
    if isinstance(subject, Section) or subject.model is None:
        return _not_checked("forward pass", "not checked: there is no model")
    model = subject.model
    if any(parameter.is_meta for parameter in model.parameters()):
        return _not_checked("forward pass", "not checked: the weights are on the meta device")
    inputs = subject.batch
    if inputs is None:
        # Lightning keeps an example under the first name, transformers under the second.
        inputs = getattr(model, "example_input_array", None)
    if inputs is None:
        inputs = getattr(model, "dummy_inputs", None)
    if inputs is None:
        return _not_checked("forward pass", GIVE_INPUTS)
    model.eval()
    with _first_bad_module(model) as found:
        step = trace_step(Subject(model=model, batch=inputs), Framework(), inputs)
    answer = model_items.judge_step(step)
    said = ", ".join(answer.evidence)
    if found:
        said += f"; first in {found[0]}"
    return Section(title="forward pass", status=STATUSES[answer.status], lines=(said,))


@contextmanager
def _first_bad_module(model: nn.Module) -> Iterator[list[str]]:
    """Collect the names of modules whose output is not finite, in the order of their calls."""
    bad: list[str] = []
    module_names = {module: name for name, module in model.named_modules()}

    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        if nonfinite_outputs(output):
            bad.append(module_names[module] or "the model itself")

    handles = [module.register_forward_hook(hook) for module in module_names]
    try:
        yield bad
    finally:
        for handle in handles:
            handle.remove()


def _ranges(
    found: Verification, subject: Subject | Section | None, watched: Callable[[str], bool]
) -> list[tuple[str, float, float]]:
    """Name and range of every watched tensor, in all checkpoints and in the fresh model."""
    rows = []
    for leaf in found.leaves:
        for tensor in leaf.watched:
            rows.append((f"{leaf.path}: {tensor.name}", tensor.low, tensor.high))
    if isinstance(subject, Subject) and subject.model is not None:
        for name, values in model_items.floating_tensors(subject.model).items():
            if watched(name):
                rows.append((f"fresh model: {name}", float(values.min()), float(values.max())))
    return rows


def _watched_values(rows: list[tuple[str, float, float]], watch: Sequence[str]) -> Section:
    title = "watched values"
    if not rows:
        wanted = " or ".join(watch)
        return _not_checked(
            title, f"no tensor is named {wanted}; choose others with --watch PATTERN"
        )
    large = [row for row in rows if max(abs(row[1]), abs(row[2])) > LIMIT]
    status: SectionStatus = "fine"
    lines = [f"{count(len(rows), 'value')}, none above {LIMIT:g}"]
    shown = rows[-MOST_SHOWN:]
    if large:
        status = "warning"
        lines = [
            f"{len(large)} of {len(rows)} above {LIMIT:g}: such a gate amplifies what it multiplies"
        ]
        shown = large[:MOST_SHOWN]
    for name, low, high in shown:
        span = f"{low:.4g}"
        if low != high:
            span += f" to {high:.4g}"
        lines.append(f"{name} = {span}")
    return Section(title=title, status=status, lines=tuple(lines))


def _recommendations(folder: Path, found: Verification, sections: Sequence[Section]) -> Section:
    lines: list[str] = []
    best = best_of(found)
    if best is not None:
        at = ""
        if best.step is not None:
            at = f" (step {best.step:,})"
        lines.append(f"resume from {best.path}{at}: the newest one that is whole and finite")
    elif found.leaves:
        lines.append("start afresh: no checkpoint is left that is whole and finite")
    missing = [section.title for section in sections if section.status == "not checked"]
    if missing:
        lines.append(f"not checked: {', '.join(missing)}")
    bad = [leaf for leaf in found.leaves if leaf.corrupt]
    if not bad:
        lines = lines or ["nothing to do"]
        return Section(title="recommendations", status="fine", lines=tuple(lines))
    lines.append(
        f"move {count(len(bad), 'corrupt checkpoint')} out of the way, so that nothing resumes "
        "from there:"
    )
    command = f"stepguard quarantine {shlex.quote(str(folder))}"
    return Section(
        title="recommendations", status="warning", lines=tuple(lines), commands=(command,)
    )


def _with_journal(folder: Path, last: Section) -> Section:
    """Add what the run's journal holds against it: whole checkpoints say nothing of that."""
    if not (folder / "journal.jsonl").is_file():
        return last
    try:
        record = read_run(folder)
    except (JournalError, OSError, KeyError, ValueError) as fault:
        said = f"the journal cannot be read: {str(fault).splitlines()[0]}"
        return replace(last, status="warning", lines=(*last.lines, said))
    if record.torn and not (record.header or record.steps or record.incidents or record.notes):
        said = f"the journal cannot be read: {record.path} holds no line of stepguard"
        return replace(last, status="warning", lines=(*last.lines, said))
    verdict = judge_run(record, (), None, now=True)
    if verdict in ("healthy", "waiting") and not record.incidents:
        return last
    said = (
        f"its journal: {verdict}, {count(len(record.incidents), 'incident')} in "
        f"{count(len(record.steps), 'step')}"
    )
    lines = (*last.lines, said, *(concern.text for concern in concerns(record)))
    command = f"stepguard report {shlex.quote(str(folder))}"
    return replace(last, status="warning", lines=lines, commands=(*last.commands, command))


def best_of(found: Verification) -> Verification | None:
    """The good checkpoint with the highest step; without steps, the one written last."""

    def age(leaf: Verification) -> tuple[int, float]:
        step = leaf.step
        if step is None:
            step = -1
        path = Path(leaf.path)
        return step, path.stat().st_mtime if path.exists() else 0.0

    good = [leaf for leaf in found.leaves if leaf.ok and leaf.tensors]
    return max(good, key=age, default=None)


def _not_checked(title: str, why: str) -> Section:
    return Section(title=title, status="not checked", lines=(why,))
