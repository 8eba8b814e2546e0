"""What a zoo entry is: a tiny training scene that fails the way a public incident did, and the
right answer to it.

The conventions are those of the shared failure zoo. `step` is the optimizer step in which the first
harmful value is created. `event` says how that is proven:

    nan          the first operation that outputs NaN without a NaN going in
    inf          the first operation that outputs an infinity from finite operands
    seen         this operation gives a non-finite value at this place, though not as the first one
    param:NAME   buffer:NAME   batch:KEY   opt:SLOT      that tensor was bad before it was used
    spike        nothing is non-finite: the loss runs away
    checkpoint   the state that is saved at the end is bad
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
StepHook = Callable[[int], None]


@dataclass(slots=True, kw_only=True)
class Scene:
    """One training run, ready to be driven by any loop."""

    model: nn.Module
    batch: Callable[[int], Batch | list[Batch]]
    """Batch of a step, dimension 0 is the sample; a list means micro-batches."""
    loss: Callable[[nn.Module, Batch], Tensor]
    optimizer: torch.optim.Optimizer
    steps: int = 2
    clip: float | None = None
    autocast: torch.dtype | None = None
    scaler: dict[str, float] | None = None
    """Arguments of a GradScaler."""
    criterion: nn.Module | None = None
    before_step: StepHook | None = None
    after_step: StepHook | None = None
    evaluate: Callable[[nn.Module], Tensor] | None = None
    skips: str | None = None
    """What the user's own loop does about a bad loss: "skip" the update, or "restore" the model as
    well.
    """
    save: Callable[[], dict[str, Tensor]] | None = None
    tolerated: tuple[int, ...] = ()
    """Steps that stay bad even with the fix, because only what follows them is repaired."""

    def micro_batches(self, step: int) -> list[Batch]:
        batch = self.batch(step)
        return batch if isinstance(batch, list) else [batch]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a perfect diagnosis says, and what a user sees."""

    step: int
    phase: str
    """input | forward | loss | backward | optimizer | state | checkpoint"""
    event: str
    op: str | None = None
    module: str | None = None
    """Dotted path; "" is the root model's own forward, None is outside every module."""
    node: str | None = None
    sample: int | None = None
    micro: int | None = None
    loss_finite: bool = False
    grads_finite: bool = False
    proof: dict[str, Any] = field(default_factory=dict)
    """Further claims for `prove`: then, transient, backward_only, eval_finite, poisoned, ..."""
    slack: int | None = None
    """Steps a detection may come later; None takes what the phase allows."""


@dataclass(slots=True, kw_only=True)
class Case:
    """A named entry. `build(fixed)` gives a fresh scene, with the best fix applied if asked."""

    name: str
    incidents: tuple[str, ...]
    """Public threads the facts come from."""
    build: Callable[[bool], Scene]
    expected: Expected | None = None
    """None for a healthy control."""
    accepted: tuple[str, ...] = ()
    """Cause codes that are right, the preferred one first."""
    guarded: Expected | None = None
    """What there is to find when a guard steps in earlier than the user would have noticed."""
    transient_grads: bool = False
    """A control whose gradients may overflow while a GradScaler calibrates."""
    group: str = ""
    core: bool = True
    """One of the cases that stand for their kind: enough for a quick score."""

    @property
    def control(self) -> bool:
        return self.expected is None

    @property
    def wanted(self) -> Expected:
        """The answer a guard is measured against."""
        answer = self.guarded or self.expected
        assert answer is not None, f"{self.name} is a control"
        return answer


CASES: dict[str, Case] = {}

Builder = Callable[[bool], Scene]


def incident(
    *links: str, expected: Expected, accepted: tuple[str, ...], guarded: Expected | None = None
) -> Callable[[Builder], Builder]:
    """Register a builder as an incident, under its own name."""

    def register(build: Builder) -> Builder:
        _add(build, incidents=links, expected=expected, accepted=accepted, guarded=guarded)
        return build

    return register


def control(*links: str, transient_grads: bool = False) -> Callable[[Builder], Builder]:
    """Register a builder as a healthy run that must raise no alarm."""

    def register(build: Builder) -> Builder:
        _add(build, incidents=links, transient_grads=transient_grads)
        return build

    return register


def _add(build: Builder, **fields: Any) -> None:
    name = build.__name__
    assert name not in CASES, f"two cases are called {name}"
    CASES[name] = Case(name=name, build=build, group=build.__module__.rpartition(".")[2], **fields)
