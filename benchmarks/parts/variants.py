"""The training steps that are compared: a bare one, the checks people write or import today, and
stepguard's.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import stepguard
from benchmarks.parts.workloads import Batch, Workload
from stepguard.sentinel import torch_patches

CLIP = 1.0
RATE = 1e-4

StepFn = Callable[[Batch], object]
Stage = Callable[[], AbstractContextManager[None]]
Wire = Callable[[Workload, nn.Module, Optimizer], "Runner"]


@dataclass
class Runner:
    """One variant, wired to its own model: `step` is timed, `stage` surrounds it untimed."""

    step: StepFn
    stage: Stage = nullcontext
    close: Callable[[], None] = field(default=lambda: None)


@dataclass(frozen=True)
class Pair:
    """A variant and the bare step on the very same model and optimizer.

    Two instances of one model differ in speed by where their memory lies, which no number of rounds
    averages out.
    """

    own: Runner
    bare: Runner


@dataclass(frozen=True)
class Variant:
    """A way to train. `fused` chooses the optimizer and the bare step to compare with."""

    name: str
    what: str
    wire: Wire
    fused: bool = False
    ours: bool = False
    missing: str | None = None
    """Why it cannot run here, for instance a package that is not installed."""
    inside: bool = False
    """Works inside forward or backward, so it cannot be told apart without them."""

    @property
    def reference(self) -> str:
        return "bare, fused" if self.fused else "bare"

    def start(self, workload: Workload) -> Runner:
        return self.pair(workload).own

    def pair(self, workload: Workload) -> Pair:
        """Wired to one new model; the bare step runs with every hook taken off."""
        model = workload.build()
        optimizer = AdamW(model.parameters(), lr=RATE, fused=self.fused or None)
        own = self.wire(workload, model, optimizer)
        asleep = functools.partial(_hookless, model, optimizer)
        return Pair(own, Runner(bare(workload, model, optimizer).step, asleep))


@contextmanager
def _hookless(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Every hook of modules and optimizer is gone inside, and back in place afterwards."""
    tables: list[Any] = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    for module in model.modules():
        tables += [module._forward_pre_hooks, module._forward_hooks]
    kept = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    heard = vars(model).pop("_compiled_call_impl", None)
    try:
        yield
    finally:
        if heard is not None:
            vars(model)["_compiled_call_impl"] = heard
        for table, hooks in zip(tables, kept, strict=True):
            table.update(hooks)


def bare(workload: Workload, model: nn.Module, optimizer: Optimizer) -> Runner:
    """Forward, backward, clip, update: no check at all."""

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        workload.loss(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    return Runner(step)


def watched(workload: Workload, model: nn.Module, optimizer: Optimizer) -> Runner:
    """The bare loop after one line, `stepguard.watch`."""
    guard = stepguard.watch(model, optimizer, config=stepguard.GuardConfig(terminal="quiet"))
    reference = torch_patches._listeners[-1]
    listener = reference()
    assert listener is not None
    torch_patches._stop(reference)
    return Runner(
        bare(workload, model, optimizer).step, functools.partial(_listening, listener), guard.close
    )


@contextmanager
def _listening(listener: torch_patches.Listener) -> Iterator[None]:
    """A watching guard hears every backward of the process; here it must not slow down the other
    variants.
    """
    stop = torch_patches.listen(listener)
    try:
        yield
    finally:
        stop()


def stepped(workload: Workload, model: nn.Module, optimizer: Optimizer) -> Runner:
    """`guard.step` runs the step, clipping included."""
    config = stepguard.GuardConfig(clip_norm=CLIP, terminal="quiet")
    guard = stepguard.Guard(model, optimizer, config=config)
    loss_fn = functools.partial(workload.loss, model)
    return Runner(lambda batch: guard.step(loss_fn, batch), close=guard.close)


def seed_loop(workload: Workload, model: nn.Module, optimizer: Optimizer) -> Runner:
    """What the incident reports settled on: `if isnan or isinf` on the loss and on the clipping
    norm.
    """

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        loss = workload.loss(model, batch)
        if torch.isnan(loss) or torch.isinf(loss):
            return
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        if torch.isnan(norm) or torch.isinf(norm):
            optimizer.zero_grad()
            return
        optimizer.step()

    return Runner(step)


def each_gradient(workload: Workload, model: nn.Module, optimizer: Optimizer) -> Runner:
    """`isnan().any()` and `isinf().any()` of every gradient."""

    def bad(grad: Tensor | None) -> bool:
        return grad is not None and bool(torch.isnan(grad).any() or torch.isinf(grad).any())

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        workload.loss(model, batch).backward()
        if any(bad(p.grad) for p in model.parameters()):
            return
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    return Runner(step)


def underflow_overflow(workload: Workload, model: nn.Module, optimizer: Optimizer) -> Runner:
    """transformers' DebugUnderflowOverflow: hooks on every module."""
    from transformers.debug_utils import DebugUnderflowOverflow

    # it numbers batches by root forwards and keeps the last frames; nothing is printed while all is
    # finite
    DebugUnderflowOverflow(model, max_frames_to_save=21)
    return bare(workload, model, optimizer)


def anomaly(workload: Workload, model: nn.Module, optimizer: Optimizer) -> Runner:
    """torch.autograd.detect_anomaly around the step."""
    loop = bare(workload, model, optimizer)

    def step(batch: Batch) -> None:
        with torch.autograd.detect_anomaly():
            loop.step(batch)

    return Runner(step, stage=_quiet)


@contextmanager
def _quiet() -> Iterator[None]:
    """Enter detect_anomaly, which warns each time that it is slow; its time is measured here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _without(package: str) -> str | None:
    return None if importlib.util.find_spec(package) else "not installed"


VARIANTS: tuple[Variant, ...] = (
    Variant("bare", "unguarded", bare),
    Variant("control", "unguarded again (noise)", bare),
    Variant("watch", "stepguard.watch", watched, ours=True),
    Variant("step", "guard.step", stepped, ours=True),
    Variant("bare, fused", "unguarded, fused AdamW", bare, fused=True),
    Variant("watch, fused", "stepguard.watch, fused AdamW", watched, fused=True, ours=True),
    Variant("step, fused", "guard.step, fused AdamW", stepped, fused=True, ours=True),
    Variant("hand-written", "isnan/isinf of loss and norm", seed_loop),
    Variant("each gradient", "isnan/isinf of every gradient", each_gradient),
    Variant(
        "DebugUnderflowOverflow",
        "DebugUnderflowOverflow",
        underflow_overflow,
        missing=_without("transformers"),
        inside=True,
    ),
    Variant("detect_anomaly", "detect_anomaly", anomaly, inside=True),
)
