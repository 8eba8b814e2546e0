"""Plan how tensors lie in safetensors files, before the first byte is written.

The format is small (8 bytes of header length, a JSON header, the data). It is written by hand
because the library's `save_file` takes the whole dict at once: digest, finite test and writing
would each be a pass of their own. Every file loads with the official reader.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from stepguard._errors import StoreError
from stepguard.tensors.dtypes import dtype_name

FILE_BYTES = 1 << 31
FILE_TENSORS = 50_000
"""A file holds this much at most, or one larger tensor; the format allows a header of 100 MB."""
_METADATA = "__metadata__"
_CODES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
REAL_PART = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
"""The format has no complex numbers: they are stored as pairs, and the seal has their type."""
_BY_NAME = {
    dtype_name(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}


@dataclass(frozen=True, slots=True)
class TensorForm:
    """Type and shape of a tensor, and how it is stored."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def dtype_name(self) -> str:
        return dtype_name(self.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stored_code(self) -> str:
        """Return the format's dtype; rare 8-bit floats (e8m0fnu, fnuz) are stored as U8."""
        return _CODES.get(REAL_PART.get(self.dtype, self.dtype), "U8")

    @property
    def stored_shape(self) -> list[int]:
        if self.dtype in REAL_PART:
            return [*self.shape, 2]
        return list(self.shape)

    @property
    def stored_width(self) -> int:
        return REAL_PART.get(self.dtype, self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One safetensors file: its header and the order of what follows."""

    name: str
    header: bytes
    names: tuple[str, ...]
    starts: tuple[int, ...]
    """Where in the file the bytes of each begin."""
    size: int


def form_of(name: str, tensor: Tensor) -> TensorForm:
    """Return the form of a tensor; StoreError for one that cannot be stored."""
    form = TensorForm(tensor.dtype, tuple(tensor.shape))
    odd = None
    if name == _METADATA:
        odd = "has the one name that safetensors keeps for itself; give it another"
    elif tensor.layout is not torch.strided:
        odd = f"has the layout {tensor.layout}; hand over tensor.to_dense()"
    elif tensor.device.type == "meta" or tensor.is_quantized:
        odd = "has no plain memory (meta or quantized); hand over its real values"
    elif form.stored_code == "U8" and form.dtype.itemsize != 1:
        odd = (
            f"has the dtype {form.dtype}, which safetensors cannot hold; hand over a view of it "
            f"as bytes"
        )
    if odd is not None:
        raise StoreError(f"{name} cannot be kept in a checkpoint: it {odd}.")
    return form


def form_from_seal(dtype: str, shape: tuple[int, ...]) -> TensorForm:
    """Return the form that a seal names; ValueError for a type that this torch does not have."""
    if dtype not in _BY_NAME:
        raise ValueError(f"{dtype[:50]!r} is not a dtype of torch {torch.__version__}")
    return TensorForm(_BY_NAME[dtype], shape)


def plan_files(forms: Mapping[str, TensorForm], stem: str = "tensors") -> list[FilePlan]:
    """Plan the files of a checkpoint, or of one rank's part of it."""
    plans = []
    for index, group in enumerate(_groups(stored_order(forms, forms), forms)):
        plans.append(plan_file(f"{stem}-{index:05d}.safetensors", group, forms))
    return plans


def stored_order(names: Iterable[str], forms: Mapping[str, TensorForm]) -> list[str]:
    """Return the order of tensors in a file."""
    # wide elements first, so that every tensor is aligned where a reader maps the file
    return sorted(names, key=lambda name: (-forms[name].stored_width, name))


def plan_file(name: str, names: Iterable[str], forms: Mapping[str, TensorForm]) -> FilePlan:
    """Plan one file. The header follows from names and forms, so a reader need not parse it."""
    ordered = tuple(names)
    entries: dict[str, object] = {_METADATA: {"format": "pt"}}
    end = 0
    begins: list[int] = []
    for tensor in ordered:
        form = forms[tensor]
        begin = end
        begins.append(begin)
        end += form.nbytes
        entries[tensor] = {
            "dtype": form.stored_code,
            "shape": form.stored_shape,
            "data_offsets": [begin, end],
        }
    # the format wants the data to begin at a multiple of eight bytes, and allows blanks for that
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    starts = tuple(len(header) + begin for begin in begins)
    return FilePlan(name, header, ordered, starts, len(header) + end)


def _groups(order: list[str], forms: Mapping[str, TensorForm]) -> Iterator[list[str]]:
    """Divide the tensors into files; a checkpoint without tensors has one empty file."""
    group: list[str] = []
    size = 0
    for name in order:
        if group and (size + forms[name].nbytes > FILE_BYTES or len(group) >= FILE_TENSORS):
            yield group
            group = []
            size = 0
        group.append(name)
        size += forms[name].nbytes
    if group or not order:
        yield group
