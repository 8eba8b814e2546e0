"""Check any path: a file, a folder that is a checkpoint, or a folder that holds some."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from stepguard._errors import StoreError
from stepguard.checkpoints.entries import LAST_GOOD, read_pointer
from stepguard.records.verification import Problem, Rate, Verification, Watched
from stepguard.verification import roles
from stepguard.verification.checkpoint_search import (
    FoundCheckpoints,
    find_checkpoints,
    single_file,
)
from stepguard.verification.damage import ProblemList
from stepguard.verification.file_check import check_file
from stepguard.verification.file_layout import FileLayout
from stepguard.verification.format_entry import CheckedFolder, CheckpointFiles, Progress

Plan = Callable[[int, int], None]
"""Takes the number of checkpoints and of bytes before anything is read."""
Watch = Callable[[str], bool]
"""Takes the name of a tensor: is its range wanted?"""
MOST_WATCHED = 200
LONGEST_POINTER = 200
"""Bytes: a larger file called `last-good` is somebody's checkpoint."""


def check_path(
    path: Path,
    *,
    plan: Plan | None = None,
    progress: Progress | None = None,
    watch: Watch | None = None,
    exclude: Collection[str] = (),
) -> Verification:
    """Check what lies at `path`; problems are in the result, never raised."""
    began = time.perf_counter()
    if path.name == LAST_GOOD and path.is_file() and path.stat().st_size <= LONGEST_POINTER:
        return _pointed_at(path, plan, progress, watch)
    found = FoundCheckpoints(path)
    if path.is_dir():
        found = find_checkpoints(path, exclude)
    else:
        found.checkpoints.append(single_file(path))
    if plan is not None:
        plan(len(found.checkpoints), sum(each.size for each in found.checkpoints))
    parts = [check_checkpoint(each, progress or _ignore, watch) for each in found.checkpoints]
    if len(parts) == 1 and found.checkpoints[0].path == path and not found.problems:
        return parts[0]
    return _merged(path, parts, found.problems, time.perf_counter() - began)


def _pointed_at(
    pointer: Path, plan: Plan | None, progress: Progress | None, watch: Watch | None
) -> Verification:
    """Check the checkpoint that a `last-good` names, and say which that is."""
    problems = ProblemList(str(pointer))
    try:
        named = read_pointer(pointer.parent)
    except StoreError as fault:
        problems.add("seal", str(fault))
        return Verification(path=str(pointer), format="pointer", problems=tuple(problems.all()))
    found = check_path(named, plan=plan, progress=progress, watch=watch)
    return replace(found, pointer=str(pointer))


def check_checkpoint(
    checkpoint: CheckpointFiles, progress: Progress, watch: Watch | None = None
) -> Verification:
    """Check one checkpoint."""
    began = time.perf_counter()
    problems = ProblemList(str(checkpoint.path))
    kind = checkpoint.folder_format
    if kind is None:
        layout = check_file(checkpoint.path, progress)
        checked = CheckedFolder([layout], format=layout.format)
    else:
        checked = kind.check(checkpoint, problems, progress)
        if not checked.format:
            checked = replace(checked, format=kind.name)
    result = _result(checkpoint.path, checked, problems.all(), time.perf_counter() - began)
    if watch is None:
        return result
    return replace(result, watched=_watched(checked.layouts, watch))


def _watched(layouts: Sequence[FileLayout], watch: Watch) -> tuple[Watched, ...]:
    found: list[Watched] = []
    for layout in layouts:
        for tensor in layout.tensors:
            if len(found) == MOST_WATCHED:
                return tuple(found)
            seen = tensor.seen
            if seen is not None and seen.any_finite and watch(tensor.name):
                found.append(
                    Watched(
                        name=tensor.name,
                        role=tensor.role,
                        count=seen.count,
                        low=seen.low,
                        high=seen.high,
                    )
                )
    return tuple(found)


def _result(
    path: Path, checked: CheckedFolder, problems: list[Problem], seconds: float
) -> Verification:
    counts: Counter[str] = Counter()
    rates: list[Rate] = []
    for layout in checked.layouts:
        problems.extend(layout.problems.all())
        counts.update(tensor.role for tensor in layout.tensors)
        rates.extend(layout.rates)
    return Verification(
        path=str(path),
        format=checked.format,
        problems=tuple(problems),
        tensors=counts.total(),
        bytes=sum(layout.size for layout in checked.layouts),
        files=len(checked.layouts),
        roles=dict(sorted(counts.items())),
        step=_step(path, checked),
        rates=tuple(rates),
        seconds=seconds,
    )


def _step(path: Path, checked: CheckedFolder) -> int | None:
    """Return the step by the folder, else by a file, else by the name."""
    if checked.step is not None:
        return checked.step
    for layout in checked.layouts:
        # the `step` in accelerate's random states counts micro-batches
        if layout.step is not None and roles.of_file(layout.path.name) != "rng":
            return layout.step
    # `checkpoint-500`, `step-1200`, `epoch=3-step=1200.ckpt`
    numbers = re.findall(r"(?:step|checkpoint|ckpt|iter)[-_=]?(\d{1,12})", path.name.lower())
    return int(numbers[-1]) if numbers else None


def _merged(
    path: Path, parts: Sequence[Verification], problems: Sequence[Problem], seconds: float
) -> Verification:
    """Return the result of a folder from those of its checkpoints."""
    counts: Counter[str] = Counter()
    rates: list[Rate] = []
    merged = list(problems)
    for part in parts:
        counts.update(part.roles)
        rates.extend(part.rates)
        merged.extend(part.problems)
    return Verification(
        path=str(path),
        format="folder",
        problems=tuple(merged),
        tensors=sum(part.tensors for part in parts),
        bytes=sum(part.bytes for part in parts),
        files=sum(part.files for part in parts),
        roles=dict(sorted(counts.items())),
        rates=tuple(rates),
        seconds=seconds,
        parts=tuple(parts),
    )


def _ignore(count: int) -> None:
    """Show no progress."""
