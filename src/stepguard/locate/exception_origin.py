"""Where the user's code raised an exception, and which sample makes it: its traceback, then replays
within a budget.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from stepguard.locate import batch as batches
from stepguard.locate import samples
from stepguard.locate.source import Line, context, is_users, spell
from stepguard.records.origin import Origin, Phase
from stepguard.state.isolation import untouched
from stepguard.state.rng import restore_rng
from stepguard.state.step import Step, total_loss
from stepguard.tensors.names import named_modules, names_by_id, optimizer_parameters
from stepguard.tensors.torch_private import TorchDispatchMode

Attempt = Callable[[Any], object]
"""Runs one micro-batch as far as the exception came, and raises what the user's code raises."""
GRACE = 0.3
"""Seconds that placing may take however short the step is."""
CHECKS = ("aten._linalg_check_errors", "aten._assert_async")
"""Operations that only look at what the one before them gave."""
_AUTOGRAD = str(Path(torch.__file__).parent / "autograd")
_STEPPING = str(Path(torch.__file__).parent / "optim")


def traceback_origin(error: BaseException, index: int, roots: dict[str, nn.Module]) -> Origin:
    """What the traceback alone says: the user's line, the module, the part of the step."""
    frames = list(_frames(error.__traceback__))
    line = next(
        (
            Line(f.f_code.co_filename, n)
            for f, n in reversed(frames)
            if is_users(f.f_code.co_filename)
        ),
        None,
    )
    module = _module([frame for frame, _ in frames], roots)
    return Origin(
        step=index,
        phase=_phase(frames, module, roots),
        module=module,
        source=spell(line),
        context=context(line),
        method="traceback",
    )


def place_exception(
    origin: Origin, error: Exception, step: Step, micro: int, attempt: Attempt, budget: float
) -> Origin:
    """Run the micro-batch again: does it raise the same, in which operation, and because of which
    samples?

    `budget`: how long that may take, in runs of this micro-batch.
    """
    with untouched(step) as keeper:
        trial = _Trial(step, micro, keeper.restore, attempt, type(error))
        began = trial.clock()
        watch = _LastOperation()
        with watch:
            again = trial.raises(step.micro_batches[micro])
        if again is not True:
            return replace(origin, method="replay", reproduced=False, micro_batch=micro)
        trial.deadline = trial.clock() + (budget - 1.0) * (trial.clock() - began) + GRACE
        guilty = samples.guilty_samples(trial, ())
    return replace(
        origin, method="replay", reproduced=True, micro_batch=micro, op=watch.failed, samples=guilty
    )


def place_again(step: Step) -> Origin:
    """A step from a capsule that raised when it was recorded: run it, and place what it raises now."""
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
    """The user's loss function, and its backward where that is what raised."""

    def attempt(batch: Any) -> None:
        assert step.loss_fn is not None
        loss = total_loss(step.loss_fn(batch))
        if origin.phase == "backward":
            torch.autograd.backward(loss * step.scale if step.scale != 1.0 else loss)

    return attempt


class _Trial(samples.Trial):
    """The micro-batch with some of its samples: does it raise the same type again?"""

    def __init__(
        self,
        step: Step,
        micro: int,
        prepare: Callable[[], None],
        attempt: Attempt,
        kind: type[Exception],
    ) -> None:
        self._batch = step.micro_batches[micro]
        self._rng, self._prepare, self._attempt, self._kind = (
            step.rng[micro],
            prepare,
            attempt,
            kind,
        )
        self._parameters = optimizer_parameters(step.optimizer)
        self._own = step.buffers
        self.count = batches.sample_count(self._batch)
        self.whole_only = False
        on_host = all(p.device.type == "cpu" for p in self._parameters)
        self.clock = (
            time.thread_time if on_host else time.perf_counter
        )  # a busy machine changes no answer
        self.deadline = float("inf")

    def bad(self, keep: Sequence[int]) -> bool | None:
        if not keep or self.clock() > self.deadline:
            return None
        return self.raises(batches.subset(self._batch, list(keep), self.count))

    def raises(self, batch: Any) -> bool | None:
        """None where it raises something else: such a batch cannot be tried."""
        self._prepare()
        self._own.restore()
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


class _LastOperation(TorchDispatchMode):  # type: ignore[no-untyped-call]
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
            self.failed = self.failed or (self._before if name in CHECKS else name)
            raise
        self._before = name
        return out


def _frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _module(frames: list[FrameType], roots: dict[str, nn.Module]) -> str | None:
    """The innermost module that was being called."""
    names = names_by_id(named_modules(roots))
    for frame in reversed(frames):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            return names[id(owner)]
    return None


def _phase(
    frames: list[tuple[FrameType, int]], module: str | None, roots: dict[str, nn.Module]
) -> Phase:
    files = [frame.f_code.co_filename for frame, _ in frames]
    if any(file.startswith(_AUTOGRAD) and "grad_mode" not in file for file in files):
        return "backward"
    if module is not None and module.partition(".")[0] not in roots.keys() - {""}:
        return "forward"
    if any(file.startswith(_STEPPING) for file in files):
        return "optimizer"
    return "loss"
