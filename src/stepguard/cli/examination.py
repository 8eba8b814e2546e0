"""The six sections of `stepguard doctor`, each from the real thing: files, model, values."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from stepguard.cli.fresh_model import Fresh, build_fresh, forward
from stepguard.cli.settings_file import RATE_NAMES, as_number, is_rate, read_settings
from stepguard.records.examination import Examination, Section, SectionStatus
from stepguard.records.verification import Verification
from stepguard.report.phrases import count
from stepguard.report.verification import size

LIMIT = 1.0
"""Above this a gate no longer damps what it multiplies."""
SHOWN = (*RATE_NAMES, "batch_size", "grad_clip", "clip_norm", "max_grad_norm", "amp", "fp16", "bf16", "mixed_precision",
         "precision", "min_lr", "weight_decay", "optimizer", "scheduler", "model_type", "seed")  # fmt: skip
MOST_SHOWN = 8


def examine(
    folder: Path, *, config: Path | None, build: str | None, watch: Sequence[str]
) -> Examination:
    """Everything that can be said about the run in this folder."""
    settings = None if config is None else read_settings(config)
    checkpoints = _verified(folder, watch)
    fresh = None if build is None else build_fresh(build)
    sections = (
        _configuration(config, settings, checkpoints),
        _checkpoints(folder, checkpoints),
        _fresh_model(fresh),
        _forward(fresh),
        _watched(fresh, checkpoints, watch),
    )
    last = _recommendations(folder, checkpoints, sections)
    return Examination(path=str(folder), sections=(*sections, _with_journal(folder, last)))


def _with_journal(folder: Path, last: Section) -> Section:
    """What the journal of the run holds against it, where there is one: whole checkpoints say
    nothing of that.
    """
    from stepguard._errors import JournalError
    from stepguard.cli._run_folder import open_run
    from stepguard.report.health import concerns
    from stepguard.report.live_view import judge_run

    if not (folder / "journal.jsonl").is_file():
        return last
    try:
        record = open_run(folder)
    except JournalError as fault:
        return replace(
            last, status="warning", lines=(*last.lines, f"the journal cannot be read: {fault}")
        )
    verdict, told = judge_run(record, (), None, now=True), concerns(record)
    if verdict in ("healthy", "waiting") and not record.incidents:
        return last
    seen = (
        f"its journal: {verdict}, {count(len(record.incidents), 'incident')} in "
        f"{count(len(record.steps), 'step')}"
    )
    lines = (*last.lines, seen, *(concern.text for concern in told))
    command = f"stepguard report {shlex.quote(str(folder))}"
    return replace(last, status="warning", lines=lines, commands=(*last.commands, command))


def _verified(folder: Path, watch: Sequence[str]) -> Verification:
    from stepguard.cli._checkpoint_results import Bar
    from stepguard.verification import check_path as check

    def wanted(name: str) -> bool:
        return any(fnmatch(name.lower(), pattern.lower()) for pattern in watch)

    with Bar("verifying") as bar:
        return check(folder, plan=bar.plan, progress=bar.advance, watch=wanted)


def _configuration(
    config: Path | None, settings: dict[str, Any] | None, found: Verification
) -> Section:
    title = "configuration"
    if config is None or settings is None:
        return Section(
            title=title, status="not checked", lines=("not checked: give --config FILE",)
        )
    shown = {
        name: value for name, value in settings.items() if name.rpartition(".")[2].lower() in SHOWN
    }
    lines = [
        ", ".join(f"{name} = {value}" for name, value in shown.items())
        or f"{config.name} names no known setting"
    ]
    status: SectionStatus = "fine"
    rates = {name: as_number(value) for name, value in settings.items() if is_rate(name)}
    for name, value in settings.items():
        if is_rate(name) and isinstance(value, str) and as_number(value) is not None:
            status = "warning"
            lines.append(
                f"{name} is the text {value!r} to a YAML reader: write it with a point, "
                f"{as_number(value):.1e}"
            )
    bad = [
        name for name, rate in rates.items() if rate is None or not math.isfinite(rate) or rate <= 0
    ]
    if bad:
        return Section(
            title=title, status="failed", lines=(*lines, f"{', '.join(bad)} is no positive number")
        )
    other = _other_rate(found, [rate for rate in rates.values() if rate is not None])
    if other:
        return Section(title=title, status="failed", lines=(*lines, *other))
    return Section(title=title, status=status, lines=tuple(lines))


def _other_rate(found: Verification, rates: Sequence[float]) -> list[str]:
    """Does the newest good checkpoint carry a rate the configuration does not know?"""
    from stepguard.verification import with_lr

    best = best_of(found)
    if best is None or not rates:
        return []
    problems = [[p for p in with_lr(best, rate).problems if p.kind == "lr"] for rate in rates]
    return [f"{best.path}: {problems[0][0].detail}"] if all(problems) else []


def _checkpoints(folder: Path, found: Verification) -> Section:
    leaves = found.leaves
    if not leaves:
        return Section(
            title="checkpoints", status="not checked", lines=(f"no checkpoint below {folder}",)
        )
    bad = [leaf for leaf in leaves if leaf.corrupt]
    total = (
        f"{count(len(leaves), 'checkpoint')}, {len(leaves) - len(bad)} good, {len(bad)} "
        f"corrupt, {size(found.bytes)}"
    )
    lines = [total]
    for leaf in bad[:MOST_SHOWN]:
        first = next(problem for problem in leaf.errors if problem.kind != "lr")
        where = f"{first.tensor} ({first.role}): " if first.tensor and first.role else ""
        lines.append(f"{leaf.path}: {where}{first.detail}")
    if len(bad) > MOST_SHOWN:
        lines.append(f"and {len(bad) - MOST_SHOWN} more")
    status: SectionStatus = (
        "corrupt" if bad or found.corrupt else ("warning" if found.warnings else "fine")
    )
    if found.warnings:
        lines.append(
            f"{count(len(found.warnings), 'warning')}; `stepguard verify {folder}` lists them"
        )
    return Section(title="checkpoints", status=status, lines=tuple(lines))


def _fresh_model(fresh: Fresh | None) -> Section:
    title = "fresh model"
    if fresh is None:
        return Section(
            title=title, status="not checked", lines=("not checked: give --build module:function",)
        )
    if fresh.fault:
        return Section(title=title, status="failed", lines=(fresh.fault,))
    return Section(
        title=title, status="failed" if fresh.bad else "fine", lines=(fresh.summary, *fresh.bad)
    )


def _forward(fresh: Fresh | None) -> Section:
    title = "forward pass"
    if fresh is None or fresh.model is None:
        why = (
            "not checked: give --build module:function"
            if fresh is None
            else "not checked: there is no model"
        )
        return Section(title=title, status="not checked", lines=(why,))
    status, lines = forward(fresh)
    return Section(title=title, status=status, lines=lines)


def _watched(fresh: Fresh | None, found: Verification, watch: Sequence[str]) -> Section:
    title = "watched values"
    rows = [(leaf.path, w.name, w.low, w.high) for leaf in found.leaves for w in leaf.watched]
    rows += [
        ("fresh model", name, low, high)
        for name, low, high in (fresh.values(watch) if fresh else ())
    ]
    if not rows:
        none = f"no tensor is named {' or '.join(watch)}; choose others with --watch PATTERN"
        return Section(title=title, status="not checked", lines=(none,))
    large = [row for row in rows if max(abs(row[2]), abs(row[3])) > LIMIT]
    shown = large[:MOST_SHOWN] or rows[-MOST_SHOWN:]
    lines = tuple(f"{where}: {name} = {_range(low, high)}" for where, name, low, high in shown)
    if large:
        head = (
            f"{len(large)} of {len(rows)} above {LIMIT:g}: such a gate amplifies what it multiplies"
        )
        return Section(title=title, status="warning", lines=(head, *lines))
    return Section(
        title=title,
        status="fine",
        lines=(f"{count(len(rows), 'value')}, none above {LIMIT:g}", *lines),
    )


def _range(low: float, high: float) -> str:
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def _recommendations(folder: Path, found: Verification, sections: Sequence[Section]) -> Section:
    lines: list[str] = []
    bad = [leaf for leaf in found.leaves if leaf.corrupt]
    best = best_of(found)
    if best is not None:
        at = "" if best.step is None else f" (step {best.step:,})"
        lines.append(f"resume from {best.path}{at}: the newest one that is whole and finite")
    elif found.leaves:
        lines.append("start afresh: no checkpoint is left that is whole and finite")
    if sections[0].status == "failed" and best is not None:
        lines.append(
            "set the learning rate again after loading optimizer and scheduler, or build the "
            "scheduler anew"
        )
    missing = [section.title for section in sections if section.status == "not checked"]
    if missing:
        lines.append(f"not checked: {', '.join(missing)}")
    if not bad:
        return Section(
            title="recommendations", status="fine", lines=tuple(lines) or ("nothing to do",)
        )
    lines.append(
        f"move {count(len(bad), 'corrupt checkpoint')} out of the way, so that nothing resumes "
        f"from there:"
    )
    command = f"stepguard quarantine {shlex.quote(str(folder))}"
    return Section(
        title="recommendations", status="warning", lines=tuple(lines), commands=(command,)
    )


def best_of(found: Verification) -> Verification | None:
    """The good checkpoint with the highest step; without steps, the one written last."""
    good = [leaf for leaf in found.leaves if leaf.ok and leaf.tensors]
    return max(
        good,
        key=lambda leaf: (-1 if leaf.step is None else leaf.step, _written(leaf.path)),
        default=None,
    )


def _written(path: str) -> float:
    try:
        return Path(path).stat().st_mtime
    except OSError:
        return 0.0
