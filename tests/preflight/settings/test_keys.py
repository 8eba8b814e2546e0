"""Settings are found by their meaning, whatever their keys are called."""

from __future__ import annotations

import pytest

from stepguard.check.settings import as_number, find, flat, number


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"trainer": {"lr": 1e-5}}, "trainer.lr"),
        ({"LEARNING_RATE": 1e-5}, "LEARNING_RATE"),
        ({"a": {"b": {"lr": 1.0}}, "optim": {"lr": 1e-5}}, "optim.lr"),
        ({"lr": 1.0, "optimizer": {"learning_rate": 1e-5}}, "optimizer.learning_rate"),
        ({"optim": {"lr": "1e-5"}}, "optim.lr"),
    ],
)
def test_learning_rate_is_found_by_its_meaning(settings: dict[str, object], key: str) -> None:
    found = find(settings, "lr")
    assert found is not None
    assert (found.key, number(settings, "lr")) == (key, 1e-5)


def test_leaves_of_nested_mappings_and_lists_have_dotted_keys() -> None:
    settings = {"a": {"b": 1, "empty": {}}, "stages": [{"lr": 2}, {"lr": 3}], "sizes": [4, 5]}
    assert {leaf.key: leaf.value for leaf in flat(settings)} == {
        "a.b": 1,
        "a.empty": {},
        "stages.0.lr": 2,
        "stages.1.lr": 3,
        "sizes": [4, 5],
    }


@pytest.mark.parametrize(
    ("value", "expected"),
    [("1e-4", 1e-4), ("1_000", 1000.0), (" 2 ", 2.0), (3, 3.0), (True, None), ("1e-4x", None)],
)
def test_text_that_spells_a_number_is_one(value: object, expected: float | None) -> None:
    assert as_number(value) == expected


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, [1]])
def test_value_that_is_not_a_finite_number_is_none(value: object) -> None:
    assert as_number(value) is None
