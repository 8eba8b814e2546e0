"""Data files as named tensors, without running anything they hold: pickled arrays are refused."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
