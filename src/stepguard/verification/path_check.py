"""Check any path: a file, a folder that is a checkpoint, or a folder that holds some."""

from __future__ import annotations

import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import torch
import xxhash

from stepguard import __version__
from stepguard._errors import ConfigError, StoreError
from stepguard.checkpoints.seal import (
    LAST_GOOD,
    SEAL,
    Health,
    Seal,
    SealedFile,
    open_plain,
    read_pointer,
    seal_bytes,
)
from stepguard.records.checks import Problem, Rate, Verification, Watched
from stepguard.state.files import write_file
from stepguard.verification import pickle_machine
from stepguard.verification.bounded_file import ProblemList, special_name
from stepguard.verification.file_formats import (
    check_file,
    has_checkpoint_suffix,
    is_checkpoint_file,
)
from stepguard.verification.folders import (
    DCP,
    DEEPSPEED,
    HUGGINGFACE,
    METADATA,
    SEALED,
    check_store,
)
from stepguard.verification.reading import FileLayout
from stepguard.verification.scan import CheckedFolder, CheckpointFiles, FolderFormat, Progress

# --- Find the checkpoints below a folder; links that lead out of the folder are not followed.


FOLDER_FORMATS: tuple[FolderFormat, ...] = (SEALED, DCP, DEEPSPEED, HUGGINGFACE)
"""The first one that matches the files of a folder checks it."""
QUARANTINE = "quarantine"
SKIPPED = frozenset({QUARANTINE, "__pycache__", "node_modules", "site-packages"})
DEEPEST = 30
MOST_ENTRIES = 200_000


@dataclass(slots=True)
class FoundCheckpoints:
    """The checkpoints below a folder, and what was wrong with the folder itself."""

    root: Path
    checkpoints: list[CheckpointFiles] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    entries: int = 0
    """Files and folders that were listed."""

    def warn(self, path: Path, kind: Literal["link", "limit", "unreadable"], detail: str) -> None:
        self.problems.append(Problem(file=str(path), kind=kind, detail=detail, severity="warning"))


def find_checkpoints(root: Path, exclude: Collection[str] = ()) -> FoundCheckpoints:
    """Find every checkpoint at `root` (it may be one itself) and below it, but not in the folders
    named in `exclude`.
    """
    found = FoundCheckpoints(root)
    todo = [(root, 0)]
    while todo:
        folder, depth = todo.pop()
        listing = _listing(folder, found)
        if listing is None:
            continue
        files, folders = listing
        if any(path.name == LAST_GOOD for path in files):
            found.problems.extend(check_store(folder))
        _add_checkpoints(folder, files, found)
        if not folders:
            continue
        if depth == DEEPEST:
            detail = f"lies {DEEPEST} folders deep; what is below it was not searched"
            found.warn(folder, "limit", detail)
            continue
        for below in folders:
            if not _is_skipped(below) and below.name not in exclude:
                todo.append((below, depth + 1))
    found.checkpoints.sort(key=lambda checkpoint: _natural(checkpoint.path))
    return found


def single_file(path: Path) -> CheckpointFiles:
    """Return a file as a checkpoint of its own."""
    return CheckpointFiles(path, (path,), _size(path))


def _add_checkpoints(folder: Path, files: list[Path], found: FoundCheckpoints) -> None:
    """Add the folder as one checkpoint, or each of its files."""
    for kind in FOLDER_FORMATS:
        if kind.matches(files):
            members = files
            if not kind.all_files:
                members = [path for path in files if has_checkpoint_suffix(path)]
            size = sum(map(_size, members))
            found.checkpoints.append(CheckpointFiles(folder, tuple(members), size, kind))
            return
    for path in files:
        if is_checkpoint_file(path):
            found.checkpoints.append(single_file(path))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _is_skipped(folder: Path) -> bool:
    """Skip hidden and temporary folders, moved checkpoints, and the tensors of bad steps."""
    if folder.name.startswith(".") or folder.name in SKIPPED:
        return True
    return folder.name == "incidents" and (folder.parent / "journal.jsonl").exists()


