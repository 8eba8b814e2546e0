"""What a call in a pickle stream means, for the few calls that checkpoints are made of. Others stay
records.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from stepguard.verification import dtype_names
from stepguard.verification.damage import Damaged
from stepguard.verification.pickle_values import (
    ArrayRecord,
    Global,
    Made,
    NumpyType,
    Raw,
    Storage,
    TensorRecord,
)

Build = Callable[..., Any]
NUMBERS = {"f8": "d", "f4": "f", "f2": "e", "i8": "q", "i4": "i", "i2": "h", "i1": "b",
           "u8": "Q", "u4": "I", "u2": "H", "u1": "B", "b1": "?"}  # fmt: skip
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


def reference(what: Any, arguments: tuple[Any, ...]) -> Any:
    """The value of `what(*arguments)`, without calling anything of that name."""
    build = BUILDERS.get(str(what)) if isinstance(what, Global) else None
    if build is None:
        return Made(what, arguments)
    try:
        return build(*arguments)
    except ARGUMENTS as error:
        raise Damaged("malformed", f"{what} is given arguments it cannot take: {error}") from None


def brief(value: Any) -> str:
    """For a message: a value that may be of any size and depth, in a few letters."""
    if isinstance(value, str | int | float | Global) and not (
        isinstance(value, int) and value.bit_length() > 64
    ):
        return str(value)[:80]
    return f"a {type(value).__name__}"


def dtype_of(value: Any) -> str:
    """`torch.bfloat16` as a name; empty if it is none."""
    if not isinstance(value, Global) or value.module != "torch":
        return ""
    name = dtype_names.ALIASES.get(value.name, value.name)
    return name if name in dtype_names.SIZES else ""


def _sizes(value: Any) -> tuple[int, ...]:
    if isinstance(value, Made):
        value = value.arguments[0]
    if not isinstance(value, tuple | list) or not all(type(n) is int for n in value):
        raise ValueError("sizes that are no tuple of integers")
    return tuple(value)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any, dtype: str = "") -> Any:
    if isinstance(storage, Made) or type(offset) is not int:
        return Made("tensor", (storage, offset, shape, stride, *rest))
    if not isinstance(storage, Storage):
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
    name = dtype_of(dtype)
    if not name:
        raise ValueError(f"{brief(dtype)} is no element type that is known")
    return _tensor(storage, offset, shape, stride, dtype=name)


def _parameter(data: Any, *rest: Any) -> Any:
    if isinstance(data, TensorRecord):
        data.parameter = True
    return data


def _of_type(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """A tensor subclass, or one with attributes: the tensor is what counts."""
    if not isinstance(arguments, tuple):
        raise ValueError("arguments that are no tuple")
    return reference(function, arguments)


def _stored_bytes(raw: Any) -> Any:
    """A storage that a plain pickle holds as a whole torch.save of its own."""
    return Storage("nested", "", 0, nested=raw) if isinstance(raw, Raw) else Made("storage", (raw,))


def _pairs(items: Any = ()) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for pair in items.items() if isinstance(items, dict) else items:
        key, value = pair
        found[key if isinstance(key, str | int | float | bytes) else Made("key", (key,))] = value
    return found


def _default_dict(factory: Any = None, items: Any = ()) -> dict[Any, Any]:
    return _pairs(items)


def _numpy_type(code: Any, *rest: Any) -> NumpyType:
    text = code.data.decode("latin-1") if isinstance(code, Raw) and code.data is not None else code
    if not isinstance(text, str):
        raise ValueError(f"{brief(code)} is no numpy type")
    return NumpyType(text.lstrip("<>=|"), text[0] if text[:1] in "<>" else "<")


def _numpy_number(dtype: Any, raw: Any = None) -> Any:
    if not isinstance(dtype, NumpyType) or not isinstance(raw, Raw) or raw.data is None:
        return Made("numpy scalar", (dtype, raw))
    if dtype.code not in NUMBERS:
        return Made("numpy scalar", (dtype, raw))
    return struct.unpack((">" if dtype.order == ">" else "<") + NUMBERS[dtype.code], raw.data)[0]


def _array_from(buffer: Any, dtype: Any, shape: Any, order: Any = "C", *rest: Any) -> ArrayRecord:
    raw = buffer if isinstance(buffer, Raw) else None
    return ArrayRecord(raw, dtype.torch_name if isinstance(dtype, NumpyType) else "", _sizes(shape))


def _encode(text: Any, encoding: Any = "utf-8") -> Any:
    """How protocol 2 writes bytes. Their place in the file is lost, so that only short ones can be
    looked at.
    """
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1", "utf-8", "ascii"):
        raise ValueError("a text and a known encoding belong here")
    data = text.encode(encoding)
    return Raw(-1, len(data), data)


def _reconstructed(kind: Any, base: Any = None, state: Any = None) -> Made:
    return Made(kind, (), state)


BUILDERS: dict[str, Build] = {
    "collections.OrderedDict": _pairs,
    "collections.defaultdict": _default_dict,
    "collections.Counter": _pairs,
    "collections.deque": lambda items=(), *rest: list(items),
    "builtins.set": lambda items=(): list(items),
    "__builtin__.set": lambda items=(): list(items),
    "builtins.frozenset": lambda items=(): tuple(items),
    "builtins.list": lambda items=(): list(items),
    "builtins.tuple": lambda items=(): tuple(items),
    "builtins.dict": _pairs,
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
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch.storage._load_from_bytes": _stored_bytes,
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
"""`module.name` -> the value it would return."""


def storage_of(pid: Any) -> Storage:
    """A persistent id of torch.save: `("storage", type, key, location, number of elements[,
    view])`.
    """
    if not (isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage"):
        raise Damaged("malformed", f"a persistent id that torch.save does not write: {brief(pid)}")
    _, kind, key, _, elements = pid[:5]
    dtype = dtype_names.STORAGES.get(kind.name, "") if isinstance(kind, Global) else ""
    if not dtype or not isinstance(key, str) or type(elements) is not int or elements < 0:
        raise Damaged(
            "malformed",
            f"a storage of {brief(kind)} named {brief(key)} with {brief(elements)} elements",
        )
    view = pid[5] if len(pid) > 5 else None
    if isinstance(view, tuple) and len(view) == 3 and type(view[1]) is int:
        raise Damaged(
            "format",
            "storages that are views of others (torch before 0.4); save it again with torch.save",
        )
    return Storage(key, dtype, elements)
