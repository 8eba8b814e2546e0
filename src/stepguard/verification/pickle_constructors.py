"""What a call in a pickle stream means, for the few calls that checkpoints are made of.

A call of anything else stays a `PickledObject`. Nothing is called by name.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from stepguard.verification import dtype_names, limits
from stepguard.verification.damage import Damaged
from stepguard.verification.pickle_values import (
    ArrayRecord,
    Global,
    NumpyType,
    PickledBytes,
    PickledObject,
    StorageRecord,
    TensorRecord,
)

Build = Callable[..., Any]
NUMBERS = {"f8": "d", "f4": "f", "f2": "e", "i8": "q", "i4": "i", "i2": "h", "i1": "b",
           "u8": "Q", "u4": "I", "u2": "H", "u1": "B", "b1": "?"}  # fmt: skip
"""Letter code of a numpy type -> that of `struct`."""
ENCODINGS = ("latin1", "latin-1", "utf-8", "ascii")
ARGUMENTS = (
    TypeError,
    ValueError,
    IndexError,
    KeyError,
    AttributeError,
    OverflowError,
    struct.error,
)
"""What a builder raises when it is given arguments it does not take."""


def build_value(what: Any, arguments: tuple[Any, ...]) -> Any:
    """Return the record of `what(*arguments)`, without calling anything of that name."""
    build = BUILDERS.get(str(what)) if isinstance(what, Global) else None
    if build is None:
        return PickledObject(what, arguments)
    try:
        return build(*arguments)
    except ARGUMENTS as error:
        raise Damaged("malformed", f"{what} is given arguments it cannot take: {error}") from None


def brief(value: Any) -> str:
    """Describe a value of any size and depth in a few letters, for a message."""
    # str() of an int with very many digits takes quadratic time, and Python refuses it
    huge = isinstance(value, int) and value.bit_length() > 64
    if isinstance(value, str | int | float | Global) and not huge:
        return str(value)[:80]
    return f"a {type(value).__name__}"


def dtype_of(value: Any) -> str:
    """Return the name of a dtype such as `torch.bfloat16`; empty for anything else."""
    if not isinstance(value, Global) or value.module != "torch":
        return ""
    name = dtype_names.ALIASES.get(value.name, value.name)
    return name if name in dtype_names.SIZES else ""


def _sizes(value: Any) -> tuple[int, ...]:
    # a torch.Size that was pickled by protocol 2
    if isinstance(value, PickledObject):
        value = value.arguments[0]
    if not limits.is_shape(value):
        raise ValueError("sizes that no tensor has")
    return tuple(value)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any, dtype: str = "") -> Any:
    if isinstance(storage, PickledObject) or type(offset) is not int:
        return PickledObject("tensor", (storage, offset, shape, stride, *rest))
    if not isinstance(storage, StorageRecord):
        raise ValueError(f"a {type(storage).__name__} where a storage belongs")
    return TensorRecord(storage, dtype or storage.dtype, offset, _sizes(shape), _sizes(stride))


def _tensor_v3(
    storage: Any,
    offset: Any,
    shape: Any,
    stride: Any,
    grad: Any,
    hooks: Any,
    dtype: Any,
    *rest: Any,
) -> Any:
    """Build a tensor of a type that has no storage class of its own, such as uint16 or float8."""
    name = dtype_of(dtype)
    if not name:
        raise ValueError(f"{brief(dtype)} is not a known element type")
    return _tensor(storage, offset, shape, stride, dtype=name)


def _parameter(data: Any, *rest: Any) -> Any:
    if isinstance(data, TensorRecord):
        data.parameter = True
    return data


def _tensor_subclass(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """Build the plain tensor of a subclass, or of one with attributes."""
    if not isinstance(arguments, tuple):
        raise ValueError("arguments that are not a tuple")
    return build_value(function, arguments)


def _nested_storage(raw: Any) -> Any:
    """Build a storage that a plain pickle holds as a whole torch.save of its own."""
    if isinstance(raw, PickledBytes):
        return StorageRecord("nested", "", 0, nested=raw)
    return PickledObject("storage", (raw,))


def _dict_of(items: Any = ()) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key, value in items.items() if isinstance(items, dict) else items:
        # any other key may be deep or unhashable
        if not isinstance(key, str | int | float | bytes):
            key = PickledObject("key", (key,))
        found[key] = value
    return found


def _default_dict(factory: Any = None, items: Any = ()) -> dict[Any, Any]:
    return _dict_of(items)


def _numpy_type(code: Any, *rest: Any) -> NumpyType:
    text = code
    if isinstance(code, PickledBytes) and code.data is not None:
        text = code.data.decode("latin-1")
    if not isinstance(text, str) or not text:
        raise ValueError(f"{brief(code)} is not a numpy type")
    order = text[0] if text[:1] in ("<", ">") else "<"
    return NumpyType(text.lstrip("<>=|"), order)


def _numpy_number(dtype: Any, raw: Any = None) -> Any:
    record = PickledObject("numpy scalar", (dtype, raw))
    if not isinstance(dtype, NumpyType) or dtype.code not in NUMBERS:
        return record
    if not isinstance(raw, PickledBytes) or raw.data is None:
        return record
    order = ">" if dtype.order == ">" else "<"
    return struct.unpack(order + NUMBERS[dtype.code], raw.data)[0]


def _array_from(buffer: Any, dtype: Any, shape: Any, order: Any = "C", *rest: Any) -> ArrayRecord:
    raw = buffer if isinstance(buffer, PickledBytes) else None
    name = dtype.torch_name if isinstance(dtype, NumpyType) else ""
    return ArrayRecord(raw, name, _sizes(shape))


def _encode(text: Any, encoding: Any = "utf-8") -> PickledBytes:
    """Build bytes as protocol 2 writes them: as a text that `_codecs.encode` turns into bytes."""
    if not isinstance(text, str) or encoding not in ENCODINGS:
        raise ValueError("a text and a known encoding belong here")
    data = text.encode(encoding)
    # in the file they are UTF-8, not the bytes themselves, so there is no offset to give
    return PickledBytes(-1, len(data), data)


def _reconstructed(kind: Any, base: Any = None, state: Any = None) -> PickledObject:
    return PickledObject(kind, (), state)


BUILDERS: dict[str, Build] = {
    "collections.OrderedDict": _dict_of,
    "collections.defaultdict": _default_dict,
    "collections.Counter": _dict_of,
    "collections.deque": lambda items=(), *rest: list(items),
    "builtins.set": lambda items=(): list(items),
    "__builtin__.set": lambda items=(): list(items),
    "builtins.frozenset": lambda items=(): tuple(items),
    "builtins.list": lambda items=(): list(items),
    "builtins.tuple": lambda items=(): tuple(items),
    "builtins.dict": _dict_of,
    "builtins.bytearray": lambda raw=None, *rest: raw,
    "builtins.complex": lambda real=0.0, imaginary=0.0: (real, imaginary),
    "torch.Size": lambda sizes=(): tuple(sizes),
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_qtensor": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_device_tensor_from_numpy": lambda data, *rest: data,
    "torch._tensor._rebuild_from_type_v2": _tensor_subclass,
    "torch.storage._load_from_bytes": _nested_storage,
    "numpy.core.multiarray._reconstruct": lambda *rest: ArrayRecord(),
    "numpy._core.multiarray._reconstruct": lambda *rest: ArrayRecord(),
    "numpy.core.multiarray.scalar": _numpy_number,
    "numpy._core.multiarray.scalar": _numpy_number,
    "numpy.core.numeric._frombuffer": _array_from,
    "numpy._core.numeric._frombuffer": _array_from,
    "numpy.dtype": _numpy_type,
    "_codecs.encode": _encode,
    "copyreg._reconstructor": _reconstructed,
    "copy_reg._reconstructor": _reconstructed,
}
"""`module.name` -> a function that returns the record of what the call would return."""


def storage_of(pid: Any) -> StorageRecord:
    """Parse a persistent id of torch.save: `("storage", type, key, location, elements[, view])`."""
    if not (isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage"):
        raise Damaged("malformed", f"a persistent id that torch.save does not write: {brief(pid)}")
    _, kind, key, _, elements = pid[:5]
    dtype = dtype_names.STORAGES.get(kind.name) if isinstance(kind, Global) else None
    is_count = type(elements) is int and elements >= 0
    if dtype is None or not isinstance(key, str) or not is_count:
        raise Damaged(
            "malformed",
            f"a storage of {brief(kind)} named {brief(key)} with {brief(elements)} elements",
        )
    if _is_storage_view(pid[5:]):
        raise Damaged(
            "format",
            "storages that are views of others (torch before 0.4); save it again with torch.save",
        )
    return StorageRecord(key, dtype, elements)


def _is_storage_view(rest: tuple[Any, ...]) -> bool:
    """Find the `(key, offset, size)` of a view, where newer versions write None or nothing."""
    if not rest or not isinstance(rest[0], tuple):
        return False
    return len(rest[0]) == 3 and type(rest[0][1]) is int
