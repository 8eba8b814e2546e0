"""Records of what a pickle would have built."""

from __future__ import annotations

from stepguard.verification.pickle_values import (
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


def test_array_ignores_a_state_that_numpy_does_not_write() -> None:
    raw = PickledBytes(100, 24)
    f4 = NumpyType("f4")
    huge = (1, (1 << 8000,) * 4, f4, False, raw)
    for state in (None, (), (1, (-2,), f4, False, raw), (1, (2,), "f4", False, raw), huge):
        array = ArrayRecord()
        array.set_state(state)
        assert array.raw is None


def test_byte_order_of_a_type_comes_with_its_state() -> None:
    kind = NumpyType("f4")
    kind.set_state((3, ">", None))
    assert kind.torch_name == ""
