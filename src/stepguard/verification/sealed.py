"""Our own checkpoints: every byte against the seal, every tensor against its own digest."""

from __future__ import annotations

from pathlib import Path

from stepguard._errors import StoreError
from stepguard.checkpoints.entries import LAST_GOOD, pointed
from stepguard.checkpoints.entries import look as look_into
from stepguard.checkpoints.seal import SEAL, Seal, read_seal
from stepguard.records.verification import Problem, Role
from stepguard.verification import dtype_names
from stepguard.verification.bounded_file import Window
from stepguard.verification.damage import Damaged, Notes
from stepguard.verification.file_layout import Block, Layout
from stepguard.verification.files import Progress, check_file
from stepguard.verification.safetensors_format import read_safetensors


def check_sealed(folder: Path, notes: Notes, progress: Progress) -> tuple[list[Layout], int | None]:
    """All files the seal names; what it does not name is worth a warning."""
    try:
        seal = read_seal(folder)
    except StoreError as fault:
        notes.add("seal", str(fault))
        return [], None
    if not seal.health.good:
        notes.add(
            "seal",
            "was sealed without being good: it is complete, but its run was in trouble",
            severity="warning",
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
        layout.blocks.append(
            Block(look.start, look.size, look.name, "xxh3_128", known.digest, look.name)
        )
        if look.segment is not None and known.dtype in dtype_names.SIZES:
            look.segment.dtype = known.dtype
        look.dtype, look.shape = known.dtype, known.shape


def check_store(folder: Path) -> list[Problem]:
    """A folder of sealed checkpoints: its pointer, and folders that have the name of a checkpoint
    but no seal.
    """
    problems = []
    try:
        pointed(folder)
    except StoreError as fault:
        problems.append(Problem(file=str(folder / LAST_GOOD), kind="seal", detail=str(fault)))
    for damaged in look_into(folder)[1]:
        if not (damaged.path / SEAL).exists():
            problems.append(
                Problem(
                    file=str(damaged.path), kind="seal", detail="has no seal: it was never finished"
                )
            )
    return problems
