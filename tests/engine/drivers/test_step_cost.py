"""What one step calls of ours: few functions, in few modules, however large the model is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import stepguard
from scenes import CLASSES, FEATURES, Batch, Scene, batches, plain_step, poisoned, quiet
from stepguard import GuardConfig

OURS = str(Path(stepguard.__file__).parent)
DATA = batches(2)
SETTLED = 70
"""Steps before those that are counted: by then the window of losses is full."""
MOST = {
    ("step", False): (107, 20),
    ("step", True): (118, 22),
    ("watch", False): (155, 25),
    ("watch", True): (182, 28),
}
"""Calls of ours, and the modules they are in, of one healthy step; True: a fused optimizer."""
MOST_OF_A_BAD_STEP = 70
"""Modules."""


@contextmanager
def driven(drive: str, scene: Scene, config: GuardConfig) -> Iterator[Callable[[Batch], object]]:
    """The scene under `guard.step`, or a loop of its own under `watch`."""
    make = stepguard.watch if drive == "watch" else stepguard.Guard
    with make(scene.model, scene.optimizer, config=config) as guard:
        if drive == "watch":
            yield lambda batch: plain_step(scene, (batch,))
        else:
            yield lambda batch: guard.step(scene.loss_fn, batch)


def calls(step: Callable[[], object]) -> tuple[int, int]:
    """Calls of functions of ours in one step, and the modules they are in."""
    found: list[str] = []

    def event(frame: FrameType, kind: str, argument: Any) -> None:
        if kind == "call" and frame.f_code.co_filename.startswith(OURS):
            found.append(frame.f_code.co_filename)

    sys.setprofile(event)
    try:
        step()
    finally:
        sys.setprofile(None)
    return len(found), len(set(found))


def scene(layers: int, *, fused: bool) -> Scene:
    torch.manual_seed(0)
    middle = [nn.Linear(8, 8) for _ in range(layers)]
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), *middle, nn.Linear(8, CLASSES))
    return Scene(model, torch.optim.AdamW(model.parameters(), 1e-3, fused=fused))


@pytest.mark.parametrize(("drive", "fused"), MOST)
def test_healthy_step_calls_few_functions_however_many_layers_there_are(
    drive: str, fused: bool, tmp_path: Path
) -> None:
    counted = []
    for layers in (2, 40):
        config = quiet(run_dir=tmp_path / str(layers), locate=True, look_every=None)
        with driven(drive, scene(layers, fused=fused), config) as step:
            for _ in range(SETTLED):
                step(DATA[0])
            # some steps do more now and then: a collected guard of another test ends, say
            counted.append(min(calls(lambda: step(DATA[0])) for _ in range(5)))
    (few, modules), (many, _) = counted
    # a few calls depend on where the loss stands, none on the 38 further layers
    assert abs(many - few) < 10
    assert few <= MOST[drive, fused][0]
    assert modules <= MOST[drive, fused][1]


@pytest.mark.parametrize("drive", ["step", "watch"])
def test_bad_step_runs_through_few_modules(drive: str, tmp_path: Path) -> None:
    config = quiet(run_dir=tmp_path, locate=True, look_every=None)
    with driven(drive, scene(2, fused=False), config) as step:
        for _ in range(3):
            step(DATA[0])
        assert calls(lambda: step(poisoned(DATA[1])))[1] <= MOST_OF_A_BAD_STEP
