"""Two hundred healthy steps are the same bit for bit with a guard and without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from pairwise import pairwise
from scenes import (
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

pytestmark = pytest.mark.slow

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
    # the first scales overflow and the growth is quick, so that the warm-up of a scaler is part of
    # every run
    scaler = GradScaler("cpu", init_scale=2.0**22, growth_interval=20) if scaled else None
    made = OPTIMIZERS[optimizer](model.parameters())
    return Scene(model, made, scaler=scaler, autocast=autocast, clip_norm=clip)


def _run(
    make: Callable[[], Scene], loop: Callable[..., Any], steps: list[tuple[Any, ...]]
) -> tuple[Any, ...]:
    scene = make()
    torch.manual_seed(11)
    loop(scene, steps)
    return state_of(scene), generators()


def assert_same_run(make: Callable[[], Scene], steps: list[tuple[Any, ...]]) -> None:
    """Bare, stepped and watched end in the same state and leave the same generators behind."""
    expected = _run(make, bare, steps)
    fresh = state_of(make())
    assert difference(fresh["model"], expected[0]["model"]), (
        "the bare loop learned nothing: the test cannot fail"
    )
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


@pytest.mark.parametrize(("optimizer", "precision", "accumulate", "clip"), pairwise(_matrix()))
def test_healthy_run_is_the_same(
    optimizer: str, precision: str, accumulate: int, clip: float | None
) -> None:
    assert_same_run(lambda: _scene(optimizer, precision, clip), grouped(DATA, accumulate))


def test_scaler_warm_up_is_part_of_the_matrix() -> None:
    scene = _scene("SGD", "fp16+scaler", None)
    bare(scene, grouped(DATA[:10], 1))
    assert scene.scaler is not None and scene.scaler.get_scale() < 2.0**22


@pytest.mark.parametrize("clip", [0.05, 2.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_parameters_are_clipped_as_torch_clips_them(
    dtype: torch.dtype, clip: float
) -> None:
    def make() -> Scene:
        model = plain_net().to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return Scene(model, optimizer, clip_norm=clip, loss=_half_loss)

    def _half_loss(scene: Scene, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(scene.model(batch[0].to(dtype)).float(), batch[1])

    assert_same_run(make, grouped(DATA[:60], 1))


def test_mixed_parameter_dtypes_are_clipped_as_torch_clips_them() -> None:
    def make() -> Scene:
        model = plain_net()
        model[0].to(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return Scene(model, optimizer, clip_norm=0.1, loss=_mixed_loss)

    def _mixed_loss(scene: Scene, batch: Any) -> torch.Tensor:
        hidden = scene.model[0](batch[0].bfloat16()).float()
        return nn.functional.cross_entropy(scene.model[2](scene.model[1](hidden)), batch[1])

    assert_same_run(make, grouped(DATA[:60], 1))


@pytest.mark.parametrize("fused", [False, True])
def test_float64_default_dtype_is_the_same(fused: bool) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        data = [(x.double(), y) for x, y in DATA[:60]]

        def make() -> Scene:
            model = noisy_net()
            assert next(model.parameters()).dtype is torch.float64
            return Scene(
                model,
                torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused),
                clip_norm=0.5,
                loss=_loss,
            )

        def _loss(scene: Scene, batch: Any) -> torch.Tensor:
            return nn.functional.cross_entropy(scene.model(batch[0]), batch[1])

        assert_same_run(make, grouped(data, 2))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("optimizer", ["SparseAdam", "SGD"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_sparse_gradients_are_the_same(optimizer: str, accumulate: int) -> None:
    source = torch.Generator().manual_seed(3)
    words = [torch.randint(20, (5,), generator=source) for _ in range(100)]

    def make() -> Scene:
        torch.manual_seed(0)
        model = nn.Embedding(20, 4, sparse=True)
        made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
        return Scene(model, made, loss=lambda scene, batch: scene.model(batch).square().sum())

    assert_same_run(make, grouped(words, accumulate))


def test_complex_parameters_are_the_same() -> None:
    class Rotation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(
                torch.ones(FEATURES, CLASSES, dtype=torch.complex64) * (0.3 + 0.1j)
            )

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return (inputs.to(torch.complex64) @ self.turn).abs()

    def make() -> Scene:
        model = Rotation()
        return Scene(
            model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), clip_norm=0.5
        )

    assert_same_run(make, grouped(DATA[:60], 2))


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "AdamW-fused"])
@pytest.mark.parametrize("precision", ["fp32", "fp16+scaler"])
def test_one_cycle_schedule_is_the_same(optimizer: str, precision: str) -> None:
    def make() -> Scene:
        scene = _scene(optimizer, precision, 0.5)
        scene.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            scene.optimizer, max_lr=0.05, total_steps=STEPS
        )
        return scene

    assert_same_run(make, grouped(DATA[:100], 1))


@pytest.mark.parametrize("fused", [False, True])
def test_learning_rate_in_a_tensor_is_the_same(fused: bool) -> None:
    def make() -> Scene:
        model = noisy_net()
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=torch.tensor(1e-2), fused=fused, foreach=False
        )
        return Scene(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.5))

    assert_same_run(make, grouped(DATA[:40], 1))
