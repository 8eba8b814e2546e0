"""Records of what a pickle would have built."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stepguard.check.inert_pickle import (
    ArrayRecord,
    NumpyType,
    PickledBytes,
    PickledObject,
)


def test_field_is_found_in_the_state_of_a_class_with_slots() -> None:
    slots = PickledObject("Thing", (), (None, {"size": 3}))
    assert slots.field("size") == 3 and slots.field("other") is None
    assert PickledObject("Thing", (), {"size": 4}).field("size") == 4
    assert PickledObject("Thing").field("size") is None


def test_array_takes_the_state_that_numpy_writes() -> None:
    raw = PickledBytes(100, 24)
    array = ArrayRecord()
    array.set_state((1, (2, 3), NumpyType("f4"), False, raw))
    assert (array.raw, array.dtype, array.shape) == (raw, "float32", (2, 3))


def test_array_whose_bytes_are_not_those_of_its_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="its shape needs"):
        ArrayRecord().set_state((1, (2,), NumpyType("f4"), False, PickledBytes(10, 7)))


def test_array_refuses_a_state_that_numpy_does_not_write() -> None:
    raw = PickledBytes(100, 24)
    f4 = NumpyType("f4")
    huge = (1, (1 << 8000,) * 4, f4, False, raw)
    objects = (1, (3,), NumpyType("O8"), False, raw)
    for state in (None, (), (1, (-2,), f4, False, raw), (1, (2,), "f4", False, raw), huge, objects):
        array = ArrayRecord()
        with pytest.raises((TypeError, ValueError)):
            array.set_state(state)
        assert array.raw is None


def test_array_takes_one_state_only() -> None:
    """numpy frees the bytes of the first one, which a tensor may still use."""
    array = ArrayRecord()
    state = (1, (2, 3), NumpyType("f4"), False, PickledBytes(100, 24))
    array.set_state(state)
    with pytest.raises(ValueError, match="does not write"):
        array.set_state(state)


def test_byte_order_of_a_type_comes_with_its_state() -> None:
    kind = NumpyType("f4", is_copy=True)
    kind.set_state((3, ">", None, None, None, -1, -1, 0))
    assert kind.torch_name == ""


@pytest.mark.parametrize(
    "code", ["f8", ">f4", "O", "U5", "S3", "V7", "M8[ns]", "m8[s]", "?", "c16"]
)
def test_state_that_numpy_writes_for_a_type_is_taken(code: str) -> None:
    reduced: Any = np.dtype(code).__reduce__()
    word, state = reduced[1][0], reduced[2]
    kind = NumpyType(word, is_copy=True)
    kind.set_state(state)
    assert kind.order == state[1]
    with pytest.raises(ValueError, match="does not write"):
        NumpyType(word).set_state(state)


@pytest.mark.parametrize(
    ("code", "state"),
    [
        ("O8", (3, "|", None, None, None, -1, -1, 0)),
        ("f8", (3, "|", None, None, None, -1, -1, 63)),
        ("S1", (3, "|", None, None, None, 1 << 30, 1, 0)),
        ("f8", (4, "<", None, None, None, -1, -1, 0, {})),
    ],
)
def test_state_that_would_turn_bytes_into_pointers_is_refused(code: str, state: object) -> None:
    with pytest.raises(ValueError, match="does not write"):
        NumpyType(code, is_copy=True).set_state(state)
