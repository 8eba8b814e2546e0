"""Every wrapper of torch around a model or an optimizer, with a guard and without; see wrappers.py.

torchrun --standalone --nproc-per-node 2 wrappers_worker.py OUT wrapper-column-loop ...
"""

from __future__ import annotations

import os
import signal as signals
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import stepguard
from process_group import gloo
from settings_of import config_of
from stepguard import Guard, GuardConfig, Policy
from stepguard.engine.protect import GuardDisarmed

WIDTH, STEPS, BAD_STEP, BAD_RANK, CLIP = 16, 8, 5, 1, 0.05
DAMAGED_AT = 2


class Net(nn.Module):
    """A matrix that is worth compressing, a norm with statistics, a part that may go unused."""

    def __init__(self, *, unused: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, 1)
        self.spare = nn.Linear(WIDTH, 1) if unused else None

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.norm(self.first(inputs))))
        return out


def _bf16(state: Any, bucket: Any) -> Any:
    """torch's own hook, which DDP refuses by its name without CUDA, though it works."""
    return default_hooks.bf16_compress_hook(state, bucket)


# DDP reads the annotations as objects, and here they are text
_bf16.__annotations__ = dict(default_hooks.bf16_compress_hook.__annotations__)


class Wrapped:
    """One wrapper: what the loss goes through, what is stepped, what the guard is given."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.kind = kind
        self.net = Net(unused=kind == "unused")
        self.ddp = DistributedDataParallel(
            self.net,
            static_graph=kind == "static",
            find_unused_parameters=kind == "unused",
        )
        self.model: Any = self.ddp
        if kind == "compiled":
            self.model = torch.compile(self.ddp, backend="eager")
        self.optimizer = self._optimizer()
        self._add_hook()
        self.given = self.net if kind == "inner" else self.model

    def _optimizer(self) -> Any:
        parameters = self.net.parameters()
        if self.kind == "zero":
            return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.01)
        if self.kind == "average":
            inner = torch.optim.AdamW(parameters, lr=0.01)
            return PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=2, warmup_steps=3))
        return torch.optim.AdamW(parameters, lr=0.01)

    def _add_hook(self) -> None:
        if self.kind == "powersgd":
            memory = PowerSGDState(None, start_powerSGD_iter=2)
            self.ddp.register_comm_hook(memory, powerSGD_hook)
        elif self.kind == "hook":
            state = PostLocalSGDState(
                None, None, start_localSGD_iter=3, post_local_gradient_allreduce=False
            )
            self.ddp.register_comm_hook(state, post_localSGD_hook)
        elif self.kind == "fp16":
            self.ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif self.kind == "bf16":
            self.ddp.register_comm_hook(None, _bf16)

    def loss(self, batch: tuple[Tensor, bool]) -> Tensor:
        inputs, reduced = batch
        with nullcontext() if reduced else self.ddp.no_sync():
            out: Tensor = self.model(inputs).square().mean()
        return out

    def batches(self, step: int, *, bad: bool) -> list[tuple[Tensor, bool]]:
        source = torch.Generator().manual_seed(100 * step + dist.get_rank())
        inputs = torch.randn(4, WIDTH, generator=source)
        if bad:
            inputs[2, 0] = torch.nan
        if self.kind == "no_sync":
            return [(inputs[:2], False), (inputs[2:], True)]
        return [(inputs, True)]

    def steps(self) -> range:
        return range(STEPS)


class Loop:
    """The same steps bare, by `guard.step` or by `watch`."""

    def __init__(self, wrapped: Wrapped, loop: str, **settings: Any) -> None:
        self.wrapped = wrapped
        self.loop = loop
        self.clip: float | None = settings.pop("clip", None)
        self.guard: Guard | None = None
        if loop == "bare":
            return
        settings = {"terminal": "quiet", "agree_timeout": 30.0, **settings}
        if loop == "step":
            settings["clip_norm"] = self.clip
        make = stepguard.watch if loop == "watch" else Guard
        self.guard = make(wrapped.given, wrapped.optimizer, config=config_of(**settings))

    def step(self, step: int, *, bad: bool = False) -> None:
        batches = self.wrapped.batches(step, bad=bad)
        if self.loop == "step" and self.guard is not None:
            self.guard.step(self.wrapped.loss, *batches)
            return
        optimizer = self.wrapped.optimizer
        optimizer.zero_grad()
        for batch in batches:
            self.wrapped.loss(batch).backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.wrapped.net.parameters(), self.clip)
        optimizer.step()

    def outcome(self) -> dict[str, Any]:
        if self.guard is not None:
            self.guard.close()
        out: dict[str, Any] = {"state": state_of(self.wrapped)}
        if self.guard is not None:
            out["armed"] = self.guard.armed
            out["incidents"] = list(self.guard._context.incidents)
        return out


def state_of(wrapped: Wrapped) -> dict[str, Any]:
    state: dict[str, Any] = {f"model.{k}": v.clone() for k, v in wrapped.net.state_dict().items()}
    inner = getattr(wrapped.optimizer, "optim", wrapped.optimizer)
    for number, slots in enumerate(inner.state.values()):
        state.update({f"slot {number}.{k}": v.clone() for k, v in slots.items()})
    for _, memory in wrapped.ddp._comm_hooks:
        for name in ("error_dict", "p_memory_dict", "q_memory_dict"):
            for key, value in getattr(memory, name, {}).items():
                state[f"hook {name} {key}"] = value.clone()
    return state


@contextmanager
def running(kind: str, loop: str, **settings: Any) -> Iterator[tuple[Loop, Wrapped]]:
    wrapped = Wrapped(kind)
    run = Loop(wrapped, loop, **settings)
    yield run, wrapped


def healthy(kind: str, loop: str, out: Path) -> dict[str, Any]:
    with running(kind, loop) as (run, wrapped):
        for step in wrapped.steps():
            run.step(step)
    return run.outcome()


def clip(kind: str, loop: str, out: Path) -> dict[str, Any]:
    with running(kind, loop, clip=CLIP) as (run, wrapped):
        for step in wrapped.steps():
            run.step(step)
    return run.outcome()


def nan(kind: str, loop: str, out: Path) -> dict[str, Any]:
    """One rank's batch is bad; bare, the same run without that batch."""
    with running(kind, loop) as (run, wrapped):
        for step in wrapped.steps():
            here = dist.get_rank() == BAD_RANK and step == BAD_STEP
            if loop != "bare":
                run.step(step, bad=here)
            elif step != BAD_STEP:
                run.step(step)
    return run.outcome()


