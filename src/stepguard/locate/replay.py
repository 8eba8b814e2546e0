"""One micro-batch of the bad step again: same RNG, buffers, batch and loss scale; forward, then
backward.

Frames of this file mark where the user's code begins, see `source`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stepguard.locate import batch as batches
from stepguard.locate.finite import all_finite, numeric
from stepguard.locate.locate_budget import LocateBudget
from stepguard.locate.loss_function_state import OwnState
from stepguard.locate.module_attributes import kept_tensors
from stepguard.locate.modules import ModuleSpans
from stepguard.locate.tracer import Tracer
from stepguard.state.buffers import BufferKeeper
from stepguard.state.rng import restore_rng
from stepguard.state.step import Step, total_loss


class ReplayError(Exception):
    """The user's code raised in a replay; the cause is chained."""


@dataclass(slots=True)
class Ran:
    """What a replayed micro-batch gave."""

    loss_finite: bool
    grads_finite: bool = True
    loss: Tensor | None = None
    parts: dict[str, float] = field(default_factory=dict)
    """Named parts of the loss."""
    bad_gradients: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        return self.loss_finite and self.grads_finite


@dataclass(slots=True)
class Traced:
    """A replayed micro-batch with its trace."""

    ran: Ran
    tracer: Tracer
    micro_batch: int


class Replayer:
    """Runs micro-batches of one step, inside `untouched`."""

    def __init__(
        self, step: Step, keeper: BufferKeeper, effort: LocateBudget | None = None
    ) -> None:
        self.step = step
        self.own: OwnState | None = None
        """What the loss function keeps for itself: put back before every run, so that all of them
        are alike.
        """
        self.first_traced: Ran | None = None
        """What the first trace gave, before anything in the batch was repaired."""
        self.effort = effort if effort is not None else LocateBudget()
        self._keeper = keeper
        roots = step.named_roots()
        self.parameters = {
            f"{prefix}.{name}".strip("."): p
            for prefix, root in roots.items()
            for name, p in root.named_parameters()
        }
        self.buffers = {
            f"{prefix}.{name}".strip("."): b
            for prefix, root in roots.items()
            for name, b in root.named_buffers()
        }

    def run(
        self, micro: int, batch: Any = None, *, backward: bool = True, eager: bool = True
    ) -> Ran:
        """Without a trace. `batch` replaces the recorded one. Gradients are added to those that are
        there.
        """
        chosen = self.step.micro_batches[micro] if batch is None else batch
        with self._eagerly(eager):
            return self._run(micro, batches.duplicate(chosen), backward, None)

    def trace(self, micro: int, batch: Any = None, *, backward: bool = True) -> Traced:
        """With a trace of every operation. The backward is left out when the loss is bad already."""
        spans = ModuleSpans(self.step.named_roots())
        tracer = self.tracer(spans)
        own = batches.duplicate(self.step.micro_batches[micro] if batch is None else batch)
        for name, tensor in kept_tensors(self.step.named_roots()):
            tracer.store(name, tensor)
        for name, tensor in batches.named_tensors(own):
            tracer.store(name, tensor)
        for name, parameter in self.parameters.items():
            tracer.store(f"param:{name}", parameter)
            if parameter.grad is not None:
                tracer.store(f"grad:{name}", parameter.grad)
        for name, buffer in self.buffers.items():
            tracer.store(f"buffer:{name}", buffer)
        with self.effort.first_trace(), self._eagerly(True), spans:
            ran = self._run(micro, own, backward, tracer)
        self.first_traced = self.first_traced or ran
        return Traced(ran, tracer, micro)

    def tracer(self, spans: ModuleSpans) -> Tracer:
        """What traces; a subclass may put in another."""
        return Tracer(spans)

    def put_back(self) -> None:
        """Everything a run may have changed, but for gradients and random numbers."""
        self._keeper.restore()
        if self.own is not None:
            self.own.restore()

    def clear_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def bad_gradients(self) -> list[str]:
        """Names of parameters whose gradient holds a NaN or Inf."""
        return [
            name
            for name, p in self.parameters.items()
            if p.grad is not None and numeric(p.grad) and not all_finite(p.grad)
        ]

    def _eagerly(self, eager: bool) -> Any:
        return torch.compiler.set_stance("force_eager") if eager else nullcontext()

    def _run(self, micro: int, batch: Any, backward: bool, tracer: Tracer | None) -> Ran:
        self.put_back()
        restore_rng(self.step.rng[min(micro, len(self.step.rng) - 1)])
        assert self.step.loss_fn is not None
        try:
            with ExitStack() as stack:
                if tracer is not None:
                    stack.enter_context(tracer)
                given = self.step.loss_fn(batch)
                loss = total_loss(given)
                ran = Ran(loss_finite=all_finite(loss), loss=loss.detach(), parts=_parts(given))
                if backward and ran.loss_finite and loss.requires_grad:
                    if tracer is not None:
                        tracer.stage = "backward"
                    # not loss.backward(), which a watching guard would take for the loop's
                    torch.autograd.backward(
                        loss * self.step.scale if self.step.scale != 1.0 else loss
                    )
        except Exception as error:
            raise ReplayError(f"{type(error).__name__}: {error}") from error
        if backward and ran.loss_finite:
            ran.bad_gradients = tuple(self.bad_gradients())
            ran.grads_finite = not ran.bad_gradients
        return ran


def _parts(given: Any) -> dict[str, float]:
    if not isinstance(given, Mapping):
        return {}
    return {str(name): float(part.detach()) for name, part in given.items()}
