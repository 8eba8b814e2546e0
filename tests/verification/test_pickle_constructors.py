"""Calls of a pickle stream that checkpoints are made of, as records."""

from __future__ import annotations

from typing import Any

import pytest

from stepguard.verification.damage import Damaged
from stepguard.verification.pickle_constructors import brief, build_value, dtype_of, storage_of
from stepguard.verification.pickle_values import (
    ArrayRecord,
    Global,
    NumpyType,
    PickledBytes,
    PickledObject,
    StorageRecord,
    TensorRecord,
)

FLOATS = Global("torch", "FloatStorage")


def call(name: str, *arguments: Any) -> Any:
    module, _, word = name.rpartition(".")
    return build_value(Global(module, word), arguments)


def test_tensor_is_a_view_of_its_storage() -> None:
    storage = storage_of(("storage", FLOATS, "0", "cpu", 12))
    tensor = call("torch._utils._rebuild_tensor_v2", storage, 2, (2, 3), (3, 1), False, {})
    assert isinstance(tensor, TensorRecord) and tensor.storage is storage
    assert (tensor.dtype, tensor.offset, tensor.shape) == ("float32", 2, (2, 3))
    assert call("torch._utils._rebuild_parameter", tensor, True, {}).parameter


def test_unknown_class_stays_a_record() -> None:
    found = call("mine.Settings", 1, 2)
    assert isinstance(found, PickledObject) and found.arguments == (1, 2)


def test_numpy_scalar_is_its_number() -> None:
    raw = PickledBytes(0, 8, b"\x00\x00\x00\x00\x00\x00\xf4\x3f")
    assert call("numpy.core.multiarray.scalar", NumpyType("f8"), raw) == 1.25
    array = call("numpy.core.numeric._frombuffer", raw, NumpyType("f8"), (1,), "C")
    assert isinstance(array, ArrayRecord) and array.dtype == "float64"


def test_big_endian_array_has_no_element_type() -> None:
    assert NumpyType("f8", ">").torch_name == "" and NumpyType("u1", ">").torch_name == "uint8"


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("text", 0, (1,), (1,)),
        (StorageRecord("0", "float32", 1), 0, "ab", (1,)),
        (StorageRecord("0", "float32", 1), 0, (1 << 8000,), (1,)),
        (StorageRecord("0", "float32", 1), 0, (1,) * 65, (1,) * 65),
    ],
)
def test_arguments_that_do_not_fit_are_malformed(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(Damaged, match="arguments it cannot take"):
        call("torch._utils._rebuild_tensor_v2", *arguments)


@pytest.mark.parametrize(
    ("pid", "kind"),
    [
        ("text", "malformed"),
        (("storage", FLOATS, "0", "cpu", -1), "malformed"),
        (("storage", Global("torch", "Unknown"), "0", "cpu", 1), "malformed"),
        (("storage", FLOATS, "0", "cpu", 4, ("1", 0, 4)), "format"),
    ],
)
def test_persistent_id_that_torch_does_not_write_is_refused(pid: Any, kind: str) -> None:
    with pytest.raises(Damaged) as caught:
        storage_of(pid)
    assert caught.value.kind == kind
    assert storage_of(("storage", FLOATS, "0", "cpu", 4, None)).elements == 4


def test_values_are_described_in_a_few_letters() -> None:
    assert brief("x" * 500) == "x" * 80 and brief(10**5000) == "a int"
    assert dtype_of(Global("torch", "half")) == "float16" and dtype_of("torch.half") == ""
