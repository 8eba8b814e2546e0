"""The data, example by example: where it comes from, how files are read, and one scan over it."""

from __future__ import annotations

import csv
import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Subset

from stepguard._errors import ConfigError
from stepguard.check.subject import Subject
from stepguard.report.phrases import count
from stepguard.state.batch import children
from stepguard.state.loader import as_indices

NAMING = ("id", "idx", "uid", "name", "file", "file_name", "filename", "path", "index")
"""Keys whose value names an example and is not part of its content."""
LABEL_KEYS = ("labels", "label", "targets", "target", "y")

Row = tuple[str, Any]
"""Name of an example, and its values; an exception where it cannot be read."""
Progress = Callable[[int, int | None], None]

# --- Data files: their rows by line number, without running anything they hold.


class Skipped(Exception):  # noqa: N818 (an answer, not a fault)
    """The library for this kind of file is not installed; the text names it."""


Rows = Callable[[Path], Iterator[Row]]
READERS: dict[str, Rows] = {}
"""Suffix of a file -> what reads it."""


def _reads(*suffixes: str) -> Callable[[Rows], Rows]:
    def note(reader: Rows) -> Rows:
        READERS.update(dict.fromkeys(suffixes, reader))
        return reader

    return note


@_reads(".npy", ".npz")
def _numpy(file: Path) -> Iterator[Row]:
    import numpy

    # Pickled arrays are refused.
    loaded = numpy.load(file, allow_pickle=False)
    if not hasattr(loaded, "files"):
        loaded = {"": loaded}
    yield "", dict(loaded)


@_reads(".safetensors")
def _safetensors(file: Path) -> Iterator[Row]:
    from safetensors.torch import load_file

    yield "", load_file(file)


@_reads(".csv", ".tsv")
def _csv(file: Path) -> Iterator[Row]:
    # The csv module finds line ends itself: they may lie inside of quotes.
    with file.open(encoding="utf-8", newline="") as stream:
        delimiter = "\t" if file.suffix == ".tsv" else ","
        lines = csv.reader(stream, delimiter=delimiter, strict=True)
        header = next(lines, [])
        for line, cells in enumerate(lines, start=2):
            if cells and len(cells) != len(header):
                raise ValueError(f"line {line} has {len(cells)} cells, the header {len(header)}")
            values: dict[str, float | str] = dict(zip(header, cells, strict=False))
            for name, text in values.items():
                with suppress(ValueError):
                    values[name] = float(text)
            # An empty line is an example without values.
            yield f":{line}", values


@_reads(".jsonl")
def _jsonl(file: Path) -> Iterator[Row]:
    with file.open(encoding="utf-8") as stream:
        for line, text in enumerate(stream, start=1):
            if text.strip():
                try:
                    yield f":{line}", json.loads(text)
                except ValueError as fault:
                    raise ValueError(f"line {line}: {fault}") from fault


@_reads(".parquet")
def _parquet(file: Path) -> Iterator[Row]:
    row = 0
    for group in _library("pyarrow.parquet").ParquetFile(file).iter_batches(batch_size=1024):
        for values in group.to_pylist():
            yield f":{row}", values
            row += 1


@_reads(".png", ".jpg", ".jpeg", ".tif", ".tiff")
def _image(file: Path) -> Iterator[Row]:
    import numpy

    with _library("PIL.Image").open(file) as image:
        # Pillow reads the pixels only now, and finds a file that was cut.
        yield "", {"image": numpy.array(image)}


def _library(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0].replace("PIL", "pillow")
        raise Skipped(f"files need {package}: pip install {package}") from None


# --- Rows by name from whatever the subject has: a path, a dataset, a stream, a loader or a batch.


def source_of(subject: Subject) -> Any:
    """The first of data path, dataset, loader and batch that is given; None where none is."""
    inner = getattr(subject.loader, "dataset", None)
    # A dataset with a length is read by index, without touching the loader.
    inner = inner if is_map(inner) else None
    given = (subject.data, subject.dataset, inner, subject.loader, subject.batch)
    return next((one for one in given if one is not None), None)


def held_out(subject: Subject) -> Any:
    """The validation data. A loader may be given instead; a `Subset` has a `dataset` as well."""
    given = subject.validation
    return given if is_map(given) else getattr(given, "dataset", given)


def is_map(dataset: Any) -> bool:
    """True for a dataset that is read by index."""
    # A dict of datasets has both methods too, but not indices from 0.
    indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return indexed and not isinstance(dataset, dict)