def _listing(folder: Path, found: FoundCheckpoints) -> tuple[list[Path], list[Path]] | None:
    """Return the files and the folders in a folder; None if it cannot be listed."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        found.warn(folder, "unreadable", f"cannot be listed: {error.strerror}")
        return None
    found.entries += len(entries)
    if found.entries > MOST_ENTRIES:
        found.warn(folder, "limit", f"more than {MOST_ENTRIES:,} files; the rest was not searched")
        return None
    files = []
    folders = []
    for entry in entries:
        path = Path(entry.path)
        if entry.is_symlink():
            if _is_followed(path, found):
                files.append(path)
        elif entry.is_dir(follow_symlinks=False):
            folders.append(path)
        elif not entry.name.startswith(".") or entry.name == METADATA:
            # also a FIFO or device: it stands where a checkpoint is expected, and is reported
            files.append(path)
    return files, folders


def _is_followed(link: Path, found: FoundCheckpoints) -> bool:
    """Follow links only into the same Hugging Face cache; report others to checkpoints."""
    target = Path(os.path.realpath(link))
    if _is_in_same_cache(link, target):
        return target.is_file()
    # such a folder is a checkpoint, and its reader refuses the link
    if link.name in (SEAL, METADATA):
        return True
    if has_checkpoint_suffix(link) or target.is_dir():
        return _is_read_here(link, target, found)
    return False


def _is_in_same_cache(link: Path, target: Path) -> bool:
    # huggingface_hub keeps `snapshots/<revision>/<file>` as links to `blobs/<digest>`
    snapshots = link.parent.parent
    return snapshots.name == "snapshots" and target.is_relative_to(
        snapshots.parent.resolve() / "blobs"
    )


def _is_read_here(link: Path, target: Path, found: FoundCheckpoints) -> bool:
    """Report a link that is not followed; one to a file that the search does not find is read."""
    root = found.root.resolve()
    if target.exists() and not target.is_file() and not target.is_dir():
        detail = f"is a link to {special_name(target.stat().st_mode)}; it was not opened"
        found.problems.append(Problem(file=str(link), kind="link", detail=detail))
    elif not target.is_relative_to(root):
        detail = f"is a link out of the folder, to {target.name!r}; it was not followed"
        detail += ": verify its target by its own path"
        found.problems.append(Problem(file=str(link), kind="link", detail=detail))
    elif not target.exists():
        found.warn(link, "link", "is a link to nothing")
    else:
        folders = [folder for folder in (target, *target.parents) if folder.is_relative_to(root)]
        is_hidden = any(_is_skipped(folder) for folder in folders if folder != root)
        if target.is_file():
            return is_hidden or not is_checkpoint_file(target)
        if is_hidden:
            detail = f"is a link to {target.name!r}, where nothing was searched; give its own path"
            found.problems.append(Problem(file=str(link), kind="link", detail=detail))
    return False


def _natural(path: Path) -> list[list[tuple[int, int, str]]]:
    """Sort key by numbers: step-9 before step-10."""
    return [_natural_words(part) for part in path.parts]


def _natural_words(text: str) -> list[tuple[int, int, str]]:
    """Split into words and numbers; a number sorts before a word."""
    words: list[tuple[int, int, str]] = []
    for number, word in re.findall(r"([0-9]+)|([^0-9]+)", text):
        if number:
            # int() of a name of thousands of digits is refused
            words.append((0, int(number[:18]), ""))
        else:
            words.append((1, 0, word))
    return words


# --- Check any path: a file, a folder that is a checkpoint, or a folder that holds some.


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
        if layout.step is not None and pickle_machine.of_file(layout.path.name) != "rng":
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


# --- `stepguard.verify`: is a checkpoint complete, finite and unaltered? Nothing in it is
# executed.


CLOSE = 1e-6
"""Relative difference below which two learning rates are the same number written in two ways."""
RATE_ORDER = ("max_lr", "initial_lr", "base_lr", "lr", "last_lr")
"""Which stored rate a configuration means: OneCycleLR's peak, else the schedule's base, else lr."""
RATE_MEANINGS = {
    "max_lr": "the peak of OneCycleLR (max_lr)",
    "initial_lr": "the base of its schedule (initial_lr)",
    "base_lr": "the base of its schedule (base_lrs)",
    "lr": "the learning rate (lr) at the moment it was saved",
    "last_lr": "the learning rate (lr) at the moment it was saved",
}


def verify(
    path: str | Path,
    *,
    lr: float | None = None,
    plan: Plan | None = None,
    progress: Callable[[int], None] | None = None,
) -> Verification:
    """Verify a checkpoint file, a checkpoint folder, or everything below a folder.

        assert stepguard.verify("runs/a/checkpoints").ok

    Reads `.pt` `.pth` `.bin` `.ckpt` (both formats of torch.save, plain pickles), safetensors,
    sharded and transformers folders, DCP folders and sealed checkpoints. What is wrong is in
    `.problems`. A path that does not exist, or that holds no checkpoint, raises ConfigError:
    nothing was verified, so nothing is good. With `lr`, a checkpoint with another base learning
    rate has a problem of kind `lr`.
    """
    found = verify_or_empty(path, lr=lr, plan=plan, progress=progress)
    if not found.leaves and not found.problems:
        raise ConfigError(nothing_in(path))
    return found


def verify_or_empty(
    path: str | Path,
    *,
    lr: float | None = None,
    plan: Plan | None = None,
    progress: Callable[[int], None] | None = None,
) -> Verification:
    """Verify as `verify` does, but return an empty result for a folder without a checkpoint."""
    where = Path(path)
    if not where.exists() and not where.is_symlink():
        raise ConfigError(
            f"{where} does not exist; give a checkpoint file, a checkpoint folder or a run "
            f"directory."
        )
    if lr is not None and not (math.isfinite(lr) and lr > 0):
        raise ConfigError(f"lr={lr!r} is not a learning rate; give a positive number.")
    found = check_path(where, plan=plan, progress=progress)
    if lr is None:
        return found
    return with_lr(found, lr)


def nothing_in(where: str | Path) -> str:
    """Return the message for a folder without a checkpoint."""
    return f"nothing to verify in {where}: it holds no checkpoint; give the folder or file of one."


def with_lr(found: Verification, lr: float) -> Verification:
    """Add a problem wherever the stored base learning rate is not `lr`."""
    if not found.parts:
        problem = _contradiction(found, lr)
        if problem is None:
            return found
        return replace(found, problems=(*found.problems, problem))
    parts = tuple(with_lr(part, lr) for part in found.parts)
    problems = list(found.problems)
    for part in parts:
        problems.extend(problem for problem in part.problems if problem.kind == "lr")
    return replace(found, parts=parts, problems=tuple(problems))


def base_rates(rates: tuple[Rate, ...]) -> list[Rate]:
    """Return the rates that a configuration speaks of."""
    for kind in RATE_ORDER:
        chosen = [rate for rate in rates if rate.kind == kind]
        if chosen:
            return chosen
    return []


def _contradiction(found: Verification, lr: float) -> Problem | None:
    base = base_rates(found.rates)
    if not base or any(math.isclose(rate.value, lr, rel_tol=CLOSE) for rate in base):
        return None
    rate = base[0]
    detail = (
        f"{RATE_MEANINGS[rate.kind]} is {rate.value:.4g}{_when_saved(rate, found.rates)}; you gave "
        f"{lr:.4g}. Loading this optimizer or scheduler state overrides what the configuration says"
    )
    return Problem(file=rate.file, kind="lr", tensor=rate.name, detail=detail, role="optimizer")


def _when_saved(base: Rate, rates: tuple[Rate, ...]) -> str:
    """Say at which rate the run was, where that is not the base rate itself."""
    if base.kind == "lr":
        return ""
    for rate in rates:
        if rate.kind in ("lr", "last_lr"):
            return f", running at {rate.value:.4g} when it was saved"
    return ""


# --- Seal a folder that torch.distributed.checkpoint has written, so that no file in it can
# change.


PIECE = 1 << 20
"""Bytes that are read at a time."""


def seal_folder(folder: str | Path, *, step: int = 0) -> Path:
    """Verify a DCP folder and seal it; returns the path of the seal.

    Call it on one rank, after `dcp.save` has returned or the future of `dcp.async_save` is done.
    StoreError where the folder is not good: no `.metadata`, a missing file, NaN.
    """
    where = Path(folder)
    if not (where / METADATA).exists():
        raise StoreError(f"{where} is not sealed: its save never finished (no {METADATA}).")
    # an old seal would speak of the files before
    (where / SEAL).unlink(missing_ok=True)
    found = verify(where)
    if not found.ok:
        raise StoreError(f"{where} is not sealed, it is not good: {found.errors[0]}.")
    files: dict[str, SealedFile] = {}
    for path in sorted(where.iterdir()):
        if path.is_file():
            files[path.name] = _digested(path)
    seal = Seal(
        step=step,
        health=Health(loss=None, level=None, steps_watched=0, incidents=0, good=True),
        files=files,
        tensors={},
        serial=0,
        versions={"stepguard": __version__, "torch": torch.__version__},
        written=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    write_file(where / SEAL, seal_bytes(seal))
    return where / SEAL


def _digested(path: Path) -> SealedFile:
    descriptor, size = open_plain(path)
    digest = xxhash.xxh3_128()
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return SealedFile(size=size, digest=digest.hexdigest())