def save(kind: str, loop: str, out: Path) -> dict[str, Any]:
    """Save on the way; what was saved and where it led to."""
    with running(kind, loop, run_dir=out / f"{kind}-{loop}", locate=False) as (run, wrapped):
        assert run.guard is not None
        for step in wrapped.steps():
            if step == 3:
                path = run.guard.save()
                saved = state_of(wrapped)
            run.step(step)
    return {**run.outcome(), "path": path, "saved": saved}


def restore(kind: str, loop: str, out: Path) -> dict[str, Any]:
    """Fresh objects go on from what `save` has saved."""
    with running(kind, loop, run_dir=out / f"{kind}-{loop}", locate=False) as (run, wrapped):
        assert run.guard is not None
        with torch.no_grad():
            for parameter in wrapped.net.parameters():
                parameter.zero_()
        if kind == "powersgd":
            # its buckets are rebuilt after the first step, and keep no memory before that
            run.step(0)
        done = run.guard.restore()
        restored = state_of(wrapped)
        for step in wrapped.steps()[done:]:
            run.step(step)
    return {**run.outcome(), "done": done, "restored": restored}


def rewind(kind: str, loop: str, out: Path) -> dict[str, Any]:
    """A weight of one rank turns NaN between two steps."""
    # without healing from the other rank, which would come first
    policy = Policy(actions=("retry", "leave_out", "skip", "rewind", "stop"))
    settings: dict[str, Any] = {"snapshot_every": 1, "probation": 1, "policy": policy}
    with running(kind, loop, **settings) as (run, wrapped):
        for step in wrapped.steps():
            if step == DAMAGED_AT and dist.get_rank() == BAD_RANK and loop != "bare":
                with torch.no_grad():
                    wrapped.net.last.weight.fill_(torch.nan)
            run.step(step)
    return run.outcome()


def signal(kind: str, loop: str, out: Path) -> dict[str, Any]:
    """A scheduler asks all ranks to end."""
    folder = out / f"{kind}-{loop}-signal"
    ended: Any = None
    with running(kind, loop, run_dir=folder, locate=False) as (run, _):
        assert run.guard is not None
        try:
            for step in range(STEPS):
                if step == 2:
                    run.guard.save()
                if step == 3:
                    os.kill(os.getpid(), signals.SIGTERM)
                run.step(step)
            # the loop is shorter than ranks take to agree on a step: then it acts at the end
            run.guard.close()
        except SystemExit as end:
            ended = end.code
    dist.barrier()
    checked = stepguard.verify(folder / "checkpoints")
    return {**run.outcome(), "ended": ended, "verified": checked.ok}


def late(kind: str, loop: str, out: Path) -> dict[str, Any]:
    """The model is wrapped after its guard was built."""
    net = Net(unused=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    refused = ""
    with Guard(net, optimizer, config=GuardConfig(terminal="quiet")) as guard:
        wrapper = DistributedDataParallel(net)
        try:
            guard.step(lambda x: wrapper(x).square().mean(), torch.ones(2, WIDTH))
        except stepguard.ConfigError as why:
            refused = str(why)
    return {"refused": refused}


def refused(kind: str, loop: str, out: Path) -> dict[str, Any]:
    """A guard of ranks that do not make every step together is not built."""
    wrapped = Wrapped(kind)
    said = ""
    with Join([wrapped.ddp]) if kind == "join" else nullcontext():
        try:
            Guard(wrapped.given, wrapped.optimizer, config=GuardConfig(terminal="quiet"))
        except stepguard.ConfigError as why:
            said = str(why)
    return {"refused": said}


COLUMNS: dict[str, Callable[..., dict[str, Any]]] = {
    function.__name__: function
    for function in (healthy, clip, nan, save, restore, rewind, signal, late, refused)
}


def main(out: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    with gloo(40):
        for name in names:
            kind, column, loop = name.split("-")
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                try:
                    found = COLUMNS[column](kind, loop, out)
                except stepguard.TrainingHalted as halted:
                    found = {"halted": str(halted)}
            found["told"] = [str(w.message) for w in said if issubclass(w.category, GuardDisarmed)]
            torch.save(found, out / f"{name}.{dist.get_rank()}.pt")
            if kind == "compiled":
                # compiled graphs hold the model, and with it the process group
                torch._dynamo.reset()
            dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
