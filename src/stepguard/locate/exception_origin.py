"""Locate an exception of the user's code: read its traceback, then replay to find the samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from stepguard.locate import batch as batches
from stepguard.locate import samples
from stepguard.locate.calls import COPIES
from stepguard.locate.locate_budget import clock_for
from stepguard.locate.source import Line, in_library, is_users, with_source
from stepguard.records.origin import Origin, Phase
from stepguard.state.isolation import untouched
from stepguard.state.rng import restore_rng
from stepguard.state.step import Step, total_loss
from stepguard.tensors.names import named_modules, names_by_id, optimizer_parameters
from stepguard.tensors.torch_private import TorchDispatchMode

Attempt = Callable[[Any], object]
"""Runs one micro-batch as far as the step came, and raises what the user's code raises."""
GRACE = 0.3
"""Seconds that locating may take however short the step is."""
CHECKS = ("aten._linalg_check_errors", "aten._assert_async")
"""Operations that only test the result of the operation before them."""
_AUTOGRAD = str(Path(torch.__file__).parent / "autograd")
_OPTIMIZERS = str(Path(torch.__file__).parent / "optim")


def traceback_origin(error: BaseException, index: int, roots: dict[str, nn.Module]) -> Origin:
    """Read the user's line, the module and the part of the step from the traceback alone."""
    frames = []
    line = None
    for frame, number in _frames(error.__traceback__):
        frames.append(frame)
        file = frame.f_code.co_filename
        if is_users(file) and in_library(file):
            line = (line or Line(file, number))._replace(library=(file, number))
        elif is_users(file):
            line = Line(file, number)
    module = _module(frames, roots)
    origin = Origin(
        step=index, phase=_phase(frames, module, roots), module=module, method="traceback"
    )
    return with_source(origin, line)


def place_exception(
    origin: Origin, error: Exception, step: Step, micro: int, attempt: Attempt, budget: float
) -> Origin:
    """Run the micro-batch again; name the operation that raises and the samples that make it.

    `budget`: how long that may take, in runs of this micro-batch.
    """
    origin = replace(origin, method="replay", micro_batch=micro)
    with untouched(step) as keeper:
        trial = _Trial(step, micro, keeper.restore, attempt, type(error))
        began = trial.clock()
        operations = _FailedOperation()
        with operations:
            again = trial.raises(step.micro_batches[micro])
        if again is not True:
            return replace(origin, reproduced=False)
        one_run = trial.clock() - began
        trial.deadline = trial.clock() + (budget - 1.0) * one_run + GRACE
        guilty = samples.guilty_samples(trial, ())
    return replace(origin, reproduced=True, op=operations.failed, samples=guilty)


def place_replayed_exception(step: Step) -> Origin:
    """Run a step from a capsule that raised when it was recorded; locate what it raises now."""
    for micro in range(len(step.micro_batches)):
        attempt = whole_attempt(step, Origin(step=step.index, phase="backward"))
        try:
            with untouched(step):
                step.buffers.restore()
                restore_rng(step.rng[micro])
                attempt(batches.duplicate(step.micro_batches[micro]))
        except Exception as error:
            origin = traceback_origin(error, step.index, step.named_roots())
            return place_exception(
                origin, error, step, micro, whole_attempt(step, origin), math.inf
            )
    return Origin(step=step.index, phase="loss", method="replay", reproduced=False)


def whole_attempt(step: Step, origin: Origin) -> Attempt:
    """Run the user's loss function, and its backward where that is what raised."""

    def attempt(batch: Any) -> None:
        assert step.loss_fn is not None
        loss = total_loss(step.loss_fn(batch))
        if origin.phase == "backward":
            if step.scale != 1.0:
                loss = loss * step.scale
            torch.autograd.backward(loss)

    return attempt


class _Trial(samples.Trial):
    """Runs a micro-batch with some of its samples; bad means that it raises the same type."""

    def __init__(
        self,
        step: Step,
        micro: int,
        prepare: Callable[[], None],
        attempt: Attempt,
        kind: type[Exception],
    ) -> None:
        self._batch = step.micro_batches[micro]
        self._rng = step.rng[micro]
        self._prepare = prepare
        self._attempt = attempt
        self._kind = kind
        self._parameters = optimizer_parameters(step.optimizer)
        self._buffers = step.buffers
        self.count = batches.sample_count(self._batch)
        self.whole_only = False
        self.clock = clock_for(on_host=all(p.device.type == "cpu" for p in self._parameters))
        self.deadline = math.inf

    def bad(self, keep: Sequence[int]) -> bool | None:
        if not keep or self.clock() > self.deadline:
            return None
        return self.raises(batches.subset(self._batch, list(keep), self.count))

    def raises(self, batch: Any) -> bool | None:
        """True if it raises the same type; None if another, so that nothing can be said."""
        self._prepare()
        self._buffers.restore()
        restore_rng(self._rng)
        try:
            with torch.compiler.set_stance("force_eager"):
                self._attempt(batches.duplicate(batch))
        except Exception as error:
            return True if type(error) is self._kind else None
        finally:
            for parameter in self._parameters:
                parameter.grad = None
        return False


class _FailedOperation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the operation that raised."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.failed: str | None = None
        self._before: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        try:
            out = func(*args, **(kwargs or {}))
        except Exception:
            if self.failed is None:
                self.failed = self._before if name in CHECKS else name
            raise
        # Autograd detaches what it saves: that is not what a test is about.
        if name not in COPIES:
            self._before = name
        return out


def _frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _module(frames: list[FrameType], roots: dict[str, nn.Module]) -> str | None:
    """Return the name of the innermost module that was being called."""
    names = names_by_id(named_modules(roots))
    for frame in reversed(frames):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            return names[id(owner)]
    return None


def _phase(frames: list[FrameType], module: str | None, roots: dict[str, nn.Module]) -> Phase:
    files = [frame.f_code.co_filename for frame in frames]
    # autograd/grad_mode.py is in the traceback of everything that is decorated with no_grad.
    if any(file.startswith(_AUTOGRAD) and "grad_mode" not in file for file in files):
        return "backward"
    if module is not None and module.partition(".")[0] not in roots.keys() - {""}:
        return "forward"
    if any(file.startswith(_OPTIMIZERS) for file in files):
        return "optimizer"
    return "loss"
