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

PARALLEL_WRAPPERS = ("DistributedDataParallel", "DataParallel")

WANTED = "return one scalar tensor, for instance loss.mean(), or a dict of named scalar tensors"

LossFn = Callable[[Any], Tensor | Mapping[str, Tensor]]
ModelFn = Callable[[Any], tuple[list[Tensor], list[Tensor | None]]]
"""Runs a watched model on a recorded call: its differentiable outputs, and the gradient each of
them got.
"""


@dataclass(slots=True)
class Step:
    """One optimizer step with everything a replay needs. Holds references, copies nothing but RNG
    states.
    """

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
    """The loop has dropped or replaced this step's gradients since; what is there now belongs to
    another step.
    """
    model_fn: ModelFn | None = None
    """`watch` mode: the model's part of the step, whose `micro_batches` are the calls of the model.
    """
    lines: tuple[tuple[str, int] | None, ...] = ()
    """`watch` mode: file and line that called the model, for each call."""

    @property
    def replayable(self) -> bool:
        """Can the step be run again from batch to loss?"""
        return self.loss_fn is not None

    @property
    def model_only(self) -> bool:
        """Can only the model's part be run again?"""
        return self.loss_fn is None and self.model_fn is not None and bool(self.micro_batches)

    @property
    def start(self) -> RngState | None:
        """Random numbers before the step; None where it was not the guard that ran it."""
        return self.began or (self.rng[0] if self.rng else None)

    def named_roots(self) -> dict[str, nn.Module]:
        """Root modules by the prefix their names get; the model's own is ""."""
        return {"": unwrapped(self.model), **self.modules}


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's module inside DistributedDataParallel or torch.compile's wrapper."""
    inner = getattr(model, "_orig_mod", None)
    if isinstance(inner, nn.Module):
        return unwrapped(inner)
    if type(model).__name__ in PARALLEL_WRAPPERS:
        inner = getattr(model, "module", None)
        return unwrapped(inner) if isinstance(inner, nn.Module) else model
    return model


def total_loss(output: Tensor | Mapping[str, Tensor]) -> Tensor:
    """A loss function may return a scalar, or named scalars that are added. Anything else is a
    ConfigError.
    """
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
