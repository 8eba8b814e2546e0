"""The table of element types agrees with torch."""

from __future__ import annotations

import pytest
import torch

from stepguard.check import scan as names


@pytest.mark.parametrize("name", names.SIZES)
def test_sizes_are_those_of_torch(name: str) -> None:
    if not hasattr(torch, name):
        pytest.skip("a type of a newer torch")
    assert getattr(torch, name).itemsize == names.SIZES[name]


def test_every_name_of_another_format_is_one_of_torch() -> None:
    for table in (names.ALIASES, names.STORAGES, names.SAFETENSORS):
        assert set(table.values()) <= set(names.SIZES)
    assert set(names.NUMPY.values()) <= set(names.SIZES)


def test_only_floats_can_be_nonfinite() -> None:
    assert names.is_real("bfloat16") and names.is_real("complex64")
    assert not names.is_real("int64") and not names.is_real("float4_e2m1fn_x2")
