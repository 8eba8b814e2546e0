"""Scenes in which a step is judged, and what was found in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from scenes import (
    QUIET,
    Batch,
    Scene,
    batches,
    stepped,
    watched,
)
from stepguard import GuardConfig, Incident

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
