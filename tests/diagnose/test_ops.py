"""Families of operations by the name of their aten packet."""

from __future__ import annotations

import pytest

from stepguard.diagnose import case


@pytest.mark.parametrize(
    ("op", "name"),
    [("aten.add_", "add"), ("aten._softmax", "_softmax"), ("norm", "norm"), (None, "")],
)
def test_base_name_drops_packet_and_in_place_mark(op: str | None, name: str) -> None:
    assert case.base_name(op) == name


def test_what_counts_and_what_measures_are_different_families() -> None:
    assert not case.COUNTED & (case.MEASURED | case.CURVED)


def test_no_family_names_an_in_place_operation() -> None:
    families = (case.PRODUCTS, case.STATISTICS, case.NORM_LAYERS, case.SOFTMAXES, case.EXPONENTIALS)
    assert not [name for family in families for name in family if name.endswith("_")]
