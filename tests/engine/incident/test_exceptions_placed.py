"""The line and the capsule of an exception are those of the code that raised it."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import stepguard
from engine.incident.test_exceptions import DATA, GUILTY, guilty, in_target, scene_of
from scenes import (
    quiet,
)
from stepguard import Guard


def test_the_line_that_is_named_is_the_one_that_raised() -> None:
    scene = scene_of("target")
    with (
        Guard(scene.model, scene.optimizer, config=quiet(locate=True)) as guard,
        pytest.raises(IndexError),
    ):
        guard.step(scene.loss_fn, guilty(DATA[0]))
    origin = guard.incidents[0].origin
    lines, first = inspect.getsourcelines(in_target)
    assert origin is not None and origin.source is not None
    assert int(origin.source.rpartition(":")[2]) == first + len(lines) - 1


def test_capsule_of_an_exception_raises_and_is_placed_again(tmp_path: Path) -> None:
    scene = scene_of("target")
    config = quiet(run_dir=tmp_path, locate=True)
    with Guard(scene.model, scene.optimizer, config=config) as guard, pytest.raises(IndexError):
        guard.step(scene.loss_fn, DATA[0], guilty(DATA[1]), DATA[2])
    capsule = guard.incidents[0].capsule
    assert capsule is not None
    fresh = scene_of("target")
    again = stepguard.replay(
        tmp_path / capsule, build=lambda: (fresh.model, fresh.optimizer, fresh.loss_fn)
    )
    assert again.origin is not None and again.origin.reproduced
    assert again.origin.samples == (GUILTY,) and again.origin.micro_batch == 1