def rows_of_the_whole(dataset: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """The data set that this is a part of, or is, and which rows; None where that is not known."""
    rows = as_indices(range(len(dataset)), dataset) if is_map(dataset) else None
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return None if rows is None else (dataset, rows)


def _data_files(path: Path, remarks: list[str]) -> list[Path]:
    """Every file of a known kind, in order of name; hidden ones are left out."""
    if not path.exists():
        raise ConfigError(f"data {path} does not exist; give a data file or folder.")
    if path.is_file():
        return [path]
    below = [file for file in sorted(path.rglob("*")) if file.is_file()]
    seen = [file for file in below if "/." not in f"/{file.relative_to(path).as_posix()}"]
    files = [file for file in seen if file.suffix.lower() in READERS]
    if not files:
        raise ConfigError(
            f"data {path} holds no file that can be read; readable kinds are "
            f"{', '.join(suffix[1:] for suffix in READERS)}."
        )
    if len(seen) > len(files):
        remarks.append(f"{count(len(seen) - len(files), 'file')} of other kinds not read")
    return files


def _of_path(path: Path, remarks: list[str]) -> Iterator[Row]:
    for file in _data_files(path, remarks):
        name = file.name if file == path else str(file.relative_to(path))
        try:
            for line, values in READERS[file.suffix.lower()](file):
                yield f"{name}{line}", values
        except Skipped as missing:
            if f"{file.suffix} {missing}" not in remarks:
                remarks.append(f"{file.suffix} {missing}")
        except Exception as fault:
            yield name, fault


def _of_map(dataset: Any) -> Iterator[Row]:
    for index in range(len(dataset)):
        try:
            yield _named(index, dataset[index])
        except Exception as fault:
            yield str(index), fault


def _of_stream(stream: Any, *, batched: bool) -> Iterator[Row]:
    try:
        with kept_generators(stream):
            for index, values in enumerate(stream):
                if batched:
                    yield from _of_batch(values, f"batch {index}")
                else:
                    yield _named(index, values)
    except Exception as fault:
        yield "stream", fault


def _named(index: int, values: Any) -> Row:
    """`7 (id chat-0-7)`, if the example names itself."""
    for key in NAMING if hasattr(values, "items") else ():
        if isinstance(values.get(key), str | int):
            return f"{index} ({key} {values[key]})", values
    return str(index), values


def _of_batch(batch: Any, name: str) -> Iterator[Row]:
    """Yield a collated batch row by row, if its tensors share the first dimension."""
    parts = [("", batch)] if isinstance(batch, Tensor) else children(batch)
    tensors = {key: part for key, part in parts if isinstance(part, Tensor) and part.dim()}
    sizes = set(map(len, tensors.values()))
    if len(sizes) != 1:
        yield name, batch
        return
    for row in range(sizes.pop()):
        yield f"{name}, row {row}", {key: tensor[row] for key, tensor in tensors.items()}


def first_batch(loader: Any) -> Any:
    """The loader's next first batch, with its generators put back."""
    with kept_generators(loader):
        iterator = iter(loader)
        try:
            return next(iterator)
        finally:
            # Worker processes would otherwise live until the iterator is collected.
            getattr(iterator, "_shutdown_workers", lambda: None)()


@contextmanager
def kept_generators(loader: Any) -> Iterator[None]:
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


# --- Everything numeric of an example as tensors.


def as_tensors(values: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield everything numeric of an example by key: tensors, arrays, numbers, lists of numbers."""
    if isinstance(values, Tensor):
        yield prefix, _ordinary(values.detach())
    elif isinstance(values, bool | int | float):
        # An int of Python has no largest value, one of torch has 64 bits.
        fits = not isinstance(values, int) or abs(values) < 2**63
        yield prefix, torch.tensor(values, dtype=None if fits else torch.float64)
    elif hasattr(values, "__array__") or hasattr(values, "__array_interface__"):
        import numpy

        array = numpy.asarray(values)
        if array.dtype.kind in "biufc":
            # torch takes neither a foreign byte order nor read-only memory; the copy has neither.
            native = array.astype(array.dtype.newbyteorder("="), copy=True)
            yield prefix, _ordinary(torch.from_numpy(native))
    elif (
        type(values) in (list, tuple)
        and values
        and all(isinstance(part, int | float) for part in values)
    ):
        yield prefix, torch.tensor(values)
    else:
        for key, value in children(values):
            yield from as_tensors(value, f"{prefix}.{key}".strip("."))


def _ordinary(tensor: Tensor) -> Tensor:
    """Make the tensor dense, and of a dtype that every operation knows."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce().values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    # torch has few operations for these dtypes.
    unsigned = tensor.dtype in (torch.uint16, torch.uint32, torch.uint64)
    if unsigned or (tensor.is_floating_point() and tensor.element_size() < 2):
        return tensor.double()
    return tensor


# --- One scan over the data: ranges, and the names of the examples that stand out.


class Measured(NamedTuple):
    """The range of one key of one example."""

    example: str
    low: float
    high: float
    size: int
    is_real: bool
    """A measurement or an image, not another whole number or a truth value."""


@dataclass(slots=True)
class DataFacts:
    """What the items on data and labels judge: names of examples by what is wrong with them."""

    what: str = "dataset"
    """`dataset`, `folder train`, `loader`, `batch`."""
    whole: int | None = None
    """How many examples there are, if known."""
    seen: int = 0
    nonfinite: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    values: defaultdict[str, list[Measured]] = field(default_factory=lambda: defaultdict(list))
    prints: dict[bytes, str] = field(default_factory=dict)
    """Fingerprint of the content -> name of the first example that has it."""
    remarks: list[str] = field(default_factory=list)
    """Kinds of files without a reader."""
    targets: int = 0
    """Integer targets of all examples, of which some are ignored."""
    supervised: int = 0
    """Targets that the loss counts."""
    empty: list[str] = field(default_factory=list)
    """Examples without a target that counts."""

    @property
    def scope(self) -> str:
        """`512 examples of the dataset`, `the first 8 of 512 examples of the dataset`."""
        if self.whole is not None and self.seen < self.whole:
            return f"the first {self.seen:,} of {self.whole:,} examples of the {self.what}"
        return f"{count(self.seen, 'example')} of the {self.what}"


def scan(given: Any, subject: Subject, progress: Progress | None = None) -> DataFacts:
    """Read everything once; nothing of the data is kept but numbers, names and fingerprints."""
    facts = DataFacts()
    most = subject.examples
    if isinstance(given, str | Path):
        path = Path(given)
        facts.what = f"{'folder' if path.is_dir() else 'file'} {path.name}"
        rows = _of_path(path, facts.remarks)
    elif given is subject.batch:
        facts.what = "batch"
        rows = _of_batch(given, "batch")
    elif is_map(given):
        facts.whole = len(given)
        rows = _of_map(given)
    else:
        batched = given is subject.loader
        facts.what = "loader" if batched else "dataset"
        most = most or 1024
        rows = _of_stream(given, batched=batched)
    total = facts.whole and min(facts.whole, most or facts.whole)
    for name, values in islice(rows, most):
        facts.seen += 1
        if progress is not None:
            progress(facts.seen, total)
        try:
            if isinstance(values, Exception):
                raise values
            _take(facts, name, values, subject)
        except Exception as fault:
            text = " ".join(str(fault).split())[:120]
            facts.unreadable.append(f"{name} ({type(fault).__name__}: {text})")
    return facts


def _take(facts: DataFacts, name: str, values: Any, subject: Subject) -> None:
    tensors = dict(as_tensors(values))
    items = values.items() if hasattr(values, "items") else ()
    texts = {str(key): value for key, value in items if isinstance(value, str)}
    # what the model sees: numbers and texts, without what names the example
    digest = hashlib.blake2b(digest_size=16)
    for key in sorted(tensors.keys() | texts.keys()):
        if key.lower() in NAMING:
            continue
        digest.update(f"{key}={texts.get(key, '')}".encode())
        if key in tensors:
            tensor = tensors[key].contiguous()
            digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
            # numpy has no bfloat16, but every dtype is bytes; a tensor without elements has none.
            if tensor.numel():
                digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    facts.prints.setdefault(digest.digest(), name)
    label = target_key(tensors, subject.label_key)
    for key, tensor in tensors.items():
        if key != label or tensor.is_floating_point() or tensor.is_complex():
            if tensor.numel():
                _measure(facts, name, key, tensor)
            continue
        counted = tensor[tensor != subject.ignore_index]
        facts.targets += tensor.numel()
        facts.supervised += len(counted)
        if not len(counted):
            facts.empty.append(name)


def target_key(tensors: dict[str, Tensor], given: str | None) -> str | None:
    """The key that was given, else the first usual name; of a tuple, its last part."""
    if given is not None:
        return given
    usual = [key for key in LABEL_KEYS if key in tensors]
    # Of (x, y) and (x, lengths, y) the last part is the target.
    if len(tensors) > 1 and all(map(str.isdigit, tensors)):
        usual.append(max(tensors, key=int))
    return next(iter(usual), None)


def _measure(facts: DataFacts, name: str, key: str, tensor: Tensor) -> None:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    # A NaN makes both bounds NaN.
    low, high = float(tensor.min()), float(tensor.max())
    if math.isfinite(low) and math.isfinite(high):
        image = tensor.dtype == torch.uint8 and tensor.dim() >= 2
        is_real = image or tensor.is_floating_point()
        facts.values[key].append(Measured(name, low, high, tensor.numel(), is_real))
        return
    bad = ~torch.isfinite(tensor)
    first = bad.nonzero()[0].tolist()
    kind = "NaN" if torch.isnan(tensor[tuple(first)]) else "Inf"
    place = in_example(name, key)
    if tensor.numel() == 1:
        facts.nonfinite.append(f"{place} is {kind}")
    else:
        amount = f"{int(bad.sum()):,} of {tensor.numel():,} values"
        facts.nonfinite.append(f"{place}: {kind} at {first}, {amount}")


def in_example(name: str, key: str) -> str:
    """`7 (id chat-7) [sound]`."""
    return f"{name} [{key}]" if key else name
