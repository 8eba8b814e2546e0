"""Our own checkpoints: every byte against the seal, every tensor against its own digest."""

from __future__ import annotations

from pathlib import Path

from stepguard._errors import StoreError
from stepguard.records.verification import Problem, Role
from stepguard.state.checking import dtypes
from stepguard.state.checking.damage import Damaged, Notes
from stepguard.state.checking.files import Progress, check_file
from stepguard.state.checking.layout import Block, Layout
from stepguard.state.checking.safetensors import read_safetensors
from stepguard.state.checking.source import Window
from stepguard.state.store.entries import LAST_GOOD, pointed
from stepguard.state.store.entries import look as look_into
from stepguard.state.store.seal import SEAL, Seal, read_seal


def check_sealed(folder: Path, notes: Notes, progress: Progress) -> tuple[list[Layout], int | None]:
    """All files the seal names; what it does not name is worth a warning."""
    try:
        seal = read_seal(folder)
    except StoreError as fault:
        notes.add("seal", str(fault))
        return [], None
    if not seal.health.good:
        notes.add(
            "seal", "was sealed without being good: it is complete, but its run was in trouble", severity="warning"
        )
    layouts = []
    for name in sorted(seal.files):
        path = folder / name
        if path.is_symlink():
            notes.add("link", f"{name} is a link where the seal has a file; it was not followed")
        elif not path.exists():
            notes.add("missing", f"the seal names {name}, which is not there")
        else:
            layouts.append(_check(path, seal, progress))
    for path in sorted(folder.iterdir()):
        if path.name not in seal.files and path.name != SEAL:
            notes.add("seal", f"{path.name} is not named by the seal", severity="warning")
    return layouts, seal.step


def _check(path: Path, seal: Seal, progress: Progress) -> Layout:
    def read(window: Window, layout: Layout, role: Role | None) -> None:
        sealed = seal.files[path.name]
        layout.format = "sealed"
        layout.blocks.append(Block(0, window.size, path.name, "xxh3_128", sealed.digest))
        if window.size != sealed.size:
            raise Damaged("torn", f"has {window.size:,} bytes, {sealed.size:,} were sealed")
        if path.suffix == ".safetensors":
            read_safetensors(window, layout, None)
            _compare(layout, seal)

    return check_file(path, progress, read=read, allowed=frozenset(seal.nonfinite))


def _compare(layout: Layout, seal: Seal) -> None:
    """The header against the seal, which knows the types that safetensors has no name for."""
    held = {look.name for look in layout.looks}
    for name, tensor in seal.tensors.items():
        if tensor.file == layout.path.name and tensor.same_as is None and name not in held:
            layout.notes.add("missing", "is sealed, but not in the file", tensor=name)
    for look in layout.looks:
        known = seal.tensors.get(look.name)
        if known is None:
            layout.notes.add("seal", "is in the file, but not sealed", tensor=look.name)
            continue
        layout.blocks.append(Block(look.start, look.size, look.name, "xxh3_128", known.digest, look.name))
        if look.segment is not None and known.dtype in dtypes.SIZES:
            look.segment.dtype = known.dtype
        look.dtype, look.shape = known.dtype, known.shape


def check_store(folder: Path) -> list[Problem]:
    """A folder of sealed checkpoints: its pointer, and folders that have the name of a checkpoint but no seal."""
    problems = []
    try:
        pointed(folder)
    except StoreError as fault:
        problems.append(Problem(file=str(folder / LAST_GOOD), kind="seal", detail=str(fault)))
    for damaged in look_into(folder)[1]:
        if not (damaged.path / SEAL).exists():
            problems.append(Problem(file=str(damaged.path), kind="seal", detail="has no seal: it was never finished"))
    return problems
