"""The data, example by example: its source, how files are read, and what is wrong with it."""

from __future__ import annotations

import csv
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepguard._errors import ConfigError
from stepguard.preflight.subject import Subject, one_line
from stepguard.report.phrases import count

# --- Data files as named tensors, without running anything they hold: pickled arrays are refused.


Row = tuple[str, dict[str, Any]]
"""Name of an example, and its values by key."""
IMAGES = (".png", ".jpg", ".jpeg", ".tif", ".tiff")


class Skipped(Exception):  # noqa: N818 (an answer, not a fault)
    """The library for this kind of file is not installed; the text names it."""


@dataclass(slots=True)
class FoundFiles:
    """The files below a path, and how many are of kinds that are not read."""

    files: list[Path] = field(default_factory=list)
    others: int = 0


def find_files(path: Path) -> FoundFiles:
    """List every file of a known kind, in order of name; hidden ones are left out."""
    if path.is_file():
        return FoundFiles([path])
    found = FoundFiles()
    for file in sorted(path.rglob("*")):
        if not file.is_file() or any(part.startswith(".") for part in file.relative_to(path).parts):
            continue
        if file.suffix.lower() in READERS:
            found.files.append(file)
        else:
            found.others += 1
    return found


def read_rows(file: Path, name: str) -> Iterator[Row]:
    """Yield the examples of one file. Damage raises whatever its reader raises."""
    return READERS[file.suffix.lower()](file, name)


def _npy(file: Path, name: str) -> Iterator[Row]:
    import numpy

    yield name, {"": torch.from_numpy(_numeric(numpy.load(file, allow_pickle=False)))}


def _npz(file: Path, name: str) -> Iterator[Row]:
    import numpy

    values = {}
    with numpy.load(file, allow_pickle=False) as arrays:
        for key in arrays.files:
            if _is_number(arrays[key]):
                values[key] = torch.from_numpy(_numeric(arrays[key]))
    yield name, values


def _is_number(array: Any) -> bool:
    return array.dtype.kind in "biufc"


def _numeric(array: Any) -> Any:
    if not _is_number(array):
        raise ValueError(f"holds {array.dtype} values, not numbers")
    # torch has few operations for unsigned integers wider than a byte.
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        return array.astype("int64")
    # torch takes neither a foreign byte order nor read-only memory; the copy has neither.
    return array.astype(array.dtype.newbyteorder("="), copy=True)


def _safetensors(file: Path, name: str) -> Iterator[Row]:
    from safetensors import safe_open

    values = {}
    with safe_open(str(file), framework="pt") as tensors:
        for key in tensors.keys():  # noqa: SIM118 (not a dict)
            values[key] = tensors.get_tensor(key)
    yield name, values


def _csv(file: Path, name: str) -> Iterator[Row]:
    # The csv module finds line ends itself: they may lie inside of quotes.
    with file.open(encoding="utf-8", newline="") as stream:
        delimiter = "\t" if file.suffix == ".tsv" else ","
        lines = csv.reader(stream, delimiter=delimiter, strict=True)
        header = next(lines, [])
        for number, cells in enumerate(lines, start=2):
            if cells and len(cells) != len(header):
                raise ValueError(f"line {number} has {len(cells)} cells, the header {len(header)}")
            # An empty line is an example without values.
            values = {key: _cell(cell) for key, cell in zip(header, cells, strict=False)}
            yield f"{name}:{number}", values


