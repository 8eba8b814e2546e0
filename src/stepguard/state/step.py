"""What one step was made of, kept just long enough to run it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from stepguard._errors import ConfigError
from stepguard.state.buffers import BufferKeeper
from stepguard.state.rng import RngState
from stepguard.tensors.names import optimizer_parameters

PARALLEL_WRAPPERS = ("DistributedDataParallel", "DataParallel")

WANTED = "return one scalar tensor, for instance loss.mean(), or a dict of named scalar tensors"

LossFn = Callable[[Any], Tensor | Mapping[str, Tensor]]
ModelFn = Callable[[Any], tuple[list[Tensor], list[Tensor | None]]]
"""Runs a watched model on a recorded call; returns its outputs and the gradients they got."""


@dataclass(slots=True)
class Step:
    """One optimizer step with all that a replay needs. Only RNG states are copies."""

    index: int
    model: nn.Module
    optimizer: Optimizer
    modules: dict[str, nn.Module]
    """Further modules by name, such as a criterion."""
    buffers: BufferKeeper
    """Already holds the values from before the step."""
    loss_fn: LossFn | None = None
    """None in `watch` mode, where the guard does not run the step."""
    micro_batches: tuple[Any, ...] = ()
    rng: list[RngState] = field(default_factory=list)
    """State before each micro-batch."""
    began: RngState | None = None
    """State before the whole step, where that is not the first of `rng`."""
    scale: float = 1.0
    """What the loss was multiplied by before backward."""
    clip_norm: float | None = None
    grads_gone: bool = False
    """The loop has dropped or replaced this step's gradients; those present are of another step."""
    model_fn: ModelFn | None = None
    """`watch` mode: the model's part of the step; `micro_batches` are then calls of the model."""
    sharded: bool = False
    """The model's parameters are spread over ranks: no rank can run any of it alone."""
    gathered: bool = False
    """This rank holds all parameters at the moment, by a plan of all ranks."""
    not_gathered: str = ""
    """Why the ranks have agreed on no such plan."""
    summed_in_half: bool = False
    """`watch` mode: the loss was added up in float16."""
    lines: tuple[tuple[Any, ...] | None, ...] = ()
    """`watch` mode: the line that called the model, for each call (`locate.source.Line`)."""

    @property
    def replayable(self) -> bool:
        """Can the step be run again from batch to loss, by this rank alone?"""
        return self.loss_fn is not None and self._runs_alone

    @property
    def repeatable(self) -> bool:
        """Can the step be run again by all ranks together?"""
        return self.loss_fn is not None

    @property
    def _runs_alone(self) -> bool:
        return self.gathered or not self.sharded

    @property
    def model_only(self) -> bool:
        """Can only the model's part be run again?"""
        if not self._runs_alone or self.loss_fn is not None:
            return False
        return self.model_fn is not None and bool(self.micro_batches)

    @property
    def start(self) -> RngState | None:
        """Random numbers before the step; None if the guard did not run it."""
        if self.began is not None:
            return self.began
        return self.rng[0] if self.rng else None

    def given_gradients(self) -> list[Tensor]:
        """Return what a backward pass by this rank alone leaves gradients in."""
        if self.gathered:
            # The optimizer holds the shards, which get none of it.
            return [p for root in self.named_roots().values() for p in root.parameters()]
        return optimizer_parameters(self.optimizer)

    def named_roots(self) -> dict[str, nn.Module]:
        """Return the root modules by the prefix of their names; the model's is ""."""
        return {"": unwrapped(self.model), **self.modules}


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the user's module inside DistributedDataParallel or torch.compile's wrapper."""
    inner = getattr(model, "_orig_mod", None)
    if inner is None and type(model).__name__ in PARALLEL_WRAPPERS:
        inner = getattr(model, "module", None)
    if not isinstance(inner, nn.Module):
        return model
    return unwrapped(inner)


def total_loss(output: Tensor | Mapping[str, Tensor]) -> Tensor:
    """Return the scalar, or the sum of named scalars, that a loss function gave; else raise."""
    if not isinstance(output, Mapping):
        return _scalar(output)
    if not output:
        raise ConfigError(f"loss_fn returned an empty dict; {WANTED}.")
    parts = [_scalar(part, f" for {name!r}") for name, part in output.items()]
    return sum(parts[1:], start=parts[0])


def _scalar(value: Any, name: str = "") -> Tensor:
    if not isinstance(value, Tensor):
        raise ConfigError(f"loss_fn returned{name} a {type(value).__name__}; {WANTED}.")
    if value.numel() != 1:
        raise ConfigError(
            f"loss_fn returned{name} a tensor of shape {tuple(value.shape)}; {WANTED}."
        )
    return value
