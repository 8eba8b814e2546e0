"""Scenes in which a step is judged, and what was found in them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from guard.optimizers import SAM
from scenes import QUIET, Batch, Scene, batches, plain_step, state_of, stepped, watched
from stepguard import GuardConfig, Incident, watch

DATA = batches(12)


def sgd(model: nn.Module, **settings: Any) -> Scene:
    return Scene(model, torch.optim.SGD(model.parameters(), lr=0.05), **settings)


def adam(model: nn.Module, *, fused: bool = False, **settings: Any) -> Scene:
    return Scene(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused), **settings)


def changed_loss(
    change: Callable[[Tensor, Scene], Tensor], on: Batch
) -> Callable[[Scene, Any], Tensor]:
    """The usual loss, changed on one batch only."""

    def loss(scene: Scene, batch: Any) -> Tensor:
        value = nn.functional.cross_entropy(scene.model(batch[0]), batch[1])
        return change(value, scene) if batch is on else value

    return loss


def incidents(
    scene: Scene, loop: str, steps: list[tuple[Any, ...]], config: GuardConfig = QUIET
) -> list[Incident]:
    if loop == "watch":
        return list(watched(scene, steps, config))
    return [
        result.incident for result in stepped(scene, steps, config) if result.incident is not None
    ]


def kinds(found: list[Incident]) -> list[tuple[int, str]]:
    return [(incident.step, incident.verdict.kind) for incident in found]


def first_weight(scene: Scene) -> Tensor:
    return next(scene.model.parameters())


def held(value: Any) -> Any:
    """Everything an object holds, as plain values that can be compared bit by bit."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        named = [
            (f"#{i}" if isinstance(key, Tensor) else str(key), item)
            for i, (key, item) in enumerate(value.items())
        ]
        return {
            key: held(item)
            for key, item in named
            if not key.endswith("_hooks") and not callable(item)
        }
    if isinstance(value, list | tuple | deque):
        return [held(item) for item in value]
    if hasattr(value, "__dict__"):
        return held(vars(value))
    return value


def everything(scene: Scene) -> dict[str, Any]:
    """What a step may change, with the optimizer's attributes, which `state_dict` leaves out."""
    return {**held(state_of(scene)), "held": held(scene.optimizer)}


def loop_step(scene: Scene, micro: Sequence[Any]) -> None:
    """A step of an ordinary loop, with the closure that SAM wants."""
    if not isinstance(scene.optimizer, SAM):
        return plain_step(scene, micro)

    def evaluated() -> Tensor:
        loss: Tensor = scene.loss_fn(micro[0])
        loss.backward()
        return loss

    scene.optimizer.zero_grad()
    evaluated()
    return scene.optimizer.step(evaluated)


def driven(scene: Scene, driver: str, steps: Iterable[Sequence[Any]]) -> tuple[Incident, ...]:
    """Run the steps unguarded, through `guard.step`, or in a watched loop."""
    if driver == "step":
        return tuple(r.incident for r in stepped(scene, steps) if r.incident is not None)
    if driver == "unguarded":
        for micro in steps:
            loop_step(scene, micro)
        return ()
    with watch(scene.model, scene.optimizer, config=QUIET, **scene.close_over()) as guard:
        for micro in steps:
            loop_step(scene, micro)
        return guard.incidents
