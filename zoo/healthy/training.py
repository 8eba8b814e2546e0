"""What a family of healthy training is: a seed gives learners, and a generator that says which
update comes next.

    @family("reinforcement", "step", "watch")
    def reinforce(seed: int) -> Training: ...

The same training is driven bare and guarded. What the loop does between two updates (acting, target
networks, EMA) stands in the generator between two `yield`s, as it stands between two updates in a
script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Way = Literal["step", "watch", "run", "trainer", "lightning"]
Batch = Any
Update = tuple[str, tuple[Batch, ...]]
"""The learner whose turn it is, and its micro-batches."""
Loss = Callable[[Batch], "Tensor | dict[str, Tensor]"]


@dataclass(slots=True, kw_only=True)
class Learner:
    """One optimizer, what it trains, and the loss of one micro-batch."""

    model: nn.Module
    optimizer: Optimizer
    loss: Loss
    further: tuple[Optimizer, ...] = ()
    """Optimizers of other parts of the same model that step after the same backward; only where the
    loop is watched.
    """
    scheduler: Any = None
    scaler: torch.amp.GradScaler | None = None
    scaler_handed_over: bool = True
    """False: the script has a scaler and the guard is not told of it."""
    unscales: bool = True
    """Does the loop call `scaler.unscale_` before the update?"""
    clip: float | None = None
    modules: dict[str, nn.Module] | None = None


@dataclass(slots=True, kw_only=True)
class Training:
    """A run that is about to begin."""

    learners: dict[str, Learner]
    updates: Callable[[int], Iterator[Update]]
    """What the loop does in a step: it yields every update that is to be made."""
    world: Callable[[], Any] = dict
    """Whatever else the loop has changed at the end: target networks, queues, counters."""


@dataclass(frozen=True, slots=True)
class Family:
    """A named kind of training and the way the guard comes in."""

    name: str
    group: str
    way: Way
    build: Callable[..., Any]
    """`step` and `watch`: of a seed, a Training. Else a whole run: of seed, steps and an Outcome
    (None: bare).
    """


FAMILIES: dict[str, Family] = {}


def register(name: str, group: str, way: Way, build: Callable[[int], Any]) -> None:
    full = f"{name} ({way})"
    if full in FAMILIES:
        raise ValueError(f"there are two families called {full!r}.")
    FAMILIES[full] = Family(full, group, way, build)


def family(group: str, *ways: Way) -> Callable[[Callable[[int], Any]], Callable[[int], Any]]:
    """Register the function as a family of this group, once for each way in."""

    def taken(build: Callable[[int], Any]) -> Callable[[int], Any]:
        for way in ways:
            register(build.__name__, group, way, build)
        return build

    return taken


def single(
    learner: Learner, batches: Callable[[int], Any], world: Callable[[], Any] = dict
) -> Training:
    """One learner, one update a step. A list of `batches` is taken as micro-batches."""

    def updates(step: int) -> Iterator[Update]:
        batch = batches(step)
        yield "only", tuple(batch) if isinstance(batch, list) else (batch,)

    return Training(learners={"only": learner}, updates=updates, world=world)


@dataclass(slots=True)
class Calls:
    """How often the user's code ran."""

    loss: int = 0
    forward: int = 0
    handles: list[Any] = field(default_factory=list)

    def count(self, training: Training) -> None:
        models: list[nn.Module] = []
        for learner in training.learners.values():
            learner.loss = self._counted(learner.loss)
            if not any(model is learner.model for model in models):
                models.append(learner.model)
        self.handles = [model.register_forward_pre_hook(self.seen) for model in models]

    def stop(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _counted(self, loss: Loss) -> Loss:
        def counted(batch: Batch) -> Tensor | dict[str, Tensor]:
            self.loss += 1
            return loss(batch)

        return counted

    def seen(self, module: nn.Module, inputs: Any) -> None:
        self.forward += 1
