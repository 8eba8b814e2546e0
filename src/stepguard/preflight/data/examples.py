"""Examples by name from whatever the subject has: a dataset, a loader, a batch, a file or a folder.

The program's generators are left alone by the caller; the loader's own ones are put back here. A
map-style dataset is read by index, so its loader is not touched at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepguard._errors import ConfigError
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
    examples: Iterator[Example]
    total: int | None = None
    """How many will come, if known."""
    whole: int | None = None
    """How many there are; more than `total` when only a part is looked at."""
    remarks: list[str] = field(default_factory=list)
    """Filled while reading: kinds of files without a reader."""


def source_of(subject: Subject) -> Source | None:
    """The first of data path, dataset, loader, batch that is there."""
    if subject.data is not None:
        return from_path(Path(subject.data), subject.examples)
    inner = getattr(subject.loader, "dataset", None)
    for dataset in (subject.dataset, inner):
        if isinstance(dataset, str | Path):
            return from_path(Path(dataset), subject.examples)
        if dataset is not None and is_map(dataset):
            return from_dataset(dataset, subject.examples)
    if subject.dataset is not None:
        return _stream(subject.dataset, "dataset", subject.examples)
    if subject.loader is not None:
        return _batches(subject.loader, subject.examples)
    if subject.batch is not None:
        return Source("batch", _rows(subject.batch, "batch"))
    return None


def validation_of(subject: Subject) -> Source | None:
    """The second dataset, if there is one."""
    given = subject.validation
    if given is None:
        return None
    if isinstance(given, str | Path):
        return from_path(Path(given), subject.examples)
    given = getattr(given, "dataset", given)
    if is_map(given):
        return from_dataset(given, subject.examples)
    return _stream(given, "validation", subject.examples)


def is_map(dataset: Any) -> bool:
    return (
        hasattr(dataset, "__len__")
        and hasattr(dataset, "__getitem__")
        and not isinstance(dataset, dict)
    )


def from_dataset(dataset: Any, most: int | None) -> Source:
    """By index; an index that raises is an unreadable example."""
    length = len(dataset)
    total = min(length, most) if most is not None else length

    def examples() -> Iterator[Example]:
        for index in range(total):
            try:
                values = dataset[index]
            except Exception as fault:
                yield Example(str(index), problem=_said(fault))
                continue
            yield Example(_named(index, values), values)

    return Source("dataset", examples(), total, length)


def from_path(path: Path, most: int | None) -> Source:
    """Every known file below the path."""
    if not path.exists():
        raise ConfigError(f"data {path} does not exist.")
    found = find_files(path)
    if not found.files:
        raise ConfigError(
            f"data {path} holds no file that can be read; known kinds are npy, npz, safetensors, "
            f"csv, "
            "tsv, jsonl, parquet, png and jpg."
        )
    what = f"{'folder' if path.is_dir() else 'file'} {path.name}"
    source = Source(what, iter(()), len(found.files), None)
    if found.others:
        source.remarks.append(f"{found.others} files of other kinds were not looked at")
    source.examples = islice(_files(path, found.files, source), most)
    return source


def _files(path: Path, files: list[Path], source: Source) -> Iterator[Example]:
    for file in files:
        name = str(file.relative_to(path)) if path.is_dir() else file.name
        try:
            for row, values in read_rows(file, name):
                yield Example(row, values)
        except Skipped as missing:
            if str(missing) not in source.remarks:
                source.remarks.append(str(missing))
        except Exception as fault:
            yield Example(name, problem=_said(fault))


def _stream(stream: Any, what: str, most: int | None) -> Source:
    limit = most if most is not None else MOST_OF_A_STREAM

    def examples() -> Iterator[Example]:
        try:
            for index, values in enumerate(islice(iter(stream), limit)):
                yield Example(_named(index, values), values)
        except Exception as fault:
            yield Example("stream", problem=_said(fault))

    return Source(what, examples(), None, None)


def _batches(loader: Any, most: int | None) -> Source:
    limit = most if most is not None else MOST_OF_A_STREAM

    def examples() -> Iterator[Example]:
        with kept_generators(loader):
            try:
                for index, batch in enumerate(loader):
                    yield from _rows(batch, f"batch {index}")
            except Exception as fault:
                yield Example("loader", problem=_said(fault))

    return Source("loader", islice(examples(), limit), None, None)


def first_batch(loader: Any) -> Any:
    """The loader's next first batch, with its generators put back."""
    with kept_generators(loader):
        iterator = iter(loader)
        try:
            return next(iterator)
        finally:
            close = getattr(iterator, "_shutdown_workers", None)
            if callable(close):
                close()


@contextmanager
def kept_generators(loader: Any) -> Iterator[None]:
    owners = (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    kept = [
        (generator, generator.get_state())
        for generator in found
        if isinstance(generator, torch.Generator)
    ]
    try:
        yield
    finally:
        for generator, state in kept:
            generator.set_state(state)


def _rows(batch: Any, name: str) -> Iterator[Example]:
    """A collated batch row by row, as far as its tensors share the first dimension."""
    parts = (
        dict(batch)
        if hasattr(batch, "items")
        else dict(enumerate(batch))
        if isinstance(batch, list | tuple)
        else {}
    )
    if not parts and isinstance(batch, Tensor):
        parts = {"": batch}
    sizes = {part.shape[0] for part in parts.values() if isinstance(part, Tensor) and part.dim()}
    if len(sizes) != 1:
        yield Example(name, batch)
        return
    for row in range(sizes.pop()):
        values = {str(k): v[row] for k, v in parts.items() if isinstance(v, Tensor) and v.dim()}
        yield Example(f"{name}, row {row}", values)


def _named(index: int, values: Any) -> str:
    for key in NAMING:
        if hasattr(values, "items") and isinstance(values.get(key), str | int):
            return f"{index} ({key} {values[key]})"
    return str(index)


def _said(fault: Exception) -> str:
    return f"{type(fault).__name__}: {' '.join(str(fault).split())[:120]}"
