"""The table of element types agrees with torch."""

from __future__ import annotations

import pytest
import torch

from stepguard.verification import bounded_file


@pytest.mark.parametrize("name", bounded_file.SIZES)
def test_sizes_are_those_of_torch(name: str) -> None:
    if not hasattr(torch, name):
        pytest.skip("a type of a newer torch")
    assert getattr(torch, name).itemsize == bounded_file.SIZES[name]


def test_every_name_of_another_format_is_one_of_torch() -> None:
    for table in (bounded_file.ALIASES, bounded_file.STORAGES, bounded_file.SAFETENSORS):
        assert set(table.values()) <= set(bounded_file.SIZES)
    assert set(bounded_file.NUMPY.values()) <= set(bounded_file.SIZES)


def test_only_floats_can_be_nonfinite() -> None:
    assert bounded_file.is_real("bfloat16") and bounded_file.is_real("complex64")
    assert not bounded_file.is_real("int64") and not bounded_file.is_real("float4_e2m1fn_x2")
