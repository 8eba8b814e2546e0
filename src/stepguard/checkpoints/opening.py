"""Open checkpoints: every byte is proven against the seal; damaged ones are passed over by name.

Nothing that is read is executed or believed: sizes are compared with the file before memory is
taken, and the header of a tensor file is not parsed but computed from the seal and compared.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from stepguard._errors import StoreError
from stepguard.checkpoints.entries import LAST_GOOD, PassedOver, list_entries, read_pointer
from stepguard.checkpoints.file_plan import (
    FilePlan,
    TensorForm,
    form_from_seal,
    plan_file,
    stored_order,
)
from stepguard.checkpoints.pieces import PIECE, empty_tensor
from stepguard.checkpoints.seal import (
    FACTS,
    Health,
    Seal,
    SealedFile,
    digest_of,
    load_json,
    open_plain,
    read_seal,
    read_small,
)
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


def open_last_good(folder: Path, device: torch.device | str | None = None) -> Opened:
    """Open last-good, else the newest good one that is undamaged; StoreError names them all."""
    passed: dict[Path, PassedOver] = {}
    while (path := _next_candidate(folder, passed)) is not None:
        try:
            return replace(open_one(path, device), passed_over=tuple(passed.values()))
        except StoreError as fault:
            reason = str(fault)
            # by the rotation of a writer that is running
            if not path.is_dir():
                reason = f"{path} was removed while it was being opened."
            passed[path] = PassedOver(path, reason)
    for damaged in list_entries(folder)[1]:
        passed.setdefault(damaged.path, damaged)
    raise StoreError(_nothing_to_open(folder, list(passed.values())))


def open_one(path: Path, device: torch.device | str | None = None) -> Opened:
    """Open this checkpoint and no other."""
    seal = read_seal(path)
    if FACTS not in seal.files:
        raise StoreError(f"{path} has a seal without {FACTS}.")
    try:
        facts = _read_facts(path / FACTS, seal.files[FACTS])
        tensors = _read_tensors(path, seal, device)
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


def _read_facts(path: Path, sealed: SealedFile) -> dict[str, Any]:
    content = read_small(path)
    if len(content) != sealed.size or digest_of(content) != sealed.digest:
        raise StoreError(f"{path} is not what was sealed: its digest differs.")
    try:
        facts: dict[str, Any] = restore_floats(load_json(content, path))
    except RecursionError:
        raise StoreError(f"{path} is nested too deeply to be read.") from None
    return facts


def _read_tensors(path: Path, seal: Seal, device: torch.device | str | None) -> dict[str, Tensor]:
    forms: dict[str, TensorForm] = {}
    names_of: dict[str, list[str]] = {}
    try:
        for name, sealed in seal.tensors.items():
            if sealed.same_as is None:
                forms[name] = form_from_seal(sealed.dtype, sealed.shape)
                names_of.setdefault(sealed.file, []).append(name)
    except ValueError as fault:
        raise StoreError(f"{path} cannot be read: {fault}.") from None
    plans = []
    for file in sorted(seal.files.keys() - {FACTS}):
        plans.append(plan_file(file, stored_order(names_of.get(file, ()), forms), forms))
    _check_before_reading(path, seal, plans)
    tensors: dict[str, Tensor] = {}
    for plan in plans:
        tensors.update(_read_file(path / plan.name, plan, seal, forms, device))
    return {name: tensors[sealed.same_as or name] for name, sealed in seal.tensors.items()}


def _check_before_reading(path: Path, seal: Seal, plans: list[FilePlan]) -> None:
    """Refuse all that can be known to be wrong before memory is taken for it."""
    _check_names(path, seal, plans)
    for plan in plans:
        _check_size(path, seal, plan)
    needed = sum(plan.size for plan in plans)
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > installed:
        raise StoreError(f"{path} needs {needed} bytes of memory; this machine has {installed}.")


def _check_names(path: Path, seal: Seal, plans: list[FilePlan]) -> None:
    """Refuse a seal whose shared tensors differ from those they share, or that are in no file."""
    planned = {name for plan in plans for name in plan.names}
    for name, sealed in seal.tensors.items():
        first = sealed.same_as or name
        if first not in planned or seal.tensors[first] != replace(sealed, same_as=None):
            raise StoreError(
                f"{path} has a seal that contradicts itself: {name} is in no file as it is "
                f"described."
            )


def _check_size(path: Path, seal: Seal, plan: FilePlan) -> None:
    if plan.size != seal.files[plan.name].size:
        raise StoreError(
            f"{path} has a seal that contradicts itself: {plan.name} cannot have the size it gives."
        )
    descriptor, size = open_plain(path / plan.name)
    os.close(descriptor)
    if size != plan.size:
        raise StoreError(
            f"{path} is not whole: {plan.name} has {size} bytes, {plan.size} were sealed."
        )


def _read_file(
    path: Path,
    plan: FilePlan,
    seal: Seal,
    forms: dict[str, TensorForm],
    device: torch.device | str | None,
) -> Iterator[tuple[str, Tensor]]:
    descriptor, _ = open_plain(path)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        header = file.read(len(plan.header))
        if header != plan.header:
            raise StoreError(f"{path} is not what was sealed: its header differs.")
        whole = xxhash.xxh3_128(header)
        for name in plan.names:
            tensor, view = empty_tensor(forms[name])
            digest = xxhash.xxh3_128()
            for at in range(0, len(view), PIECE):
                piece = view[at : at + PIECE]
                _fill(file.fileno(), piece, path)
                digest.update(piece)
                whole.update(piece)
            if digest.hexdigest() != seal.tensors[name].digest:
                raise StoreError(f"{path} is not what was sealed: {name} differs.")
            yield name, tensor if device is None else tensor.to(device)
        if whole.hexdigest() != seal.files[plan.name].digest:
            raise StoreError(f"{path} is not what was sealed: its digest differs.")


def _fill(descriptor: int, piece: memoryview, path: Path) -> None:
    while piece:
        count = os.readv(descriptor, [piece])
        if not count:
            raise StoreError(f"{path} ended while it was being read.")
        piece = piece[count:]
