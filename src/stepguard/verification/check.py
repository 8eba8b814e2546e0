"""Any path: a file, a folder that is a checkpoint, or a folder that holds some."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from stepguard.records.verification import Problem, Verification, Watched
from stepguard.verification import roles
from stepguard.verification.checkpoint_folders import Found, Place, find
from stepguard.verification.damage import Notes
from stepguard.verification.dcp_format import check_dcp
from stepguard.verification.file_layout import Layout
from stepguard.verification.files import Progress, check_file
from stepguard.verification.sealed import check_sealed
from stepguard.verification.shards import check_sides

Plan = Callable[[int, int], None]
"""Takes the number of checkpoints and of bytes before anything is read."""
Watch = Callable[[str], bool]
"""Is the tensor of this name one whose range is wanted?"""
MOST_WATCHED = 200


def check(
    path: Path,
    *,
    plan: Plan | None = None,
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> Verification:
    """Verify whatever lies at `path`; problems are in the result, never raised."""
    began = time.perf_counter()
    advance = progress or _quietly
    if not path.is_dir():
        place = Place(path, "file", (path,), path.stat().st_size if path.is_file() else 0)
        found = Found(path, [place])
    else:
        found = find(path)
    if plan is not None:
        plan(len(found.places), sum(place.size for place in found.places))
    parts = [check_place(place, advance, watch) for place in found.places]
    if len(parts) == 1 and found.places[0].path == path and not found.problems:
        return parts[0]
    return _together(path, parts, found.problems, time.perf_counter() - began)


def check_place(place: Place, progress: Progress, watch: Watch | None = None) -> Verification:
    """One checkpoint."""
    began = time.perf_counter()
    notes = Notes(str(place.path))
    step: int | None = None
    if place.kind == "file":
        layouts = [check_file(place.path, progress)]
        name = layouts[0].format
    elif place.kind == "DCP":
        layouts, name = check_dcp(place.path, progress), "DCP"
    elif place.kind == "sealed":
        (layouts, step), name = check_sealed(place.path, notes, progress), "sealed"
    else:
        layouts = [check_file(path, progress) for path in place.files]
        step = check_sides(place.path, {layout.path.name: layout for layout in layouts}, notes)
        name = _name(place, layouts)
    one = _as_one(place, name, layouts, notes.problems(), step, time.perf_counter() - began)
    return one if watch is None else replace(one, watched=_watched(layouts, watch))


def _watched(layouts: Sequence[Layout], watch: Watch) -> tuple[Watched, ...]:
    chosen = [
        look
        for layout in layouts
        for look in layout.looks
        if look.segment is not None and watch(look.name)
    ]
    return tuple(
        Watched(name=look.name, role=look.role, count=seen.count, low=seen.low, high=seen.high)
        for look in chosen[:MOST_WATCHED]
        if look.segment is not None and (seen := look.segment.seen).low <= seen.high
    )


def _name(place: Place, layouts: Sequence[Layout]) -> str:
    models = [
        layout.path
        for layout in layouts
        if layout.looks and roles.of_file(layout.path.name) is None
    ]
    weights = {path.suffix for path in models if path.suffix in (".safetensors", ".bin")}
    if place.kind == "DeepSpeed":
        return "DeepSpeed"
    library = (
        "accelerate"
        if any(path.name.startswith("random_states") for path in place.files)
        else "transformers"
    )
    return library + (
        f" ({', '.join(sorted(suffix[1:] for suffix in weights))})" if weights else ""
    )


def _as_one(
    place: Place,
    name: str,
    layouts: Sequence[Layout],
    problems: Sequence[Problem],
    step: int | None,
    seconds: float,
) -> Verification:
    looks = [look for layout in layouts for look in layout.looks]
    steps = [
        layout.step
        for layout in layouts
        if layout.step is not None and roles.of_file(layout.path.name) != "rng"
    ]
    return Verification(
        path=str(place.path),
        format=name,
        problems=(
            *problems,
            *(problem for layout in layouts for problem in layout.notes.problems()),
        ),
        tensors=len(looks),
        bytes=sum(layout.size for layout in layouts),
        files=len(layouts),
        roles=dict(sorted(Counter(look.role for look in looks).items())),
        step=step if step is not None else next(iter(steps), _named_step(place.path)),
        rates=tuple(rate for layout in layouts for rate in layout.rates),
        seconds=seconds,
    )


def _named_step(path: Path) -> int | None:
    """`checkpoint-500`, `step-1200`, `epoch=3-step=1200.ckpt`."""
    numbers = re.findall(r"(?:step|checkpoint|ckpt|iter)[-_=]?(\d{1,12})", path.name.lower())
    return int(numbers[-1]) if numbers else None


def _together(
    path: Path, parts: Sequence[Verification], problems: Sequence[Problem], seconds: float
) -> Verification:
    counts: Counter[str] = Counter()
    for part in parts:
        counts.update(part.roles)
    return Verification(
        path=str(path),
        format="folder",
        problems=(*problems, *(problem for part in parts for problem in part.problems)),
        tensors=sum(part.tensors for part in parts),
        bytes=sum(part.bytes for part in parts),
        files=sum(part.files for part in parts),
        roles=dict(sorted(counts.items())),
        rates=tuple(rate for part in parts for rate in part.rates),
        seconds=seconds,
        parts=tuple(parts),
    )


def _quietly(count: int) -> None:
    """Nobody watches."""
