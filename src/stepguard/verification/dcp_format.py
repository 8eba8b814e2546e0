"""Folders of torch.distributed.checkpoint: a pickled `.metadata`, and files of many small
torch.save zips.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepguard.records.verification import ProblemKind, Role
from stepguard.verification import pickle_contents, roles
from stepguard.verification.bounded_file import Window
from stepguard.verification.damage import Damaged, Notes, listed
from stepguard.verification.file_layout import Layout
from stepguard.verification.files import Progress, check_file
from stepguard.verification.pickle_values import Made
from stepguard.verification.torch_format import read_value, read_zip, report_names

METADATA = ".metadata"
PIECES = ".distcp"
"""Ending of the files with the tensors."""


@dataclass(frozen=True, slots=True)
class Item:
    """One stored piece: a whole tensor, a part of one, or an object."""

    name: str
    file: str
    offset: int
    length: int
    transformed: bool


def check_dcp(folder: Path, progress: Progress) -> list[Layout]:
    """All layouts of the folder, `.metadata` first."""
    if (folder / METADATA).is_symlink():
        return [_refused(folder, "link", f"{METADATA} is a link; it was not followed")]
    if not (folder / METADATA).exists():
        return [_refused(folder, "missing", _never_finished(folder))]
    items: list[Item] = []

    def read(window: Window, layout: Layout, role: Role | None) -> None:
        layout.format = "DCP"
        value, names = read_value(window)
        report_names(layout, names)
        items.extend(_items(value, layout.notes))
        _whole_tensors(value, layout.notes)

    first = check_file(folder / METADATA, progress, read=read)
    return [first, *_check_files(folder, items, first.notes, progress, first.whole)]


def _refused(folder: Path, kind: ProblemKind, detail: str) -> Layout:
    layout = Layout(folder / METADATA, "DCP", 0, Notes(str(folder)))
    layout.notes.add(kind, detail)
    return layout


def _never_finished(folder: Path) -> str:
    """torch writes `.metadata` last, so a folder without one cannot be loaded."""
    pieces = listed([path.name for path in sorted(folder.glob(f"*{PIECES}"))])
    return (
        f"has no {METADATA}, which is written last: the save of {pieces} never finished, and it "
        f"cannot be loaded"
    )


def _check_files(
    folder: Path, items: list[Item], notes: Notes, progress: Progress, whole: bool
) -> list[Layout]:
    files: dict[str, list[Item]] = {}
    for item in items:
        files.setdefault(item.file, []).append(item)
    layouts = []
    for name, held in sorted(files.items()):
        if Path(name).name != name or name in ("", ".", ".."):
            notes.add(
                "hostile",
                f"names the file {name!r}, which lies outside the folder; it was not opened",
            )
        elif not (folder / name).exists():
            notes.add(
                "missing",
                f"names {name}, which is not there; it holds {listed([i.name for i in held])}",
            )
        elif (folder / name).is_symlink():
            notes.add("link", f"{name} is a link; it was not followed")
        else:
            layouts.append(check_file(folder / name, progress, read=_reader(held)))
    if whole:
        for path in sorted(folder.glob(f"*{PIECES}")):
            if path.name not in files:
                notes.add("index", f"{path.name} is not named by {METADATA}", severity="warning")
    return layouts


def _reader(held: list[Item]) -> Callable[[Window, Layout, Role | None], None]:
    def read(window: Window, layout: Layout, role: Role | None) -> None:
        layout.format = "DCP"
        end = 0
        for item in sorted(held, key=lambda item: item.offset):
            try:
                if item.offset < end:
                    raise Damaged("hostile", f"{item.name} shares its bytes with another item")
                end = item.offset + item.length
                _read_item(window.window(item.offset, item.length), layout, item)
            except Damaged as damage:
                layout.notes.add(damage.kind, damage.detail, tensor=item.name)

    return read


def _read_item(window: Window, layout: Layout, item: Item) -> None:
    parts = item.name.split(".")
    role = roles.named(parts[0]) or (roles.named(parts[1]) if len(parts) > 2 else None)
    if item.transformed or window.at(0, 2) != b"PK":
        layout.notes.add(
            "format", "is stored in a form that is not read", tensor=item.name, severity="warning"
        )
        return
    held = read_zip(window, layout, role, prefix=f"{item.name}/")
    if isinstance(held.root, float) and role is not None:
        number = pickle_contents.Contents()
        if not math.isfinite(held.root):
            number.numbers.append((item.name.replace(".", "/"), role, held.root))
        elif parts[-1] in pickle_contents.RATES:
            number.rates.append((item.name, pickle_contents.RATES[parts[-1]], held.root))
        layout.take(number)


def _items(value: Any, notes: Notes) -> list[Item]:
    stored = value.field("storage_data") if isinstance(value, Made) else None
    if not isinstance(stored, dict):
        raise Damaged("malformed", f"{METADATA} holds no storage_data")
    found = []
    for index, info in stored.items():
        if not isinstance(index, Made) or not isinstance(info, Made):
            raise Damaged("malformed", f"{METADATA} names a piece by a {type(index).__name__}")
        name, file = index.field("fqn"), info.field("relative_path")
        offset, length = info.field("offset"), info.field("length")
        if (
            not isinstance(name, str)
            or not isinstance(file, str)
            or type(offset) is not int
            or type(length) is not int
        ):
            raise Damaged("malformed", f"{METADATA} does not say where a piece lies")
        found.append(Item(name, file, offset, length, bool(info.field("transform_descriptors"))))
    return found


def _whole_tensors(value: Any, notes: Notes) -> None:
    """Do the pieces of a tensor make up the whole of it, and is each of them stored?"""
    described = value.field("state_dict_metadata")
    stored: dict[str, int] = {}
    for index in value.field("storage_data"):
        stored[index.field("fqn")] = stored.get(index.field("fqn"), 0) + 1
    for name, entry in described.items() if isinstance(described, dict) else ():
        if not isinstance(name, str) or not isinstance(entry, Made):
            continue
        if name not in stored:
            notes.add("missing", "is described but stored nowhere", tensor=name)
            continue
        chunks, size = entry.field("chunks"), entry.field("size")
        if isinstance(chunks, list) and _numbers(size):
            parts = [chunk.field("sizes") for chunk in chunks if isinstance(chunk, Made)]
            held = sum(math.prod(part) for part in parts if _numbers(part))
            if held < math.prod(size) or stored[name] < len(chunks):
                detail = (
                    f"its pieces hold {held:,} of {math.prod(size):,} elements, "
                    f"{stored[name]} of {len(chunks)} stored"
                )
                notes.add("missing", detail, tensor=name)


def _numbers(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(type(n) is int for n in value)
