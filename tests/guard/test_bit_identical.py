"""Two hundred healthy steps are the same bit for bit with a guard and without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from guard.scenes import (
    CLASSES,
    FEATURES,
    LOOPS,
    Scene,
    bare,
    batches,
    difference,
    generators,
    grouped,
    noisy_net,
    plain_net,
    state_of,
)

STEPS = 200
DATA = batches(STEPS)

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, nesterov=True),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "AdamW-foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
    "AdamW-fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
    "Muon": lambda ps: torch.optim.Muon(ps, lr=1e-2),
    "LBFGS": lambda ps: torch.optim.LBFGS(ps, lr=0.05, max_iter=2, history_size=4),
}
PRECISIONS: dict[str, tuple[torch.dtype | None, bool]] = {
    "fp32": (None, False),
    "bf16": (torch.bfloat16, False),
    "fp16+scaler": (torch.float16, True),
}


def _scene(optimizer: str, precision: str, clip: float | None) -> Scene:
    model = noisy_net()
    autocast, scaled = PRECISIONS[precision]
    # the first scales overflow and the growth is quick, so that the warm-up of a scaler is part of every run
    scaler = GradScaler("cpu", init_scale=2.0**22, growth_interval=20) if scaled else None
    made = OPTIMIZERS[optimizer](model.parameters())
    return Scene(model, made, scaler=scaler, autocast=autocast, clip_norm=clip)


def _run(make: Callable[[], Scene], loop: Callable[..., Any], steps: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    scene = make()
    torch.manual_seed(11)
    loop(scene, steps)
    return state_of(scene), generators()


def assert_same_run(make: Callable[[], Scene], steps: list[tuple[Any, ...]]) -> None:
    """Bare, stepped and watched end in the same state and leave the same generators behind."""
    expected = _run(make, bare, steps)
    fresh = state_of(make())
    assert difference(fresh["model"], expected[0]["model"]), "the bare loop learned nothing: the test cannot fail"
    for name, loop in LOOPS.items():
        assert difference(_run(make, loop, steps), expected) == "", name


def _matrix() -> Iterator[tuple[str, str, int, float | None]]:
    for optimizer in OPTIMIZERS:
        for precision in PRECISIONS:
            if optimizer == "LBFGS" and precision == "fp16+scaler":
                continue  # GradScaler refuses closures
            for accumulate in (1, 4):
                for clip in (None, 0.5):
                    yield optimizer, precision, accumulate, clip


@pytest.mark.parametrize(("optimizer", "precision", "accumulate", "clip"), list(_matrix()))
def test_healthy_run_is_the_same(optimizer: str, precision: str, accumulate: int, clip: float | None) -> None:
    assert_same_run(lambda: _scene(optimizer, precision, clip), grouped(DATA, accumulate))
