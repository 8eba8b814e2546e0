"""Open checkpoints: every byte is proven against the seal; damaged ones are passed over by name.

Nothing that is read is executed or believed: sizes are compared with the file before memory is
taken, and the header of a tensor file is not parsed but computed from the seal and compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepguard._errors import StoreError
from stepguard.checkpoints.entries import LAST_GOOD, PassedOver, list_entries, read_pointer
from stepguard.checkpoints.seal import (
    FACTS,
    Health,
    SealedFile,
    digest_of,
    load_json,
    read_added_seals,
    read_rank_seals,
    read_seal,
    read_small,
)
from stepguard.checkpoints.tensor_files import Select, read_tensors
from stepguard.records.codec import restore_floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A checkpoint, proven and in memory."""

    path: Path
    step: int
    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    health: Health
    passed_over: tuple[PassedOver, ...] = ()
    """Checkpoints that would have been used if they were not damaged."""


def open_last_good(
    folder: Path,
    device: torch.device | str | None = None,
    select: Select | None = None,
    but_not: Sequence[PassedOver] = (),
) -> Opened:
    """Open last-good, else the newest good one that is undamaged; StoreError names them all."""
    passed = {each.path: each for each in but_not}
    while (path := _next_candidate(folder, passed)) is not None:
        try:
            return replace(open_one(path, device, select), passed_over=tuple(passed.values()))
        except StoreError as fault:
            reason = str(fault)
            # by the rotation of a writer that is running
            if not path.is_dir():
                reason = f"{path} was removed while it was being opened."
            passed[path] = PassedOver(path, reason)
    for damaged in list_entries(folder)[1]:
        passed.setdefault(damaged.path, damaged)
    raise StoreError(_nothing_to_open(folder, list(passed.values())))


def open_one(
    path: Path, device: torch.device | str | None = None, select: Select | None = None
) -> Opened:
    """Open this checkpoint and no other. `select` says which part of each tensor is wanted."""
    seal = read_seal(path)
    if FACTS not in seal.files:
        raise StoreError(f"{path} has a seal without {FACTS}.")
    try:
        facts = read_facts(path / FACTS, seal.files[FACTS])
        tensors = read_tensors(path, read_rank_seals(path, seal), device, select)
        for rank, added in read_added_seals(path, seal).items():
            for kind, own in restore_floats(added.facts).items():
                facts.setdefault(kind, {})[str(rank)] = own
    except OSError as fault:
        raise StoreError(f"{path} cannot be read: {fault.strerror}.") from None
    return Opened(path=path, step=seal.step, tensors=tensors, facts=facts, health=seal.health)


def _next_candidate(folder: Path, passed: dict[Path, PassedOver]) -> Path | None:
    """Return what `last-good` names, else the newest good checkpoint that was not passed over."""
    # the folder is listed again for every candidate: a writer may have changed it meanwhile
    candidates: list[Path] = []
    try:
        candidates.append(read_pointer(folder))
    except StoreError as fault:
        passed.setdefault(folder / LAST_GOOD, PassedOver(folder / LAST_GOOD, str(fault)))
    entries, damaged = list_entries(folder)
    candidates += [entry.path for entry in entries if entry.good]
    for path in candidates:
        if path not in passed:
            if passed:
                for each in damaged:
                    passed.setdefault(each.path, each)
            return path
    return None


def _nothing_to_open(folder: Path, passed: list[PassedOver]) -> str:
    if not folder.is_dir():
        return f"{folder} does not exist; there is no checkpoint to open."
    if all(each.path.name == LAST_GOOD and not each.path.exists() for each in passed):
        return f"{folder} holds no sealed good checkpoint; there is nothing to open."
    reasons = "\n".join(f"  {each.path.name}: {each.reason}" for each in passed)
    return (
        f"{folder} holds no good checkpoint that can be used; `stepguard verify` shows the "
        f"details.\n{reasons}"
    )


def read_facts(path: Path, sealed: SealedFile) -> dict[str, Any]:
    """Read the facts of a checkpoint, proven unaltered."""
    content = read_small(path)
    if len(content) != sealed.size or digest_of(content) != sealed.digest:
        raise StoreError(f"{path} is not what was sealed: its digest differs.")
    try:
        facts: dict[str, Any] = restore_floats(load_json(content, path))
    except RecursionError:
        raise StoreError(f"{path} is nested too deeply to be read.") from None
    return facts
