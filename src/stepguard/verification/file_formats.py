"""The table of checkpoint file formats. To add one: write `x_format.py`, extend FORMATS."""

from __future__ import annotations

import pickle
import tarfile
from pathlib import Path
from typing import Any

from stepguard.verification.bounded_file import FileSlice, open_file
from stepguard.verification.damage import Damaged, NotPickled
from stepguard.verification.format_entry import FileFormat
from stepguard.verification.pickle_format import PICKLE, TORCH_LEGACY
from stepguard.verification.pickle_stream import PickleReader
from stepguard.verification.safetensors_format import SAFETENSORS
from stepguard.verification.torch_zip_format import TORCH_ZIP

FORMATS: tuple[FileFormat, ...] = (TORCH_ZIP, SAFETENSORS, TORCH_LEGACY, PICKLE)
"""The first one that matches a file reads it."""
SURE_SUFFIXES = frozenset().union(*(entry.suffixes for entry in FORMATS))
SUFFIXES = SURE_SUFFIXES.union(*(entry.shared_suffixes for entry in FORMATS))
STARTS = tuple(start for entry in FORMATS for start in entry.starts)
WEIGHTS = (
    "pytorch_model",
    "adapter_model",
    "optimizer",
    "model",
    "diffusion_pytorch_model",
    "random_states",
)
"""First words of file names that libraries give to checkpoints."""
NOT_READ = {b"GGUF": "GGUF", b"\x89HDF": "HDF5", b"\x93NUM": "NumPy"}
"""First bytes of formats that hold tensors, but are not read here."""


def format_of(source: FileSlice, path: Path) -> FileFormat:
    """Choose the format of a file in the order of torch.load; Damaged if no format matches."""
    suffix = path.suffix.lower()
    if not source.size:
        raise Damaged("torn", "is empty")
    # by content, not by name: people rename `.bin` to `.pt` and back
    for entry in FORMATS:
        if entry.matches(source, suffix):
            if entry is not TORCH_ZIP:
                _refuse_tar(source)
            if entry is SAFETENSORS and not path.name.endswith(".safetensors"):
                _refuse_pickle(source)
            return entry
    _refuse_tar(source)
    raise _not_a_checkpoint(source.at(0, 512))


def _refuse_tar(source: FileSlice) -> None:
    """Raise Damaged for a tar, which torch.load unpacks before it tries anything else."""
    try:
        tarfile.TarInfo.frombuf(source.at(0, tarfile.BLOCKSIZE), "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return
    raise Damaged(
        "format",
        "is a tar (torch.save before 0.1.10); load it with an old torch and save it again",
    )


def _refuse_pickle(source: FileSlice) -> None:
    """Raise Damaged for a safetensors file that torch.load would read as a pickle, by its name."""
    reader = PickleReader(source)
    # they need a stack, or what torch does not give to the first pickle of a file
    if source.at(0, 1) in (pickle.PUT, pickle.PERSID):
        return
    try:
        reader.value()
    except NotPickled:
        if not reader.seen.names:
            return
    except Damaged:
        # more than is read here, but an unpickler would go on
        pass
    raise Damaged(
        "hostile",
        "is a safetensors file and a pickle at once, and is not called .safetensors: torch.load "
        "would run the pickle",
    )


def read_content(path: Path) -> Any:
    """Return what a checkpoint file holds, as plain containers and records; runs nothing of it.

    Raises Damaged for what cannot be read, and for a pickle that was made to run code.
    """
    with open_file(path) as source:
        return format_of(source, path).read_content(source)


def has_checkpoint_suffix(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def is_checkpoint_name(path: Path) -> bool:
    """Tell a checkpoint by its name; with a shared suffix, only if libraries use such a name."""
    suffix = path.suffix.lower()
    if suffix in SURE_SUFFIXES:
        return True
    return suffix in SUFFIXES and path.name.lower().startswith(WEIGHTS)


def is_checkpoint_file(path: Path) -> bool:
    """Tell a checkpoint by its name; of `x.bin`, `x.pkl`, `x.tar` the content decides."""
    if is_checkpoint_name(path):
        return True
    # tutorials of PyTorch call checkpoints `x.tar`, though they are not tars
    if not has_checkpoint_suffix(path) and path.suffix.lower() != ".tar":
        return False
    try:
        with open_file(path) as source:
            return source.at(0, 16).startswith(STARTS) or _is_loaded(source, path)
    except Damaged:
        return False


def _is_loaded(source: FileSlice, path: Path) -> bool:
    """Would torch.load unpack it as a tar, or import a name for it as an older pickle?"""
    try:
        _refuse_tar(source)
    except Damaged:
        return True
    reader = PickleReader(source)
    try:
        reader.value()
    except NotPickled:
        pass
    except Damaged as damage:
        if damage.kind == "limit" or path.suffix.lower() in PICKLE.shared_suffixes:
            return True
    # any text has lines; an extension stands for nothing unless the program has registered one
    return any(
        name.module != "copyreg" and name.module.replace(".", "_").isidentifier()
        for name in reader.seen.names
    )


def _not_a_checkpoint(head: bytes) -> Damaged:
    if not any(head):
        return Damaged("torn", "begins with zeros: its content never reached the disk")
    known = NOT_READ.get(head[:4])
    if known:
        return Damaged("format", f"is a {known} file, which is not read here")
    return Damaged(
        "malformed", f"begins with {head[:8].hex(' ')}, which no known checkpoint format does"
    )
