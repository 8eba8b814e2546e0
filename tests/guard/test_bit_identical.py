"""A healthy run is the same bit for bit with a guard and without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD, AdamW, Optimizer

from forked import FULL
from guard.judging import driven, everything
from guard.optimizers import OPTIMIZERS as PUBLIC
from pairwise import pairwise
from scenes import (
    CLASSES,
    FEATURES,
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

pytestmark = pytest.mark.slow

STEPS = 200 if FULL else 48
DATA = batches(STEPS)
DRIVERS = ("step", "watch")
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda ps: SGD(ps, lr=0.05, momentum=0.9, nesterov=True),
    "AdamW": lambda ps: AdamW(ps, lr=1e-2),
    "AdamW-foreach": lambda ps: AdamW(ps, lr=1e-2, foreach=True),
    "AdamW-fused": lambda ps: AdamW(ps, lr=1e-2, fused=True),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
    "Muon": lambda ps: torch.optim.Muon(ps, lr=1e-2),
    "LBFGS": lambda ps: torch.optim.LBFGS(ps, lr=0.05, max_iter=2, history_size=4),
    **PUBLIC,
}
PRECISIONS: dict[str, tuple[torch.dtype | None, bool]] = {
    "fp32": (None, False),
    "bf16": (torch.bfloat16, False),
    "fp16+scaler": (torch.float16, True),
}


def _scene(optimizer: str, precision: str = "fp32", clip: float | None = None) -> Scene:
    model = noisy_net()
    autocast, scaled = PRECISIONS[precision]
    # the first scales overflow and the growth is quick, so that the warm-up of a scaler is part of
    # every run
    scaler = GradScaler("cpu", init_scale=2.0**22, growth_interval=20) if scaled else None
    made = OPTIMIZERS[optimizer](model.parameters())
    return Scene(model, made, scaler=scaler, autocast=autocast, clip_norm=clip)


def assert_same_run(make: Callable[[], Scene], driver: str, steps: list[tuple[Any, ...]]) -> None:
    """Guarded and unguarded end in the same state and leave the same generators behind."""
    ends = []
    for how in ("unguarded", driver):
        scene = make()
        start = state_of(scene)["model"]
        torch.manual_seed(11)
        assert driven(scene, how, steps) == ()
        ends.append((everything(scene), generators()))
        learned = difference(start, state_of(scene)["model"])
        assert learned, "the loop learned nothing: the test cannot fail"
    assert difference(ends[1], ends[0]) == ""


def _matrix() -> Iterator[tuple[str, str, str, int, float | None]]:
    for name, driver, precision, accumulate, clip in product(
        OPTIMIZERS, DRIVERS, PRECISIONS, (1, 4), (None, 0.5)
    ):
        if precision != "fp32" and name in PUBLIC:
            continue
        if name == "LBFGS" and precision == "fp16+scaler":
            continue  # GradScaler refuses closures
        if name == "sam" and (accumulate, clip) != (1, None):
            continue  # its closure is the whole step
        yield name, driver, precision, accumulate, clip


@pytest.mark.parametrize(
    ("optimizer", "driver", "precision", "accumulate", "clip"), pairwise(_matrix())
)
def test_healthy_run_is_the_same(
    optimizer: str, driver: str, precision: str, accumulate: int, clip: float | None
) -> None:
    assert_same_run(lambda: _scene(optimizer, precision, clip), driver, grouped(DATA, accumulate))


def test_scaler_warm_up_is_part_of_the_matrix() -> None:
    scene = _scene("SGD", "fp16+scaler", None)
    bare(scene, grouped(DATA[:10], 1))
    assert scene.scaler is not None and scene.scaler.get_scale() < 2.0**22


# --- parameters, gradients and schedules of other kinds


def _half(dtype: torch.dtype, clip: float) -> Scene:
    model = plain_net().to(dtype)

    def loss(scene: Scene, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(scene.model(batch[0].to(dtype)).float(), batch[1])

    return Scene(model, SGD(model.parameters(), lr=0.05, momentum=0.9), clip_norm=clip, loss=loss)


def _mixed() -> Scene:
    model = plain_net()
    model[0].to(torch.bfloat16)

    def loss(scene: Scene, batch: Any) -> torch.Tensor:
        hidden = scene.model[0](batch[0].bfloat16()).float()
        return nn.functional.cross_entropy(scene.model[2](scene.model[1](hidden)), batch[1])

    return Scene(model, AdamW(model.parameters(), lr=1e-2), clip_norm=0.1, loss=loss)


def _double(fused: bool) -> Scene:
    model = noisy_net().double()

    def loss(scene: Scene, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(scene.model(batch[0].double()), batch[1])

    optimizer = AdamW(model.parameters(), lr=1e-2, fused=fused)
    return Scene(model, optimizer, clip_norm=0.5, loss=loss)


def _sparse(make: type[Optimizer]) -> Scene:
    torch.manual_seed(0)
    model = nn.Embedding(20, 4, sparse=True)

    def loss(scene: Scene, batch: Any) -> torch.Tensor:
        return scene.model((batch[0].abs() * 9).long().clamp(max=19)).square().sum()

    return Scene(model, make(model.parameters(), lr=0.1), loss=loss)  # type: ignore[call-arg]


class Rotation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        turn = torch.ones(FEATURES, CLASSES, dtype=torch.complex64)
        self.turn = nn.Parameter(turn * (0.3 + 0.1j))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs.to(torch.complex64) @ self.turn).abs()


def _complex() -> Scene:
    model = Rotation()
    return Scene(model, SGD(model.parameters(), lr=0.05, momentum=0.9), clip_norm=0.5)


def _one_cycle(optimizer: str, precision: str) -> Scene:
    scene = _scene(optimizer, precision, 0.5)
    scene.scheduler = torch.optim.lr_scheduler.OneCycleLR(
        scene.optimizer, max_lr=0.05, total_steps=STEPS
    )
    return scene


def _rate_in_a_tensor(fused: bool) -> Scene:
    model = noisy_net()
    optimizer = AdamW(model.parameters(), lr=torch.tensor(1e-2), fused=fused, foreach=False)
    return Scene(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.5))


SCENES: dict[str, Callable[[], Scene]] = {
    "float16, clipped hard": lambda: _half(torch.float16, 0.05),
    "float16, clipped": lambda: _half(torch.float16, 2.0),
    "float16, never clipped": lambda: _half(torch.float16, 1e4),
    "bfloat16, clipped hard": lambda: _half(torch.bfloat16, 0.05),
    "bfloat16, never clipped": lambda: _half(torch.bfloat16, 1e4),
    "mixed dtypes": _mixed,
    "float64": lambda: _double(fused=False),
    "float64, fused": lambda: _double(fused=True),
    "sparse Adam": lambda: _sparse(torch.optim.SparseAdam),
    "sparse SGD": lambda: _sparse(SGD),
    "complex": _complex,
    "one cycle": lambda: _one_cycle("SGD", "fp32"),
    "one cycle, scaled": lambda: _one_cycle("AdamW", "fp16+scaler"),
    "one cycle, scaled and fused": lambda: _one_cycle("AdamW-fused", "fp16+scaler"),
    "rate in a tensor": lambda: _rate_in_a_tensor(fused=False),
    "rate in a tensor, fused": lambda: _rate_in_a_tensor(fused=True),
}


@pytest.mark.parametrize(
    ("name", "driver", "accumulate"), pairwise(product(SCENES, DRIVERS, (1, 2)))
)
def test_healthy_run_of_another_kind_is_the_same(name: str, driver: str, accumulate: int) -> None:
    assert_same_run(SCENES[name], driver, grouped(DATA[:40], accumulate))


def test_float64_as_the_default_dtype_is_the_same() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert_same_run(lambda: _double(fused=False), "step", grouped(DATA[:20], 2))
    finally:
        torch.set_default_dtype(torch.float32)
