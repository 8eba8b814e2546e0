"""Opens checkpoints: every byte is proven against the seal while it is read, and a damaged one is
passed over, by name.

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
from stepguard.checkpoints.entries import LAST_GOOD, PassedOver, look, pointed
from stepguard.checkpoints.layout import FilePlan, Form, named_form, plan_of, stored_order
from stepguard.checkpoints.pieces import PIECE, empty_of
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
    """What would have been used, had it not been damaged."""


def open_last_good(folder: Path, device: torch.device | str | None = None) -> Opened:
    """The last good checkpoint, or the newest good one that is whole; StoreError names every
    candidate and why.
    """
    passed: dict[Path, PassedOver] = {}
    for path in _candidates(folder, passed):
        try:
            return replace(open_one(path, device), passed_over=tuple(passed.values()))
        except StoreError as fault:
            reason = (
                str(fault) if path.is_dir() else f"{path} was removed while it was being opened."
            )
            passed[path] = PassedOver(path, reason)
    for damaged in look(folder)[1]:
        passed.setdefault(damaged.path, damaged)
    raise StoreError(_nothing(folder, list(passed.values())))


def open_one(path: Path, device: torch.device | str | None = None) -> Opened:
    """This checkpoint and no other."""
    seal = read_seal(path)
    if FACTS not in seal.files:
        raise StoreError(f"{path} has a seal without {FACTS}.")
    try:
        facts = _read_facts(path / FACTS, seal.files[FACTS])
        tensors = _read_tensors(path, seal, device)
    except OSError as fault:
        raise StoreError(f"{path} cannot be read: {fault.strerror}.") from None
    return Opened(path=path, step=seal.step, tensors=tensors, facts=facts, health=seal.health)


def _candidates(folder: Path, passed: dict[Path, PassedOver]) -> Iterator[Path]:
    """What `last-good` names, then the good ones, newest first; asked anew each time, for a writer
    may be at work.
    """
    while True:
        known: list[Path] = []
        try:
            known.append(pointed(folder))
        except StoreError as fault:
            passed.setdefault(folder / LAST_GOOD, PassedOver(folder / LAST_GOOD, str(fault)))
        entries, damaged = look(folder)
        known += [entry.path for entry in entries if entry.good]
        fresh = [path for path in known if path not in passed]
        if not fresh:
            return
        if passed:
            passed.update({d.path: d for d in damaged if d.path not in passed})
        yield fresh[0]


def _nothing(folder: Path, passed: list[PassedOver]) -> str:
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
    try:
        forms = {
            name: named_form(t.dtype, t.shape)
            for name, t in seal.tensors.items()
            if t.same_as is None
        }
    except ValueError as fault:
        raise StoreError(f"{path} cannot be read: {fault}.") from None
    plans = [
        plan_of(
            file, stored_order([n for n in forms if seal.tensors[n].file == file], forms), forms
        )
        for file in sorted(seal.files.keys() - {FACTS})
    ]
    _refuse_what_cannot_be(path, seal, plans)
    tensors: dict[str, Tensor] = {}
    for plan in plans:
        tensors.update(_read_file(path / plan.name, plan, seal, forms, device))
    return {name: tensors[sealed.same_as or name] for name, sealed in seal.tensors.items()}


def _refuse_what_cannot_be(path: Path, seal: Seal, plans: list[FilePlan]) -> None:
    """All that can be known wrong before memory is taken for it."""
    planned = {name for plan in plans for name in plan.names}
    for name, sealed in seal.tensors.items():
        stored = seal.tensors.get(sealed.same_as or name)
        if (sealed.same_as or name) not in planned or stored != replace(sealed, same_as=None):
            raise StoreError(
                f"{path} has a seal that contradicts itself: {name} is in no file as it is "
                f"described."
            )
    for plan in plans:
        if plan.size != seal.files[plan.name].size:
            raise StoreError(
                f"{path} has a seal that contradicts itself: {plan.name} cannot have the size it "
                f"gives."
            )
        descriptor, size = open_plain(path / plan.name)
        os.close(descriptor)
        if size != plan.size:
            raise StoreError(
                f"{path} is not whole: {plan.name} has {size} bytes, {plan.size} were sealed."
            )
    needed, there = (
        sum(plan.size for plan in plans),
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )
    if needed > there:
        raise StoreError(f"{path} needs {needed} bytes of memory; this machine has {there}.")


def _read_file(
    path: Path,
    plan: FilePlan,
    seal: Seal,
    forms: dict[str, Form],
    device: torch.device | str | None,
) -> Iterator[tuple[str, Tensor]]:
    descriptor, _ = open_plain(path)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        header = file.read(len(plan.header))
        if header != plan.header:
            raise StoreError(f"{path} is not what was sealed: its header differs.")
        whole = xxhash.xxh3_128(header)
        for name in plan.names:
            tensor, view = empty_of(forms[name])
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
