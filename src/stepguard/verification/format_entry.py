"""Entries of the format tables `file_formats.FORMATS` and `checkpoint_search.FOLDER_FORMATS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepguard.records.verification import Role
from stepguard.verification.bounded_file import FileSlice
from stepguard.verification.damage import ProblemList
from stepguard.verification.file_layout import FileLayout

TORCH_SUFFIXES = frozenset({".pt", ".pth", ".ckpt", ".th", ".pyth"})
TORCH_SHARED_SUFFIXES = frozenset({".bin"})
"""Suffixes of torch.save; other programs write `.bin` files too."""
Progress = Callable[[int], None]
"""Takes the number of bytes that were read since the last call."""
Read = Callable[[FileSlice, FileLayout, Role | None], object]
"""Fills the layout of a file, or raises Damaged; the role is what the name of the file says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    """One format of checkpoint files."""

    name: str
    """As `Verification.format` says it."""
    matches: Callable[[FileSlice, str], bool]
    """Takes the file and its suffix in lower case: is it one of this format?"""
    read: Read
    read_content: Callable[[FileSlice], Any]
    """Returns what the file holds, with records in the place of tensors. Runs nothing."""
    suffixes: frozenset[str] = frozenset()
    """Suffixes that promise a checkpoint."""
    shared_suffixes: frozenset[str] = frozenset()
    """Suffixes of many kinds of files; one that is not a checkpoint is passed over."""
    starts: tuple[bytes, ...] = ()
    """First bytes that make a file with a shared suffix worth reading."""


@dataclass(frozen=True, slots=True)
class CheckedFolder:
    """The files of a checkpoint folder after reading, and what the folder says about itself."""

    layouts: list[FileLayout]
    step: int | None = None
    format: str = ""
    """A more exact name than that of the table entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFormat:
    """One kind of folder that is a single checkpoint."""

    name: str
    matches: Callable[[list[Path]], bool]
    """Takes the files of a folder, without those below it: are they one checkpoint of this kind?"""
    check: Callable[[CheckpointFiles, ProblemList, Progress], CheckedFolder]
    all_files: bool = False
    """Every file belongs to it; otherwise only those with the suffix of a checkpoint."""


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """One checkpoint that was found: a file, or a folder with the files that make it up."""

    path: Path
    files: tuple[Path, ...]
    size: int
    folder_format: FolderFormat | None = None
    """None for a single file."""
