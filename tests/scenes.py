"""What the guard's tests share: small models, fixed data, three loops (bare, stepped, watched),
exact comparison.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import stepguard
from settings_of import changed
from stepguard import Guard, GuardConfig, Probes, StepResult

QUIET = GuardConfig(probes=Probes(locate_budget=0), terminal="quiet")
FEATURES, CLASSES = 6, 3
Batch = tuple[Tensor, Tensor]
NAN, INF = math.nan, math.inf


def quiet(**settings: Any) -> GuardConfig:
    """The quiet settings with some of them changed."""
    return changed(QUIET, **settings)


def batches(count: int, *, size: int = 4, seed: int = 7) -> list[Batch]:
    """Batches that depend on `seed` only, never on the global generators."""
    source = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, FEATURES, generator=source),
            torch.randint(CLASSES, (size,), generator=source),
        )
        for _ in range(count)
    ]


def poisoned(batch: Batch, value: float = NAN) -> Batch:
    """The same batch with one bad element."""
    inputs = batch[0].clone()
    inputs[0, 0] = value
    return inputs, batch[1]


def grouped(flat: Sequence[Any], size: int) -> list[tuple[Any, ...]]:
    """Micro-batches of each optimizer step."""
    return [tuple(flat[i : i + size]) for i in range(0, len(flat), size)]


def noisy_net() -> nn.Module:
    """BatchNorm and Dropout; every parameter is a matrix, so that Muon takes it too."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 8, bias=False),
        nn.BatchNorm1d(8, affine=False),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(8, CLASSES, bias=False),
    )


def calm_net() -> nn.Module:
    """BatchNorm, no randomness: a batch that never came leaves no trace in any generator."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 8, bias=False),
        nn.BatchNorm1d(8, affine=False),
        nn.ReLU(),
        nn.Linear(8, CLASSES, bias=False),
    )


def plain_net() -> nn.Module:
    """Nothing but linear layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))


