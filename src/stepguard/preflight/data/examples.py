"""Examples by name from whatever the subject has: a dataset, a loader, a batch, a file or a folder.

The program's generators are left alone by the caller; the loader's own ones are put back here. A
map-style dataset is read by index, so its loader is not touched at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepguard._errors import ConfigError
from stepguard.preflight.answers import one_line
from stepguard.preflight.data.files import Skipped, find_files, read_rows
from stepguard.preflight.subject import Subject

MOST_OF_A_STREAM = 1024
NAMING = ("id", "idx", "uid", "name", "file", "file_name", "filename", "path")
"""Keys whose value names an example for its owner."""


@dataclass(frozen=True, slots=True)
class Example:
    """One example, or the reason why it cannot be read."""

    name: str
    values: Any = None
    problem: str = ""


@dataclass(slots=True)
class Source:
    """A stream of examples and what is known about it beforehand."""

    what: str
    """`dataset`, `folder data/train`, `loader`, `batch`."""
    examples: Iterable[Example] = ()
    total: int | None = None
    """How many will come, if known."""
    whole: int | None = None
    """How many there are; more than `total` if only a part is read."""
    remarks: list[str] = field(default_factory=list)
    """Filled while reading: kinds of files without a reader."""


def source_of(subject: Subject) -> Source | None:
    """Read the first of data path, dataset, loader and batch that is given."""
    if subject.data is not None:
        return _from_path(Path(subject.data), subject.examples)
    for dataset in (subject.dataset, getattr(subject.loader, "dataset", None)):
        if isinstance(dataset, str | Path):
            return _from_path(Path(dataset), subject.examples)
        if dataset is not None and is_map(dataset):
            return _from_map(dataset, subject.examples)
    if subject.dataset is not None:
        return _from_stream(subject.dataset, "dataset", subject.examples)
    if subject.loader is not None:
        return _from_loader(subject.loader, subject.examples)
    if subject.batch is not None:
        return Source("batch", _rows(subject.batch, "batch"))
    return None


def validation_of(subject: Subject) -> Source | None:
    """Read the second dataset, if there is one."""
    given = subject.validation
    if given is None:
        return None
    if isinstance(given, str | Path):
        return _from_path(Path(given), subject.examples)
    # A loader may be given instead of its dataset.
    given = getattr(given, "dataset", given)
    if is_map(given):
        return _from_map(given, subject.examples)
    return _from_stream(given, "validation", subject.examples)


def is_map(dataset: Any) -> bool:
    """True for a dataset that is read by index."""
    # A dict of datasets has both methods too, but not indices from 0.
    indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return indexed and not isinstance(dataset, dict)


def _from_map(dataset: Any, most: int | None) -> Source:
    """Read by index; an index that raises is an unreadable example."""
    length = len(dataset)
    total = length
    if most is not None:
        total = min(length, most)

    def examples() -> Iterator[Example]:
        for index in range(total):
            try:
                values = dataset[index]
            except Exception as fault:
                yield Example(str(index), problem=one_line(fault, 120))
                continue
            yield Example(_named(index, values), values)

    return Source("dataset", examples(), total, length)


def _from_path(path: Path, most: int | None) -> Source:
    """Read every file of a known kind below the path."""
    if not path.exists():
        raise ConfigError(f"data {path} does not exist; give a data file or folder.")
    found = find_files(path)
    if not found.files:
        raise ConfigError(
            f"data {path} holds no file that can be read; known kinds are npy, npz, safetensors, "
            "csv, tsv, jsonl, parquet, png, jpg and tiff."
        )
    kind = "folder" if path.is_dir() else "file"
    source = Source(f"{kind} {path.name}")
    if found.others:
        source.remarks.append(f"{found.others} files of other kinds were not looked at")
    source.examples = islice(_rows_of_files(path, found.files, source), most)
    return source


def _rows_of_files(path: Path, files: list[Path], source: Source) -> Iterator[Example]:
    for file in files:
        name = file.name
        if path.is_dir():
            name = str(file.relative_to(path))
        try:
            for row, values in read_rows(file, name):
                yield Example(row, values)
        except Skipped as missing:
            if str(missing) not in source.remarks:
                source.remarks.append(str(missing))
        except Exception as fault:
            yield Example(name, problem=one_line(fault, 120))


def _from_stream(stream: Any, what: str, most: int | None) -> Source:
    def examples() -> Iterator[Example]:
        try:
            for index, values in enumerate(stream):
                yield Example(_named(index, values), values)
        except Exception as fault:
            yield Example("stream", problem=one_line(fault, 120))

    return Source(what, islice(examples(), most or MOST_OF_A_STREAM))


def _from_loader(loader: Any, most: int | None) -> Source:
    def examples() -> Iterator[Example]:
        with _kept_generators(loader):
            try:
                for index, batch in enumerate(loader):
                    yield from _rows(batch, f"batch {index}")
            except Exception as fault:
                yield Example("loader", problem=one_line(fault, 120))

    return Source("loader", islice(examples(), most or MOST_OF_A_STREAM))


def first_batch(loader: Any) -> Any:
    """The loader's next first batch, with its generators put back."""
    with _kept_generators(loader):
        iterator = iter(loader)
        try:
            return next(iterator)
        finally:
            # Worker processes would otherwise live until the iterator is collected.
            close = getattr(iterator, "_shutdown_workers", None)
            if callable(close):
                close()


@contextmanager
def _kept_generators(loader: Any) -> Iterator[None]:
    kept = []
    for owner in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            kept.append((generator, generator.get_state()))
    try:
        yield
    finally:
        for generator, state in kept:
            generator.set_state(state)


def _rows(batch: Any, name: str) -> Iterator[Example]:
    """Yield a collated batch row by row, if its tensors share the first dimension."""
    tensors = {}
    for key, part in _parts(batch):
        if isinstance(part, Tensor) and part.dim():
            tensors[str(key)] = part
    sizes = {tensor.shape[0] for tensor in tensors.values()}
    if len(sizes) != 1:
        yield Example(name, batch)
        return
    for row in range(sizes.pop()):
        values = {key: tensor[row] for key, tensor in tensors.items()}
        yield Example(f"{name}, row {row}", values)


def _parts(batch: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(batch, Tensor):
        return [("", batch)]
    if hasattr(batch, "items"):
        return list(batch.items())
    if isinstance(batch, list | tuple):
        return enumerate(batch)
    return []


def _named(index: int, values: Any) -> str:
    """`7 (id chat-0-7)`, if the example names itself."""
    if hasattr(values, "items"):
        for key in NAMING:
            if isinstance(values.get(key), str | int):
                return f"{index} ({key} {values[key]})"
    return str(index)
