"""Checkpoints of stepguard: every byte compared with the seal, every tensor with its own digest."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

from stepguard._errors import StoreError
from stepguard.checkpoints.entries import LAST_GOOD, list_entries, read_pointer
from stepguard.checkpoints.seal import (
    RANK_SEALS,
    SEAL,
    Seal,
    SealedFile,
    read_rank_seals,
    read_seal,
)
from stepguard.records.verification import Problem, Role
from stepguard.verification import dtype_names
from stepguard.verification.bounded_file import FileSlice
from stepguard.verification.damage import Damaged, ProblemList
from stepguard.verification.dcp_folder import METADATA
from stepguard.verification.file_check import check_file, parse
from stepguard.verification.file_formats import has_checkpoint_suffix
from stepguard.verification.file_layout import ChecksumRange, FileLayout
from stepguard.verification.format_entry import (
    CheckedFolder,
    CheckpointFiles,
    FolderFormat,
    Progress,
)
from stepguard.verification.safetensors_format import SUFFIX, read_safetensors


def check_sealed(
    found: CheckpointFiles, problems: ProblemList, progress: Progress
) -> CheckedFolder:
    """Check all files that the seal names; a file that it does not name is worth a warning."""
    folder = found.path
    try:
        seal = read_seal(folder)
    except StoreError as fault:
        problems.add("seal", str(fault))
        return CheckedFolder([])
    if not seal.health.good:
        why = seal.health.why or "its run was in trouble"
        detail = f"is whole and finite, but not one to resume from: {why}"
        problems.add("diverged", detail)
    owners = _seal_of_each_file(folder, seal, problems)
    layouts = []
    for name in sorted(owners):
        path = folder / name
        if path.is_symlink():
            problems.add("link", f"{name} is a link where the seal has a file; it was not followed")
        elif not path.exists():
            problems.add("missing", f"the seal names {name}, which is not there")
        else:
            sealed = seal.files.get(name) or owners[name].files[name]
            layouts.append(_check_file(path, sealed, owners[name], progress))
    for path in sorted(folder.iterdir()):
        # a rank that has added its own to what another one wrote has a seal that proves itself
        added = not seal.ranks and path.match(RANK_SEALS)
        if path.name not in owners and path.name != SEAL and not added:
            problems.add("seal", f"{path.name} is not named by the seal", severity="warning")
            if path.is_file() and has_checkpoint_suffix(path):
                layouts.append(check_file(path, progress))
    return CheckedFolder(layouts, seal.step)


def _seal_of_each_file(folder: Path, seal: Seal, problems: ProblemList) -> dict[str, Seal]:
    """Which seal knows the tensors of a file: where several ranks have written, its rank's own."""
    owners = dict.fromkeys(seal.files, seal)
    try:
        ranks = read_rank_seals(folder, seal)
    except StoreError as fault:
        problems.add("seal", str(fault))
        return owners
    held: Counter[str] = Counter()
    whole: dict[str, int] = {}
    for own in ranks:
        named = own.files.keys() & seal.files.keys() if seal.ranks else own.files.keys()
        owners.update(dict.fromkeys(named, own))
        for name, part in own.parts.items():
            held[name] += math.prod(own.tensors[name].shape) if name in own.tensors else 0
            whole[name] = math.prod(part.whole)
    for name, needed in whole.items():
        if held[name] != needed:
            detail = f"its parts hold {held[name]:,} of {needed:,} elements"
            problems.add("missing", detail, tensor=name)
    return owners


def _check_file(path: Path, sealed: SealedFile, seal: Seal, progress: Progress) -> FileLayout:
    def read(source: FileSlice, layout: FileLayout, role: Role | None) -> None:
        layout.format = "sealed"
        layout.checksums.append(ChecksumRange(0, source.size, path.name, "xxh3_128", sealed.digest))
        if source.size != sealed.size:
            raise Damaged("torn", f"has {source.size:,} bytes, {sealed.size:,} were sealed")
        if path.suffix == SUFFIX:
            read_safetensors(source, layout, None)
            _compare(layout, seal)
        # a digest says that nobody changed a pickle, not that it is safe to load
        elif has_checkpoint_suffix(path):
            parse(source, layout, role)

    return check_file(path, progress, read=read, allowed=frozenset(seal.nonfinite))


def _compare(layout: FileLayout, seal: Seal) -> None:
    """Compare the header with the seal, and take the element types from the seal."""
    held = {tensor.name for tensor in layout.tensors}
    for name, sealed in seal.tensors.items():
        is_here = sealed.file == layout.path.name and sealed.same_as is None
        if is_here and name not in held:
            layout.problems.add("missing", "is sealed, but not in the file", tensor=name)
    for tensor in layout.tensors:
        known = seal.tensors.get(tensor.name)
        if known is None:
            layout.problems.add("seal", "is in the file, but not sealed", tensor=tensor.name)
            continue
        layout.checksums.append(
            ChecksumRange(
                tensor.start, tensor.size, tensor.name, "xxh3_128", known.digest, tensor.name
            )
        )
        # safetensors has no name for complex numbers and some 8-bit floats: the seal knows them
        if tensor.segment is not None and known.dtype in dtype_names.SIZES:
            tensor.segment.dtype = known.dtype
        tensor.dtype = known.dtype
        tensor.shape = known.shape


def check_store(folder: Path) -> list[Problem]:
    """Check a folder of sealed checkpoints: its pointer, and checkpoints without a seal."""
    problems = []
    try:
        read_pointer(folder)
    except StoreError as fault:
        problems.append(Problem(file=str(folder / LAST_GOOD), kind="seal", detail=str(fault)))
    for damaged in list_entries(folder)[1]:
        if not (damaged.path / SEAL).exists():
            detail = "has no seal: it was never finished"
            problems.append(Problem(file=str(damaged.path), kind="seal", detail=detail))
    return problems


def _is_sealed(files: list[Path]) -> bool:
    names = {path.name for path in files}
    # a folder of torch.distributed.checkpoint may have a seal, too
    return SEAL in names and METADATA not in names


SEALED = FolderFormat(name="sealed", matches=_is_sealed, check=check_sealed, all_files=True)