@dataclass
class Scene:
    """Everything one training loop needs, built fresh for every run."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None = None
    scaler: GradScaler | None = None
    autocast: torch.dtype | None = None
    clip_norm: float | None = None
    hold_schedule: bool = True
    """The bare loop does not advance the schedule when the scaler skipped."""
    loss: Callable[[Scene, Any], Any] | None = None
    ema: nn.Module | None = None
    losses: list[float] = field(default_factory=list)

    def loss_fn(self, batch: Any) -> Any:
        if self.loss is not None:
            return self.loss(self, batch)
        inputs, targets = batch
        with self.precision():
            return nn.functional.cross_entropy(self.model(inputs).float(), targets)

    def precision(self) -> AbstractContextManager[Any]:
        return (
            torch.autocast("cpu", dtype=self.autocast)
            if self.autocast is not None
            else nullcontext()
        )

    def close_over(self) -> dict[str, Any]:
        """What a guard is given besides model and optimizer."""
        return {"scheduler": self.scheduler, "scaler": self.scaler}


def bare(scene: Scene, steps: Iterable[Sequence[Any]]) -> None:
    """The loop people write."""
    for micro in steps:
        plain_step(scene, micro)


def plain_step(scene: Scene, micro: Sequence[Any]) -> None:
    if isinstance(scene.optimizer, torch.optim.LBFGS):
        _closure_step(scene, micro)
        return
    scene.optimizer.zero_grad(set_to_none=True)
    for batch in micro:
        loss = total(scene.loss_fn(batch))
        (scene.scaler.scale(loss) if scene.scaler is not None else loss).backward()
    _update(scene)


def total(output: Any) -> Tensor:
    return (
        sum(list(output.values())[1:], start=next(iter(output.values())))
        if isinstance(output, dict)
        else output
    )


def _update(scene: Scene) -> None:
    scaler, optimizer = scene.scaler, scene.optimizer
    if scene.clip_norm is not None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(scene.model.parameters(), scene.clip_norm)
    went_through = True
    if scaler is not None:
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        went_through = scaler.get_scale() >= before or not scene.hold_schedule
    else:
        optimizer.step()
    if scene.scheduler is not None and went_through:
        scene.scheduler.step()
    if scene.ema is not None and went_through:
        scene.ema.update_parameters(scene.model)


def _closure_step(scene: Scene, micro: Sequence[Any]) -> None:
    def closure() -> Tensor:
        scene.optimizer.zero_grad(set_to_none=True)
        losses = []
        for batch in micro:
            loss = scene.loss_fn(batch)
            loss.backward()
            losses.append(loss.detach())
        if scene.clip_norm is not None:
            nn.utils.clip_grad_norm_(scene.model.parameters(), scene.clip_norm)
        return sum(losses[1:], start=losses[0])

    scene.optimizer.step(closure)
    if scene.scheduler is not None:
        scene.scheduler.step()


def stepped(
    scene: Scene, steps: Iterable[Sequence[Any]], config: GuardConfig = QUIET
) -> list[StepResult]:
    """The same through `guard.step`; returns what every step returned, read."""
    config = replace(config, clip_norm=scene.clip_norm)
    with Guard(scene.model, scene.optimizer, config=config, **scene.close_over()) as guard:
        if scene.ema is not None:
            guard.on_commit(lambda: scene.ema.update_parameters(scene.model))
        return [guard.step(scene.loss_fn, *micro) for micro in steps]


def watched(
    scene: Scene, steps: Iterable[Sequence[Any]], config: GuardConfig = QUIET
) -> tuple[Any, ...]:
    """The same through `watch`; returns the incidents."""
    ema, scene.ema = scene.ema, None
    with stepguard.watch(
        scene.model, scene.optimizer, config=config, **scene.close_over()
    ) as guard:
        if ema is not None:
            guard.on_commit(lambda: ema.update_parameters(scene.model))
        for micro in steps:
            plain_step(scene, micro)
        incidents = guard.incidents
    scene.ema = ema
    return incidents


LOOPS: dict[str, Callable[..., Any]] = {"step": stepped, "watch": watched}


def state_of(scene: Scene) -> dict[str, Any]:
    """Everything a step may change, copied."""
    return copy.deepcopy(
        {
            "model": dict(scene.model.state_dict()),
            "optimizer": scene.optimizer.state_dict(),
            "scheduler": scene.scheduler.state_dict() if scene.scheduler is not None else None,
            "scaler": scene.scaler.state_dict() if scene.scaler is not None else None,
            "ema": dict(scene.ema.state_dict()) if scene.ema is not None else None,
        }
    )


def generators() -> tuple[Any, ...]:
    """Every generator a step may draw from."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()


def difference(left: Any, right: Any, place: str = "") -> str:
    """Where two nested values first differ, bit for bit; empty when they do not."""
    return next(_differences(left, right, place), "")


def _differences(left: Any, right: Any, place: str) -> Iterator[str]:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        same = left.dtype == right.dtype and left.shape == right.shape and _same_bits(left, right)
        yield from [] if same else [f"{place}: {left} is not {right}"]
    elif isinstance(left, dict) and isinstance(right, dict):
        yield from _differences(sorted(map(str, left)), sorted(map(str, right)), f"{place} keys")
        for key in left.keys() & right.keys():
            yield from _differences(left[key], right[key], f"{place}.{key}")
    elif isinstance(left, list | tuple | np.ndarray):
        yield from (
            [] if len(left) == len(right) else [f"{place}: {len(left)} is not {len(right)} long"]
        )
        for index, (a, b) in enumerate(zip(left, right, strict=False)):
            yield from _differences(a, b, f"{place}[{index}]")
    elif left != right and not (left != left and right != right):
        yield f"{place}: {left!r} is not {right!r}"


def _same_bits(left: Tensor, right: Tensor) -> bool:
    if left.is_sparse:
        left, right = left.to_dense(), right.to_dense()
    if torch.equal(left, right):
        return True
    return torch.equal(left.isnan(), right.isnan()) and torch.equal(
        left.nan_to_num(), right.nan_to_num()
    )
