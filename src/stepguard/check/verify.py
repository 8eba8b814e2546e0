"""`stepguard.verify`: is a checkpoint complete, finite and unaltered? Nothing in it is executed."""

from __future__ import annotations

import hashlib
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import xxhash

from stepguard import __version__
from stepguard._errors import ConfigError, StoreError
from stepguard.check.folders import (
    FOLDER_FORMATS,
    METADATA,
    CheckpointFiles,
    check_store,
    folder_format,
)
from stepguard.check.scan import FileLayout, Progress, open_file, role_of_file
from stepguard.check.torch_file import check_file, has_checkpoint_suffix, is_checkpoint_file
from stepguard.checkpoints.seal import (
    LAST_GOOD,
    SEAL,
    Health,
    Seal,
    SealedFile,
    read_pointer,
    seal_bytes,
)
from stepguard.records.checks import Problem, ProblemKind, Rate, Verification, Watched, Weight
from stepguard.state.files import write_file

# --- Find the checkpoints below a folder; links that lead out of the folder are not followed.

QUARANTINE = "quarantine"
SKIPPED = frozenset({QUARANTINE, "__pycache__", "node_modules", "site-packages"})
MOST_ENTRIES = 200_000


def find_checkpoints(
    root: Path, exclude: Collection[str] = ()
) -> tuple[list[CheckpointFiles], list[Problem]]:
    """Find every checkpoint at `root` (it may be one itself) and below it, but not in the folders
    named in `exclude`; also return what is wrong with the folders themselves.
    """
    found = []
    problems = []

    def report(path: Path, kind: ProblemKind, detail: str, severity: Weight = "warning") -> None:
        problems.append(Problem(file=str(path), kind=kind, detail=detail, severity=severity))

    todo = [(root, 0)]
    listed = 0
    while todo:
        folder, depth = todo.pop()
        if depth > 30:
            report(folder, "limit", f"lies {depth} folders deep and was not searched")
            continue
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            report(folder, "unreadable", f"cannot be listed: {error.strerror}")
            continue
        listed += len(entries)
        if listed > MOST_ENTRIES:
            report(folder, "limit", f"more than {MOST_ENTRIES:,} files; the rest was not searched")
            continue
        files = []
        for entry in entries:
            path = Path(entry.path)
            if entry.is_symlink():
                if _is_followed(path, root, report):
                    files.append(path)
            elif entry.is_dir(follow_symlinks=False):
                if not _is_skipped(path) and path.name not in exclude:
                    todo.append((path, depth + 1))
            # also a FIFO or device: it stands where a checkpoint is expected, and is reported
            elif not path.name.startswith(".") or path.name == METADATA:
                files.append(path)
        if folder / LAST_GOOD in files:
            problems.extend(check_store(folder))
        found.extend(_checkpoints_in(folder, files))
    # by numbers: step-9 before step-10
    found.sort(key=lambda checkpoint: list(map(_natural, checkpoint.path.parts)))
    return found, problems


def _checkpoints_in(folder: Path, files: list[Path]) -> list[CheckpointFiles]:
    """Return the folder as one checkpoint, or each of its files that is one."""
    kind = folder_format(files)
    if not kind:
        return [single_file(path) for path in files if is_checkpoint_file(path)]
    if kind == "transformers":
        files = [path for path in files if has_checkpoint_suffix(path)]
    return [CheckpointFiles(folder, tuple(files), sum(map(_size, files)), kind)]


def single_file(path: Path) -> CheckpointFiles:
    """Return a file as a checkpoint of its own."""
    return CheckpointFiles(path, (path,), _size(path))


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


def _is_followed(link: Path, root: Path, report: Callable[..., None]) -> bool:
    """Is a link read as a file? Only into the same Hugging Face cache, and to a file below the
    root that the search does not find; report other links to checkpoints.
    """
    target = Path(os.path.realpath(link))
    # huggingface_hub keeps `snapshots/<revision>/<file>` as links to `blobs/<digest>`
    snapshots = link.parent.parent
    blobs = snapshots.parent.resolve() / "blobs"
    if snapshots.name == "snapshots" and target.is_relative_to(blobs):
        return target.is_file()
    # such a folder is a checkpoint, and its reader refuses the link
    if link.name in (SEAL, METADATA):
        return True
    if not has_checkpoint_suffix(link) and not target.is_dir():
        return False
    inside = root.resolve()
    above = [each for each in (target, *target.parents) if each.is_relative_to(inside)]
    is_hidden = any(map(_is_skipped, set(above) - {inside}))
    if not above:
        detail = f"is a link out of the folder, to {target.name!r}; it was not opened"
        report(link, "link", f"{detail}: verify its target by its own path", "error")
    elif not target.exists():
        report(link, "link", "is a link to nothing")
    elif target.is_file():
        return is_hidden or not is_checkpoint_file(target)
    elif is_hidden or not target.is_dir():
        report(
            link,
            "link",
            f"is a link to {target.name!r}, which was not opened; give its own path",
            "error",
        )
    return False


