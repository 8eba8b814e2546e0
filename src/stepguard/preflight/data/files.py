"""Data files as named tensors, without running anything they hold: pickled arrays are refused."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Row = tuple[str, dict[str, Any]]
"""Name of an example, and its values by key."""
IMAGES = (".png", ".jpg", ".jpeg")


class Skipped(Exception):  # noqa: N818 (an answer, not a fault)
    """The library for this kind of file is not installed; the text says which."""


@dataclass(slots=True)
class Found:
    """The files below a path, and how many of each kind are not read."""

    files: list[Path] = field(default_factory=list)
    others: int = 0


def find_files(path: Path) -> Found:
    """Every file of a known kind, in order of name; hidden ones are left out."""
    if path.is_file():
        return Found([path])
    found = Found()
    for file in sorted(path.rglob("*")):
        if not file.is_file() or any(part.startswith(".") for part in file.relative_to(path).parts):
            continue
        if file.suffix.lower() in READERS:
            found.files.append(file)
        else:
            found.others += 1
    return found


def read_rows(file: Path, name: str) -> Iterator[Row]:
    """The examples of one file. Raises whatever its reader raises on damage, and Skipped without
    the library.
    """
    return READERS[file.suffix.lower()](file, name)


def _npy(file: Path, name: str) -> Iterator[Row]:
    import numpy

    yield name, {"": torch.from_numpy(_numeric(numpy.load(file, allow_pickle=False)))}


def _npz(file: Path, name: str) -> Iterator[Row]:
    import numpy

    with numpy.load(file, allow_pickle=False) as arrays:
        yield (
            name,
            {
                key: torch.from_numpy(_numeric(arrays[key]))
                for key in arrays.files
                if _is_number(arrays[key])
            },
        )


def _is_number(array: Any) -> bool:
    return array.dtype.kind in "biufc"


def _numeric(array: Any) -> Any:
    if not _is_number(array):
        raise ValueError(f"holds {array.dtype} values, not numbers")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        return array.astype("int64")
    native = array.astype(array.dtype.newbyteorder("="), copy=True)
    return native if native.flags.writeable else native.copy()


def _safetensors(file: Path, name: str) -> Iterator[Row]:
    from safetensors import safe_open

    with safe_open(str(file), framework="pt") as tensors:
        yield name, {key: tensors.get_tensor(key) for key in tensors.keys()}  # noqa: SIM118 (not a dict)


def _csv(file: Path, name: str) -> Iterator[Row]:
    with file.open(encoding="utf-8", newline="") as stream:
        lines = csv.reader(stream, delimiter="\t" if file.suffix == ".tsv" else ",", strict=True)
        header = next(lines, [])
        for number, cells in enumerate(lines, start=2):
            if cells and len(cells) != len(header):
                raise ValueError(f"line {number} has {len(cells)} cells, the header {len(header)}")
            yield (
                f"{name}:{number}",
                {key: _cell(cell) for key, cell in zip(header, cells, strict=False)},
            )


def _cell(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _jsonl(file: Path, name: str) -> Iterator[Row]:
    with file.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                try:
                    value = json.loads(line)
                except ValueError as fault:
                    raise ValueError(f"line {number}: {fault}") from fault
                yield f"{name}:{number}", value if isinstance(value, dict) else {"": value}


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
    """Everything numeric of an example, by key: tensors, arrays, numbers and lists of numbers."""
    if isinstance(values, Tensor):
        yield prefix, _ordinary(values.detach())
    elif isinstance(values, bool | int | float):
        exact = isinstance(values, int) and abs(values) < 2**63
        yield prefix, torch.tensor(values, dtype=None if exact else torch.float64)
    elif hasattr(values, "__array__") or hasattr(values, "__array_interface__"):
        yield from _array(values, prefix)
    elif isinstance(values, list | tuple) and not hasattr(values, "_fields"):
        yield from _sequence(values, prefix)
    else:
        for key, value in _children(values):
            yield from as_tensors(value, f"{prefix}.{key}" if prefix else str(key))


def _ordinary(tensor: Tensor) -> Tensor:
    """Dense and of a dtype that every operation knows; float8 and large unsigned integers have few."""
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce().values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    name = str(tensor.dtype)
    if "float8" in name or "float4" in name:
        return tensor.float()
    return tensor.to(torch.float64) if tensor.dtype in _WIDE_UNSIGNED else tensor


_WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def _array(values: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    import numpy

    array = numpy.asarray(values)
    if _is_number(array):
        yield prefix, torch.from_numpy(_numeric(array))


def _sequence(values: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    if values and all(isinstance(part, int | float) for part in values):
        yield prefix, torch.tensor(values)
        return
    for position, value in enumerate(values):
        yield from as_tensors(value, f"{prefix}.{position}" if prefix else str(position))


def _children(values: Any) -> Iterator[tuple[Any, Any]]:
    if hasattr(values, "items"):
        yield from values.items()
    elif hasattr(values, "_fields"):
        yield from zip(values._fields, values, strict=True)
    elif hasattr(values, "__dataclass_fields__"):
        yield from ((name, getattr(values, name)) for name in values.__dataclass_fields__)
