"""The table of element types agrees with torch."""

from __future__ import annotations

import pytest
import torch

from stepguard.verification import dtype_names


@pytest.mark.parametrize("name", dtype_names.SIZES)
def test_sizes_are_those_of_torch(name: str) -> None:
    if not hasattr(torch, name):
        pytest.skip("a type of a newer torch")
    assert getattr(torch, name).itemsize == dtype_names.SIZES[name]


def test_every_name_of_another_format_is_one_of_torch() -> None:
    for table in (dtype_names.ALIASES, dtype_names.STORAGES, dtype_names.SAFETENSORS):
        assert set(table.values()) <= set(dtype_names.SIZES)
    assert set(dtype_names.NUMPY.values()) <= set(dtype_names.SIZES)


def test_only_floats_can_be_nonfinite() -> None:
    assert dtype_names.is_real("bfloat16") and dtype_names.is_real("complex64")
    assert not dtype_names.is_real("int64") and not dtype_names.is_real("float4_e2m1fn_x2")
