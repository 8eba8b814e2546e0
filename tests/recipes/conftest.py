"""A recipe's modules are imported as its scripts do, from its own folder, and are gone after the
test.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState

from integrations.trainers import same_environment
from recipe_process import RECIPES


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


@pytest.fixture
def folder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the recipe that the test module's name begins with, first on the path."""
    stem = Path(request.path).stem.removeprefix("test_")
    name = next(
        place.parent.name
        for place in RECIPES.glob("*/modes.py")
        if stem.startswith(place.parent.name)
    )
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(RECIPES / name))
    _forget()
    with same_environment():
        yield RECIPES / name
    _forget()
    for module in set(sys.modules) - before:
        if str(getattr(sys.modules[module], "__file__", None) or "").startswith(
            str(RECIPES / name)
        ):
            del sys.modules[module]
