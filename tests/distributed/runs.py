"""What the ranks of tests train: own data, three loops (bare, step, watch), their state."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import stepguard
from settings_of import config_of
from stepguard import Guard, Incident, TrainingHalted
from stepguard.engine.protect import GuardDisarmed
from stepguard.tensors.values import local_part

LOOPS = ("step", "watch")
NO_COPY = stepguard.Policy(actions=("retry", "leave_out", "skip", "rewind", "stop"))
"""Without healing from another rank, which would come before a rewind."""


def own_batch(step: int, *shape: int, rank: int | None = None) -> Tensor:
    """Depends on the step and on the rank only."""
    seed = 100 * step + (dist.get_rank() if rank is None else rank)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mean_square(model: Any, batch: Any) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def average(parameter: Tensor) -> None:
    """Data parallelism by hand."""
    if parameter.grad is not None:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def local(value: Any) -> Any:
    return local_part(value).detach().clone() if isinstance(value, Tensor) else value


def state_of(
    model: nn.Module, optimizer: Any, part: Callable[[Any], Any] = local
) -> dict[str, Any]:
    """What this rank holds of it all."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    state = {f"model.{name}": part(value) for name, value in tensors}
    # ZeroRedundancyOptimizer keeps the slots of its own share
    slots = getattr(optimizer, "optim", optimizer).state
    for name, parameter in model.named_parameters():
        for slot, value in slots.get(parameter, {}).items():
            state[f"{slot}.{name}"] = part(value)
    return state


class Run:
    """Steps by `guard.step`, by `watch`, or without a guard; a context that ends with a halt."""

    def __init__(
        self,
        loop: str,
        model: Any,
        optimizer: Any,
        loss: Callable[[Any, Any], Tensor] = mean_square,
        *,
        guarded: nn.Module | None = None,
        by_hand: bool = False,
        clip: float | None = None,
        loader: Any = None,
        **settings: Any,
    ) -> None:
        """`guarded`: what the guard is given, if it is not the model that is called."""
        self.loop = loop
        self.model = model
        self.optimizer = optimizer
        self.loss = loss
        self.clip = clip
        self.halted: int | None = None
        self.losses: list[float] = []
        self.norms: list[float | None] = []
        self._by_hand = by_hand and loop != "step"
        self._hooks: list[Any] = []
        if by_hand and loop == "step":
            self._hooks = [
                p.register_post_accumulate_grad_hook(average) for p in model.parameters()
            ]
        if loop == "bare":
            return
        settings = {"terminal": "quiet", "agree_timeout": 30.0, **settings}
        if loop == "step":
            settings["clip_norm"] = clip
        make = stepguard.watch if loop == "watch" else Guard
        given = model if guarded is None else guarded
        self.guard: Guard = make(given, optimizer, config=config_of(**settings), loader=loader)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        if self.loop != "bare":
            self.guard.close()
        for hook in self._hooks:
            hook.remove()
        if isinstance(error, TrainingHalted):
            self.halted = error.incident.step
        return isinstance(error, TrainingHalted)

    def step(self, *batches: Any) -> Any:
        if self.loop == "step":
            result = self.guard.step(lambda batch: self.loss(self.model, batch), *batches)
            self.losses.append(result.loss)
            self.norms.append(result.grad_norm)
            return result
        self.optimizer.zero_grad()
        total = 0.0
        for batch in batches:
            loss = self.loss(self.model, batch)
            loss.backward()
            total += float(loss.detach())
        if self._by_hand:
            for parameter in self.model.parameters():
                average(parameter)
        self.losses.append(total)
        if self.clip is not None:
            self.norms.append(clipped(self.model, self.clip))
        self.optimizer.step()
        return None

    @property
    def incidents(self) -> list[Incident]:
        return list(self.guard._context.incidents)

    @property
    def told(self) -> list[Any]:
        """Step, kind, ranks to blame and action of every incident."""
        return [
            (i.step, i.verdict.kind, i.reading.bad_ranks, i.decision and i.decision.action)
            for i in self.incidents
        ]

    @property
    def armed(self) -> bool:
        return self.guard.armed

    def state(self) -> dict[str, Any]:
        return state_of(self.model, self.optimizer)

    def weights(self) -> dict[str, Any]:
        """The trained tensors, which replicas have in common."""
        return {f"{name}": local(value) for name, value in self.model.named_parameters()}


def clipped(model: Any, most: float) -> float:
    """Clip as a loop of this model does."""
    if hasattr(model, "clip_grad_norm_"):
        return float(model.clip_grad_norm_(most))
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), most)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def disarmings(said: list[Any]) -> list[str]:
    """What guards have said that gave up."""
    return [str(one.message) for one in said if issubclass(one.category, GuardDisarmed)]


def is_finite(state: dict[str, Any]) -> bool:
    return all(
        bool(value.isfinite().all()) for value in state.values() if isinstance(value, Tensor)
    )