def _cell(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _jsonl(file: Path, name: str) -> Iterator[Row]:
    with file.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError as fault:
                raise ValueError(f"line {number}: {fault}") from fault
            if not isinstance(value, dict):
                value = {"": value}
            yield f"{name}:{number}", value


def _parquet(file: Path, name: str) -> Iterator[Row]:
    module = _library("pyarrow.parquet", "pyarrow", file)
    row = 0
    for group in module.ParquetFile(file).iter_batches(batch_size=1024):
        for values in group.to_pylist():
            yield f"{name}:{row}", values
            row += 1


def _image(file: Path, name: str) -> Iterator[Row]:
    import numpy

    module = _library("PIL.Image", "Pillow", file)
    with module.open(file) as image:
        # Pillow reads the pixels only now, and finds a file that was cut.
        image.load()
        yield name, {"image": torch.from_numpy(numpy.array(image))}


def _library(module: str, package: str, file: Path) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise Skipped(
            f"{file.suffix} files need {package}: pip install {package.lower()}"
        ) from None


READERS: dict[str, Callable[[Path, str], Iterator[Row]]] = {
    ".npy": _npy,
    ".npz": _npz,
    ".safetensors": _safetensors,
    ".csv": _csv,
    ".tsv": _csv,
    ".jsonl": _jsonl,
    ".parquet": _parquet,
    **dict.fromkeys(IMAGES, _image),
}


def as_tensors(values: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield everything numeric of an example by key: tensors, arrays, numbers, lists of numbers."""
    if isinstance(values, Tensor):
        yield prefix, _ordinary(values.detach())
    elif isinstance(values, bool | int | float):
        yield prefix, _number(values)
    elif hasattr(values, "__array__") or hasattr(values, "__array_interface__"):
        yield from _array(values, prefix)
    elif _is_list_of_numbers(values):
        yield prefix, torch.tensor(values)
    else:
        for key, value in _children(values):
            name = f"{prefix}.{key}" if prefix else str(key)
            yield from as_tensors(value, name)


def _ordinary(tensor: Tensor) -> Tensor:
    """Make the tensor dense, and of a dtype that every operation knows."""
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce().values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    # torch has few operations for these dtypes.
    if "float8" in str(tensor.dtype) or "float4" in str(tensor.dtype):
        return tensor.float()
    if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return tensor.to(torch.float64)
    return tensor


def _number(value: float) -> Tensor:
    if isinstance(value, int) and abs(value) < 2**63:
        return torch.tensor(value)
    # An int of Python has no largest value, one of torch has 64 bits.
    return torch.tensor(value, dtype=torch.float64)


def _array(values: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    import numpy

    array = numpy.asarray(values)
    if _is_number(array):
        yield prefix, torch.from_numpy(_numeric(array))


def _is_list_of_numbers(values: Any) -> bool:
    if not isinstance(values, list | tuple) or hasattr(values, "_fields") or not values:
        return False
    return all(isinstance(part, int | float) for part in values)


def _children(values: Any) -> Iterable[tuple[Any, Any]]:
    if hasattr(values, "items"):
        return list(values.items())
    # A namedtuple is a tuple whose parts have names.
    if hasattr(values, "_fields"):
        return zip(values._fields, values, strict=True)
    if isinstance(values, list | tuple):
        return enumerate(values)
    if hasattr(values, "__dataclass_fields__"):
        return [(name, getattr(values, name)) for name in values.__dataclass_fields__]
    return []


# --- Examples by name from whatever the subject has: a dataset, a loader, a batch, a file or a
# folder.


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


# --- Statistics of targets: examples without one, the range of classes, texts cut at the end.


LABEL_KEYS: tuple[str, ...] = ("labels", "label", "targets", "target", "y")
TOKEN_KEYS = ("input_ids", "tokens", "ids")


@dataclass(frozen=True, slots=True)
class Cut:
    """The end of one example that is supervised to its last token."""

    name: str
    length: int
    last_token: int | None


@dataclass(slots=True)
class LabelFacts:
    """Filled example by example."""

    key: str | None = None
    """Given by the user, or the first usual name that occurs; of a tuple, its last part."""
    ignore_index: int = -100
    examples: int = 0
    """Examples that have integer targets."""
    supervised: int = 0
    total: int = 0
    """Targets of all examples, counted and not counted ones."""
    empty: list[str] = field(default_factory=list)
    empty_lengths: list[int] = field(default_factory=list)
    masked: int = 0
    """Examples with at least one ignored target."""
    low: tuple[int, str] | None = None
    high: tuple[int, str] | None = None
    longest: int = 0
    shortest: int | None = None
    cuts: list[Cut] = field(default_factory=list)

    def take(self, name: str, tensors: dict[str, Tensor]) -> str | None:
        """Count one example; returns the key of its targets."""
        key = self._key(tensors)
        if key is None or tensors[key].is_floating_point() or tensors[key].is_complex():
            return key
        self.key = key
        labels = tensors[key].reshape(-1)
        counted = labels[labels != self.ignore_index]
        self.examples += 1
        self.total += labels.numel()
        self.supervised += counted.numel()
        self.masked += counted.numel() < labels.numel()
        length, end = _extent(labels, tensors.get("attention_mask"))
        self.longest = max(self.longest, length)
        if self.shortest is None or length < self.shortest:
            self.shortest = length
        if not counted.numel():
            self.empty.append(name)
            self.empty_lengths.append(length)
            return key
        self._bounds(name, int(counted.min()), int(counted.max()))
        if labels.numel() > 1 and int(labels[end]) != self.ignore_index:
            self.cuts.append(Cut(name, length, _token(tensors, labels.numel(), end)))
        return key

    def _key(self, tensors: dict[str, Tensor]) -> str | None:
        names = LABEL_KEYS
        if self.key is not None:
            names = (self.key,)
        for name in names:
            if name in tensors:
                return name
        # Of (x, y) and (x, lengths, y) the last part is the target.
        if self.key is None and len(tensors) > 1 and all(name.isdigit() for name in tensors):
            return max(tensors, key=int)
        return None

    def _bounds(self, name: str, low: int, high: int) -> None:
        if self.low is None or low < self.low[0]:
            self.low = (low, name)
        if self.high is None or high > self.high[0]:
            self.high = (high, name)


def _token(tensors: dict[str, Tensor], length: int, position: int) -> int | None:
    """The token at a position, if the example has one token for each label."""
    for key in TOKEN_KEYS:
        if key in tensors:
            if tensors[key].numel() != length:
                return None
            return int(tensors[key].reshape(-1)[position])
    return None


def _extent(labels: Tensor, attended: Tensor | None) -> tuple[int, int]:
    """Count the tokens that are not padding, and find the last: padding may be on either side."""
    if attended is None or attended.numel() != labels.numel() or not bool(attended.any()):
        return labels.numel(), -1
    return int((attended != 0).sum()), int(attended.reshape(-1).nonzero().max())


# --- Facts of one pass over the data: counts, and the names of the first examples of each kind.


KEPT_NAMES = 50
LEAST_ELEMENTS = 16
"""A tensor with fewer elements may be constant by chance."""
LEAST_IDS = 8
"""Of whole numbers in a row: the chance that ids agree is smaller."""
IDENTITIES = frozenset({*NAMING, "index"})
"""Keys that name an example and are not part of its content."""

Progress = Callable[[int, int | None], None]


@dataclass(slots=True)
class Named:
    """How many, and the names of the first."""

    number: int = 0
    names: list[str] = field(default_factory=list)

    def add(self, name: str) -> None:
        self.number += 1
        if len(self.names) < KEPT_NAMES:
            self.names.append(name)


@dataclass(slots=True)
class Column:
    """One key over all examples."""

    numbers: int = 0
    missing: Named = field(default_factory=Named)
    low: float = math.inf
    high: float = -math.inf
    scalar: bool = True
    whole: bool = True
    """Integers or booleans only: an id or a class, not a measurement."""
    largest: list[tuple[float, str]] = field(default_factory=list)
    """Largest magnitude of each example, with its name."""
    flat: Named = field(default_factory=Named)
    """Rows of whole numbers that are one value throughout: a text that is all padding."""


@dataclass(slots=True)
class DataFacts:
    """What the items on data and labels judge."""

    what: str
    seen: int = 0
    whole: int | None = None
    nonfinite: Named = field(default_factory=Named)
    constant: Named = field(default_factory=Named)
    unreadable: Named = field(default_factory=Named)
    duplicates: Named = field(default_factory=Named)
    columns: dict[str, Column] = field(default_factory=dict)
    prints: dict[bytes, str] = field(default_factory=dict)
    """Fingerprint of the content -> name of the first example that has it."""
    labels: LabelFacts = field(default_factory=LabelFacts)
    remarks: list[str] = field(default_factory=list)

    def column(self, key: str) -> Column:
        return self.columns.setdefault(key, Column())

    @property
    def scope(self) -> str:
        """`512 examples of the dataset`, `the first 8 of 512 examples of the dataset`."""
        if self.whole is not None and self.seen < self.whole:
            return f"the first {self.seen:,} of {self.whole:,} examples of the {self.what}"
        return f"{count(self.seen, 'example')} of the {self.what}"


def gather(source: Source, labels: LabelFacts, progress: Progress | None = None) -> DataFacts:
    """Read everything once; nothing of the data is kept but numbers, names and fingerprints."""
    facts = DataFacts(source.what, whole=source.whole, labels=labels)
    for example in source.examples:
        facts.seen += 1
        if progress is not None:
            progress(facts.seen, source.total)
        if example.problem:
            facts.unreadable.add(f"{example.name} ({example.problem})")
            continue
        try:
            _take(facts, example)
        except (TypeError, ValueError, RuntimeError, OverflowError) as fault:
            facts.unreadable.add(f"{example.name} ({one_line(fault, 100)})")
    facts.remarks = source.remarks
    return facts


def _take(facts: DataFacts, example: Example) -> None:
    tensors = dict(as_tensors(example.values))
    _fingerprint(facts, example, tensors)
    label = facts.labels.take(example.name, tensors)
    for key, tensor in tensors.items():
        if key == label and not tensor.is_floating_point():
            facts.column(key).numbers += 1
        elif tensor.numel():
            _measure(facts, example.name, key, tensor)
    if hasattr(example.values, "items"):
        for key, value in example.values.items():
            if value is None or (isinstance(value, str) and not value):
                facts.column(str(key)).missing.add(example.name)


def _measure(facts: DataFacts, name: str, key: str, tensor: Tensor) -> None:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    real = tensor.is_floating_point()
    single = tensor.numel() == 1
    column = facts.column(key)
    column.numbers += 1
    column.scalar &= single
    column.whole &= not real or (single and float(tensor).is_integer())
    low, high = _bounds(tensor)
    # A NaN makes both bounds NaN.
    if not all(map(math.isfinite, (low, high))):
        facts.nonfinite.add(_bad_place(name, key, tensor))
        return
    column.low = min(column.low, low)
    column.high = max(column.high, high)
    image = tensor.dtype == torch.uint8 and tensor.dim() >= 2
    if real or image:
        column.largest.append((max(abs(low), abs(high)), name))
    measured = real or image
    if low == high and tensor.numel() >= (LEAST_ELEMENTS if measured else LEAST_IDS):
        place = f"{name}{_in_brackets(key)} = {low:g} in all {tensor.numel():,} places"
        if measured:
            facts.constant.add(place)
        elif tensor.dtype != torch.bool:
            column.flat.add(place)


def _bounds(tensor: Tensor) -> tuple[float, float]:
    # aminmax takes no bool.
    if tensor.dtype == torch.bool:
        tensor = tensor.to(torch.uint8)
    low, high = torch.aminmax(tensor.reshape(-1))
    return float(low), float(high)


def _bad_place(name: str, key: str, tensor: Tensor) -> str:
    bad = ~torch.isfinite(tensor)
    first = bad.nonzero()[0].tolist()
    kind = "Inf"
    if math.isnan(float(tensor[tuple(first)])):
        kind = "NaN"
    place = f"{name}{_in_brackets(key)}"
    if tensor.numel() == 1:
        return f"{place} is {kind}"
    return f"{place}: {kind} at {first}, {int(bad.sum()):,} of {tensor.numel():,} values"


def _in_brackets(key: str) -> str:
    if not key:
        return ""
    return f" [{key}]"


def _fingerprint(facts: DataFacts, example: Example, tensors: dict[str, Tensor]) -> None:
    """Note a digest of what the model sees: numbers and texts, without what names the example."""
    digest = hashlib.blake2b(digest_size=16)
    for key in sorted(tensors):
        if key.lower() not in IDENTITIES:
            tensor = tensors[key].contiguous()
            digest.update(f"{key}{tuple(tensor.shape)}{tensor.dtype}".encode())
            # A tensor without elements has no bytes to view.
            if tensor.numel():
                # numpy has no bfloat16, but every dtype is bytes.
                digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    if hasattr(example.values, "items"):
        for key, value in sorted(example.values.items(), key=lambda pair: str(pair[0])):
            if isinstance(value, str) and str(key).lower() not in IDENTITIES:
                digest.update(f"{key}={value}".encode())
    first = facts.prints.setdefault(digest.digest(), example.name)
    if first != example.name:
        facts.duplicates.add(f"{example.name} = {first}")


def overlap(first: DataFacts, second: DataFacts) -> Named:
    """Examples of the second that are in the first as well."""
    shared = Named()
    for fingerprint, name in second.prints.items():
        if fingerprint in first.prints:
            shared.add(f"{name} = {first.prints[fingerprint]}")
    return shared