def _natural(text: str) -> list[tuple[int, int, str]]:
    """Split into words and numbers; a number sorts before a word."""
    words = []
    for number, word in re.findall(r"([0-9]+)|([^0-9]+)", text):
        # int() of a name of thousands of digits is refused
        words.append((1, 0, word) if word else (0, int(number[:18]), ""))
    return words


# --- Check any path: a file, a folder that is a checkpoint, or a folder that holds some.

Plan = Callable[[int, int], None]
"""Takes the number of checkpoints and of bytes before anything is read."""
Watch = Callable[[str], bool]
"""Takes the name of a tensor: is its range wanted?"""
RATES = {
    "max_lr": "the peak of OneCycleLR (max_lr)",
    "initial_lr": "the base of its schedule (initial_lr)",
    "base_lr": "the base of its schedule (base_lrs)",
    "lr": "the learning rate (lr) at the moment it was saved",
    "last_lr": "the learning rate (lr) at the moment it was saved",
}
"""Which stored rate a configuration means: OneCycleLR's peak, else the schedule's base, else lr."""


def verify(
    path: str | Path,
    *,
    lr: float | None = None,
    plan: Plan | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Verify a checkpoint file, a checkpoint folder, or everything below a folder.

        assert stepguard.verify("runs/a/checkpoints").ok

    Reads `.pt` `.pth` `.bin` `.ckpt` (both formats of torch.save, plain pickles), safetensors,
    sharded and transformers folders, DCP folders and sealed checkpoints. What is wrong is in
    `.problems`. A path that does not exist, or that holds no checkpoint, raises ConfigError:
    nothing was verified, so nothing is good. With `lr`, a checkpoint with another base learning
    rate has a problem of kind `lr`.
    """
    found = check_path(path, lr=lr, plan=plan, progress=progress)
    if not found.leaves and not found.problems:
        raise ConfigError(nothing_in(path))
    return found


def nothing_in(where: str | Path) -> str:
    """Return the message for a folder without a checkpoint."""
    return (
        f"nothing to verify in {where}: it holds no checkpoint; give a checkpoint file or folder."
    )


def check_path(
    path: str | Path,
    *,
    lr: float | None = None,
    plan: Plan | None = None,
    progress: Progress | None = None,
    watch: Watch | None = None,
    exclude: Collection[str] = (),
) -> Verification:
    """Verify as `verify` does, but return an empty result for a folder without a checkpoint."""
    began = time.perf_counter()
    where = Path(path)
    _refuse(where, lr)
    # a larger file called `last-good` is somebody's checkpoint
    if where.name == LAST_GOOD and where.is_file() and _size(where) <= 200:
        try:
            named = read_pointer(where.parent)
        except StoreError as fault:
            problem = Problem(file=str(where), kind="seal", detail=str(fault))
            return Verification(path=str(where), format="pointer", problems=(problem,))
        result = check_path(named, lr=lr, plan=plan, progress=progress, watch=watch)
        return replace(result, pointer=str(where))
    found = [single_file(where)]
    problems: list[Problem] = []
    if where.is_dir():
        found, problems = find_checkpoints(where, exclude)
    if plan is not None:
        plan(len(found), sum(each.size for each in found))
    parts = [check_checkpoint(each, progress, watch, lr) for each in found]
    if len(parts) == 1 and found[0].path == where and not problems:
        return parts[0]
    roles: Counter[str] = Counter()
    rates: list[Rate] = []
    for part in parts:
        roles.update(part.roles)
        rates.extend(part.rates)
        problems.extend(part.problems)
    return Verification(
        path=str(where),
        format="folder",
        problems=tuple(problems),
        tensors=roles.total(),
        bytes=sum(part.bytes for part in parts),
        files=sum(part.files for part in parts),
        roles=dict(sorted(roles.items())),
        rates=tuple(rates),
        seconds=time.perf_counter() - began,
        parts=tuple(parts),
    )


def _refuse(where: Path, lr: float | None) -> None:
    if not where.exists() and not where.is_symlink():
        raise ConfigError(
            f"{where} does not exist; give a checkpoint file, a checkpoint folder or a run "
            f"directory."
        )
    if lr is not None and not (math.isfinite(lr) and lr > 0):
        raise ConfigError(f"lr={lr!r} is not a learning rate; give a positive number.")


def check_checkpoint(
    checkpoint: CheckpointFiles,
    progress: Progress | None = None,
    watch: Watch | None = None,
    lr: float | None = None,
) -> Verification:
    """Check one checkpoint; problems are in the result, never raised."""
    began = time.perf_counter()
    path = checkpoint.path
    progress = progress or (lambda count: None)
    whole = FileLayout(path)
    if checkpoint.format:
        layouts = FOLDER_FORMATS[checkpoint.format](whole, checkpoint.files, progress)
    else:
        layouts = [check_file(path, progress)]
        whole.format = layouts[0].format
    problems = whole.problems()
    roles: Counter[str] = Counter()
    rates = []
    watched: list[Watched] = []
    for layout in layouts:
        problems.extend(layout.problems())
        roles.update(tensor.role for tensor in layout.tensors)
        rates.extend(layout.rates)
        # the `step` in accelerate's random states counts micro-batches
        if whole.step is None and role_of_file(layout.path.name) != "rng":
            whole.step = layout.step
        if watch is not None:
            watched.extend(_watched(layout, watch))
    # `checkpoint-500`, `step-1200`, `epoch=3-step=1200.ckpt`
    numbers = re.findall(r"(?:step|checkpoint|ckpt|iter)[-_=]?(\d{1,12})", path.name.lower())
    if whole.step is None and numbers:
        whole.step = int(numbers[-1])
    if lr is not None:
        problems.extend(other_rate(rates, lr))
    return Verification(
        path=str(path),
        format=whole.format,
        problems=tuple(problems),
        tensors=roles.total(),
        bytes=sum(layout.size for layout in layouts),
        files=len(layouts),
        roles=dict(sorted(roles.items())),
        step=whole.step,
        rates=tuple(rates),
        watched=tuple(watched[:200]),
        seconds=time.perf_counter() - began,
    )


def _watched(layout: FileLayout, watch: Watch) -> Iterator[Watched]:
    for tensor in layout.tensors:
        found = tensor.values
        if found and found.low <= found.high and watch(tensor.name):
            span: dict[str, Any] = {"count": found.count, "low": found.low, "high": found.high}
            yield Watched(name=tensor.name, role=tensor.role, **span)


def other_rate(rates: Sequence[Rate], lr: float) -> list[Problem]:
    """Return a problem where the rate that a configuration means is stored, and is not `lr`."""
    for kind, name in RATES.items():
        base = [rate for rate in rates if rate.kind == kind]
        # the same learning rate may be written in two ways
        if any(math.isclose(rate.value, lr, rel_tol=1e-6) for rate in base):
            return []
        if base:
            detail = f"{name} is {base[0].value:.4g}"
            running = [each.value for each in rates if each.kind in ("lr", "last_lr")]
            if running and kind != "lr":
                detail += f", running at {running[0]:.4g} when it was saved"
            detail += f"; configured is {lr:.4g}. Loading this optimizer or scheduler state "
            detail += "overrides the configuration"
            file, tensor = base[0].file, base[0].name
            return [Problem(file=file, kind="lr", tensor=tensor, detail=detail, role="optimizer")]
    return []


# --- Seal a folder that torch.distributed.checkpoint has written, so that no file in it can change.


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
        raise StoreError(f"{where} is not sealed because it is not good: {found.errors[0]}.")
    files = {}
    for path in sorted(where.iterdir()):
        if path.is_file():
            files[path.name] = SealedFile(size=_size(path), digest=file_digest(path))
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


def file_digest(path: Path) -> str:
    """Return the XXH3-128 of a file; Damaged if it is not a regular one that can be read."""
    with open_file(path) as source:
        return hashlib.file_digest(source, xxhash.xxh3_128).hexdigest()
