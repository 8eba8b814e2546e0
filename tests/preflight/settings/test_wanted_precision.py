"""What a configuration means by its precision."""

from __future__ import annotations

import pytest

from stepguard.check.settings import wanted


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({"mixed_precision": "bf16"}, "bfloat16"),
        ({"precision": "16-mixed"}, "float16"),
        ({"trainer": {"fp16": True}}, "float16"),
        ({"bf16": True, "fp16": False}, "bfloat16"),
        ({"amp": True, "fp16": False}, None),
        ({"amp": False}, "float32"),
        ({"mixed_precision": "no"}, "float32"),
    ],
)
def test_precision_is_understood(settings: dict[str, object], dtype: str | None) -> None:
    found = wanted(settings)
    assert found is not None
    assert found.dtype == dtype


def test_silent_configuration_asks_for_nothing() -> None:
    assert wanted({"lr": 1.0, "precision": "high"}) is None


@pytest.mark.parametrize(
    "settings", [{"fp16": True, "bf16": True}, {"mixed_precision": "bf16", "fp16": True}]
)
def test_settings_that_exclude_each_other_are_told(settings: dict[str, object]) -> None:
    found = wanted(settings)
    assert found is not None and found.contradiction.endswith("exclude each other")
    agreeing = wanted({"mixed_precision": "fp16", "fp16": True})
    assert agreeing is not None and agreeing.contradiction == ""
