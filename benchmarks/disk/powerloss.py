"""What a power cut may leave: recorded operations, replayed up to any point, with what was never
synced lost.

A file's data is durable when the file was synced, a name when its folder was. Beyond that a disk
may keep or lose anything, so every prefix is opened under several fates: data kept, dropped or
zeroed; names kept, dropped, or only the newest kept (a disk that reorders). As SQLite's crash tests
do it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from stepguard.state.files import Operation

DataFate = Literal["kept", "dropped", "zeroed"]
NameFate = Literal["kept", "dropped", "newest"]
FATES: tuple[tuple[DataFate, NameFate], ...] = tuple(
    (data, name) for data in ("kept", "dropped", "zeroed") for name in ("kept", "dropped", "newest")
)


@dataclass(slots=True)
class FileNode:
    """A file's bytes in memory and on the platter."""

    now: bytearray = field(default_factory=bytearray)
    durable: bytes = b""

    def after(self, fate: DataFate) -> bytes:
        if fate == "kept":
            return bytes(self.now)
        return self.durable if fate == "dropped" else self.durable.ljust(len(self.now), b"\0")


@dataclass(slots=True)
class FolderNode:
    """A folder's names in memory and on the platter, and the changes between."""

    now: dict[str, FileNode | FolderNode] = field(default_factory=dict)
    durable: dict[str, FileNode | FolderNode] = field(default_factory=dict)
    pending: list[tuple[str | None, str | None, FileNode | FolderNode]] = field(
        default_factory=list
    )
    """(name that goes, name that comes, what it names)"""

    def change(self, goes: str | None, comes: str | None, node: FileNode | FolderNode) -> None:
        _apply(self.now, goes, comes, node)
        self.pending.append((goes, comes, node))

    def sync(self) -> None:
        self.durable, self.pending = dict(self.now), []

    def after(self, fate: NameFate) -> dict[str, FileNode | FolderNode]:
        names = dict(self.durable)
        chosen = {"kept": self.pending, "dropped": [], "newest": self.pending[-1:]}[fate]
        for goes, comes, node in chosen:
            _apply(names, goes, comes, node)
        return names


def _apply(
    names: dict[str, FileNode | FolderNode],
    goes: str | None,
    comes: str | None,
    node: FileNode | FolderNode,
) -> None:
    if goes is not None:
        names.pop(goes, None)
    if comes is not None:
        names[comes] = node


class Platter:
    """A folder as the recorded operations leave it."""

    def __init__(self, root: Path) -> None:
        self.root, self.top = root, FolderNode()

    def apply(self, operation: Operation) -> None:
        if operation.kind == "sync_folder":
            if operation.path.is_relative_to(self.root):
                self._folder(operation.path).sync()
            return
        parent, name = self._folder(operation.path.parent), operation.path.name
        if operation.kind in ("mkdir", "create"):
            parent.change(None, name, FolderNode() if operation.kind == "mkdir" else FileNode())
        elif operation.kind == "rename":
            assert operation.target is not None and operation.target.parent == operation.path.parent
            parent.change(name, operation.target.name, parent.now[name])
        elif operation.kind in ("unlink", "rmdir"):
            parent.change(name, None, parent.now[name])
        else:
            self._on_file(operation, parent.now[name])

    def lay_out(self, where: Path, data: DataFate, names: NameFate) -> None:
        """Write what is left into an empty folder."""
        _lay_out(self.top, where, data, names)

    def _on_file(self, operation: Operation, node: FileNode | FolderNode) -> None:
        assert isinstance(node, FileNode)
        if operation.kind == "sync":
            node.durable = bytes(node.now)
        else:
            assert operation.kind == "write" and operation.data is not None
            node.now[operation.offset : operation.offset + len(operation.data)] = operation.data

    def _folder(self, path: Path) -> FolderNode:
        node: FileNode | FolderNode = self.top
        for part in path.relative_to(self.root).parts:
            assert isinstance(node, FolderNode)
            node = node.now[part]
        assert isinstance(node, FolderNode)
        return node


def _lay_out(folder: FolderNode, where: Path, data: DataFate, names: NameFate) -> None:
    where.mkdir()
    for name, node in folder.after(names).items():
        if isinstance(node, FolderNode):
            _lay_out(node, where / name, data, names)
        else:
            (where / name).write_bytes(node.after(data))


def prefixes(root: Path, operations: Sequence[Operation]) -> Iterator[tuple[int, Platter]]:
    """The platter after 0, 1, 2, ... operations."""
    platter = Platter(root)
    yield 0, platter
    for number, operation in enumerate(operations, start=1):
        platter.apply(operation)
        yield number, platter
