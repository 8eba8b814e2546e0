"""Folders of torch.distributed.checkpoint: a pickled `.metadata`, and files of many small zips."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepguard._errors import StoreError
from stepguard.checkpoints.seal import SEAL, SealedFile, read_seal
from stepguard.records.verification import ProblemKind, Role
from stepguard.report.phrases import first_few
from stepguard.verification import limits, pickle_contents, roles
from stepguard.verification.bounded_file import FileSlice
from stepguard.verification.damage import Damaged, ProblemList
from stepguard.verification.file_check import check_file
from stepguard.verification.file_formats import has_checkpoint_suffix
from stepguard.verification.file_layout import ChecksumRange, FileLayout
from stepguard.verification.format_entry import (
    CheckedFolder,
    CheckpointFiles,
    FolderFormat,
    Progress,
    Read,
)
from stepguard.verification.pickle_stream import PickleReader
from stepguard.verification.pickle_tensors import names_reported
from stepguard.verification.pickle_values import PickledObject, TensorRecord
from stepguard.verification.torch_zip_format import SIGNATURE, read_zip

METADATA = ".metadata"
DATA_SUFFIX = ".distcp"
"""Of the files with the tensors."""
ANOTHER = "the file was written by another save"


@dataclass(frozen=True, slots=True)
class DcpItem:
    """One stored item: a whole tensor, a part of one, or an object."""

    name: str
    file: str
    offset: int
    length: int
    transformed: bool
    """Compressed or encrypted by an extension of the writer."""
    shape: tuple[int, ...] | None = None
    """Of the piece, as `.metadata` describes it; None for an object."""


def check_dcp(found: CheckpointFiles, problems: ProblemList, progress: Progress) -> CheckedFolder:
    """Check `.metadata` and every file that it names."""
    folder = found.path
    if (folder / METADATA).is_symlink():
        return _refused(folder, "link", f"{METADATA} is a link; it was not followed")
    if not (folder / METADATA).exists():
        names = first_few(sorted(path.name for path in folder.glob(f"*{DATA_SUFFIX}")), 5)
        detail = (
            f"has no {METADATA}, which is written last: the save of {names} never finished, "
            f"and it cannot be loaded"
        )
        return _refused(folder, "missing", detail)
    items: list[DcpItem] = []
    sealed = _sealed_files(folder, problems)

    def read(source: FileSlice, layout: FileLayout, role: Role | None) -> None:
        layout.format = "DCP"
        _compare_with_seal(source, layout, sealed)
        # torch itself loads `.metadata` with plain pickle, so its names matter most
        reader = PickleReader(source)
        with names_reported(layout, reader.seen):
            value = reader.value()
        items.extend(_items(value))
        _check_completeness(value, layout.problems)

    metadata = check_file(folder / METADATA, progress, read=read)
    layouts = _check_files(folder, items, sealed, metadata.problems, progress)
    named = {layout.path.name for layout in layouts}
    # what a library keeps beside it (`common.pt`, the metadata of one rank) is loaded as well
    for path in found.files:
        if path.name.endswith(METADATA) and path.name != METADATA:
            layouts.append(check_file(path, progress, read=_read_metadata))
        elif path.name not in named and has_checkpoint_suffix(path):
            layouts.append(check_file(path, progress))
    if metadata.complete:
        _report_unnamed(folder, items, metadata.problems)
    for name in sorted(sealed):
        if not (folder / name).exists():
            problems.add("missing", f"the seal names {name}, which is not there")
    return CheckedFolder([metadata, *layouts])


def _read_metadata(source: FileSlice, layout: FileLayout, role: Role | None) -> None:
    reader = PickleReader(source)
    with names_reported(layout, reader.seen):
        reader.value()


def _sealed_files(folder: Path, problems: ProblemList) -> dict[str, SealedFile]:
    """Return what a seal says of the files; nothing where there is none."""
    if not (folder / SEAL).exists():
        return {}
    try:
        return dict(read_seal(folder).files)
    except StoreError as fault:
        problems.add("seal", str(fault))
        return {}


def _compare_with_seal(
    source: FileSlice, layout: FileLayout, sealed: Mapping[str, SealedFile]
) -> None:
    """Have the bytes of a file compared with the seal; a file of another save differs in them."""
    name = layout.path.name
    if name in sealed:
        digest = sealed[name].digest
        layout.checksums.append(ChecksumRange(0, source.size, name, "xxh3_128", digest))
    elif sealed:
        layout.problems.add("seal", "is not named by the seal")


def _refused(folder: Path, kind: ProblemKind, detail: str) -> CheckedFolder:
    layout = FileLayout(folder / METADATA, "DCP", 0, ProblemList(str(folder)))
    layout.problems.add(kind, detail)
    return CheckedFolder([layout])


def _check_files(
    folder: Path,
    items: Sequence[DcpItem],
    sealed: Mapping[str, SealedFile],
    problems: ProblemList,
    progress: Progress,
) -> list[FileLayout]:
    by_file: dict[str, list[DcpItem]] = {}
    for item in items:
        by_file.setdefault(item.file, []).append(item)
    layouts = []
    for name, held in sorted(by_file.items()):
        if Path(name).name != name or name in ("", ".", ".."):
            problems.add(
                "hostile",
                f"names the file {name!r}, which lies outside the folder; it was not opened",
            )
        elif not (folder / name).exists():
            lost = first_few((item.name for item in held), 5)
            problems.add("missing", f"names {name}, which is not there; it holds {lost}")
        elif (folder / name).is_symlink():
            problems.add("link", f"{name} is a link; it was not followed")
        else:
            layouts.append(check_file(folder / name, progress, read=_reader(held, sealed)))
    return layouts


def _report_unnamed(folder: Path, items: Sequence[DcpItem], problems: ProblemList) -> None:
    named = {item.file for item in items}
    for path in sorted(folder.glob(f"*{DATA_SUFFIX}")):
        if path.name not in named:
            problems.add("index", f"{path.name} is not named by {METADATA}", severity="warning")


def _reader(items: list[DcpItem], sealed: Mapping[str, SealedFile]) -> Read:
    def read(source: FileSlice, layout: FileLayout, role: Role | None) -> None:
        layout.format = "DCP"
        _compare_with_seal(source, layout, sealed)
        end = 0
        for item in sorted(items, key=lambda item: item.offset):
            try:
                if item.offset < end:
                    raise Damaged("hostile", f"{item.name} shares its bytes with another item")
                end = item.offset + item.length
                _read_item(source.part(item.offset, item.length), layout, item)
            except Damaged as damage:
                layout.problems.add(damage.kind, damage.detail, tensor=item.name)
        if source.size > end:
            layout.problems.add(
                "index", f"has {source.size:,} bytes and {METADATA} describes {end:,}: {ANOTHER}"
            )

    return read


def _read_item(source: FileSlice, layout: FileLayout, item: DcpItem) -> None:
    if item.transformed or source.at(0, len(SIGNATURE)) != SIGNATURE:
        # torch unpacks such an item and loads an object in it with pickle
        raise Damaged("format", "is stored in a form that is not read, and torch would load it")
    role = _role(item.name)
    value = read_zip(source, layout, role, prefix=f"{item.name}/").root
    if isinstance(value, TensorRecord) and item.shape not in (None, tuple(value.shape)):
        described = f"{list(value.shape)} here and {list(item.shape or ())} in {METADATA}"
        layout.problems.add("index", f"is {described}: {ANOTHER}", tensor=item.name)
    if isinstance(value, float) and role is not None:
        _add_number(layout, item.name, role, value)


def _role(name: str) -> Role | None:
    """Tell the role by the first part of a name, or by the second (`app.optimizer.state.lr`)."""
    parts = name.split(".")
    role = roles.named(parts[0])
    if role is None and len(parts) > 2:
        role = roles.named(parts[1])
    return role


def _add_number(layout: FileLayout, name: str, role: Role, value: float) -> None:
    """Add a float that is an item of its own: DCP flattens states down to their single values."""
    contents = pickle_contents.PickleContents()
    key = name.rpartition(".")[2]
    if not math.isfinite(value):
        contents.numbers.append((name.replace(".", "/"), role, value))
    elif key in pickle_contents.RATES:
        contents.rates.append((name, pickle_contents.RATES[key], value))
    layout.add_contents(contents)


def _items(value: Any) -> list[DcpItem]:
    stored = value.field("storage_data") if isinstance(value, PickledObject) else None
    if not isinstance(stored, dict):
        raise Damaged("malformed", f"{METADATA} holds no storage_data")
    shapes = _shapes(value)
    return [_item(index, info, shapes) for index, info in stored.items()]


def _shapes(value: PickledObject) -> dict[tuple[str, tuple[int, ...]], tuple[int, ...]]:
    """Return the shape of every piece that is described, by its tensor and its place in it."""
    found: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
    described = value.field("state_dict_metadata")
    if not isinstance(described, dict):
        return found
    for name, entry in described.items():
        chunks = entry.field("chunks") if isinstance(entry, PickledObject) else None
        for chunk in chunks if isinstance(chunks, list) else ():
            if not isinstance(chunk, PickledObject) or not isinstance(name, str):
                continue
            offsets = chunk.field("offsets")
            sizes = chunk.field("sizes")
            if limits.is_shape(offsets) and limits.is_shape(sizes):
                found[name, tuple(offsets)] = tuple(sizes)
    return found


def _item(
    index: Any, info: Any, shapes: Mapping[tuple[str, tuple[int, ...]], tuple[int, ...]]
) -> DcpItem:
    if not isinstance(index, PickledObject) or not isinstance(info, PickledObject):
        raise Damaged("malformed", f"{METADATA} names a piece by a {type(index).__name__}")
    name = index.field("fqn")
    file = info.field("relative_path")
    offset = info.field("offset")
    length = info.field("length")
    is_named = isinstance(name, str) and isinstance(file, str)
    if not is_named or type(offset) is not int or type(length) is not int:
        raise Damaged("malformed", f"{METADATA} does not say where a piece lies")
    transformed = bool(info.field("transform_descriptors"))
    at = index.field("offset")
    shape = shapes.get((name, tuple(at))) if limits.is_shape(at) else None
    return DcpItem(name, file, offset, length, transformed, shape)


def _check_completeness(value: Any, problems: ProblemList) -> None:
    """Report tensors whose parts are not all stored, or do not make up the whole tensor."""
    stored = Counter(index.field("fqn") for index in value.field("storage_data"))
    described = value.field("state_dict_metadata")
    if not isinstance(described, dict):
        return
    for name, entry in described.items():
        if not isinstance(name, str) or not isinstance(entry, PickledObject):
            continue
        if name not in stored:
            problems.add("missing", "is described but stored nowhere", tensor=name)
        else:
            _check_parts(name, entry, stored[name], problems)


def _check_parts(name: str, entry: PickledObject, stored: int, problems: ProblemList) -> None:
    chunks = entry.field("chunks")
    size = entry.field("size")
    if not isinstance(chunks, list) or not limits.is_shape(size):
        return
    held = 0
    for chunk in chunks:
        if isinstance(chunk, PickledObject) and limits.is_shape(chunk.field("sizes")):
            held += math.prod(chunk.field("sizes"))
    needed = math.prod(size)
    if held < needed or stored < len(chunks):
        detail = (
            f"its pieces hold {held:,} of {needed:,} elements, {stored} of {len(chunks)} stored"
        )
        problems.add("missing", detail, tensor=name)


def _is_dcp(files: list[Path]) -> bool:
    return any(path.name == METADATA or path.name.endswith(DATA_SUFFIX) for path in files)


DCP = FolderFormat(name="DCP", matches=_is_dcp, check=check_dcp, all_files=True)
