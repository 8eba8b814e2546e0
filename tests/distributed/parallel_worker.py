"""Pipeline stages and experts, each rank with weights of its own, with a guard and without.

torchrun --standalone --nproc-per-node 2 parallel_worker.py OUT kind-trouble-loop ...
"""

from __future__ import annotations

import os
import signal as signals
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import stepguard
from process_group import gloo
from settings_of import config_of
from stepguard import Guard
from stepguard.engine.protect import GuardDisarmed

WIDTH, ROWS, MICRO, STEPS, BAD_STEP, CLIP = 4, 4, 2, 8, 5, 0.05
DAMAGED_AT, SAVED_AT = 3, 4


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class Pipeline:
    """One stage a rank: data goes in on rank 0, the loss comes out on rank 1."""

    def __init__(self, schedule: str) -> None:
        rank = dist.get_rank()
        torch.manual_seed(10 + rank)
        self.net: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        stage = PipelineStage(self.net, rank, 2, torch.device("cpu"))
        kind = ScheduleGPipe if schedule == "gpipe" else Schedule1F1B
        self._schedule = kind(stage, n_microbatches=MICRO, loss_fn=_loss)

    def backward(self, inputs: Tensor, target: Tensor) -> None:
        if dist.get_rank() == 0:
            self._schedule.step(inputs)
        else:
            self._schedule.step(target=target)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        raise NotImplementedError("a schedule runs its own backward passes")


class Mixture(nn.Module):
    """A router that all ranks share and one expert on each; half of the rows go to each expert."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(WIDTH, WIDTH)
        torch.manual_seed(10 + dist.get_rank())
        self.expert = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        routed = self.router(inputs)
        here = all_to_all_single(torch.empty_like(routed), routed)
        out: Tensor = all_to_all_single(torch.empty_like(here), torch.tanh(self.expert(here)))
        return out


class Experts:
    """Expert parallel: gradients of the router are averaged, those of an expert are its own."""

    def __init__(self) -> None:
        self.net: nn.Module = Mixture()
        for parameter in self.net.router.parameters():
            parameter.register_post_accumulate_grad_hook(_average)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return _loss(self.net(batch[0]), batch[1])

    def backward(self, inputs: Tensor, target: Tensor) -> None:
        self.loss((inputs, target)).backward()


def _average(parameter: Tensor) -> None:
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()


class Run:
    def __init__(self, kind: str, loop: str, **settings: Any) -> None:
        self.parts: Any = Experts() if kind == "expert" else Pipeline(kind)
        self.net = self.parts.net
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.loop = loop
        self.clip: float | None = settings.pop("clip", None)
        self.guard: Guard | None = None
        if loop != "bare":
            make = stepguard.watch if loop == "watch" else Guard
            settings = {"terminal": "quiet", "agree_timeout": 30.0, **settings}
            if loop == "step":
                settings["clip_norm"] = self.clip
            self.guard = make(self.net, self.optimizer, config=config_of(**settings))

    def step(self, step: int, *, bad: bool = False) -> None:
        # the data of a pipeline is the same on both ranks: one feeds it, the other compares
        own = dist.get_rank() if isinstance(self.parts, Experts) else 0
        source = torch.Generator().manual_seed(100 * step + own)
        inputs = torch.randn(ROWS, WIDTH, generator=source)
        target = torch.randn(ROWS, WIDTH, generator=source)
        if bad:
            inputs[3, 0] = torch.nan
        if self.loop == "step" and self.guard is not None:
            self.guard.step(self.parts.loss, (inputs, target))
            return
        self.optimizer.zero_grad()
        self.parts.backward(inputs, target)
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        found = {f"model.{k}": v.clone() for k, v in self.net.state_dict().items()}
        for number, slots in enumerate(self.optimizer.state.values()):
            found.update({f"slot {number}.{k}": v.clone() for k, v in slots.items()})
        return found

    def outcome(self) -> dict[str, Any]:
        if self.guard is not None:
            self.guard.close()
        out: dict[str, Any] = {"state": self.state()}
        if self.guard is not None:
            out["armed"] = self.guard.armed
            out["incidents"] = list(self.guard._context.incidents)
        return out


def healthy(kind: str, loop: str, out: Path) -> dict[str, Any]:
    run = Run(kind, loop)
    for step in range(STEPS):
        run.step(step)
    return run.outcome()


def clip(kind: str, loop: str, out: Path) -> dict[str, Any]:
    run = Run(kind, loop, clip=CLIP)
    for step in range(STEPS):
        run.step(step)
    return run.outcome()


def nan(kind: str, loop: str, out: Path) -> dict[str, Any]:
    """A row of one rank is bad; bare, the run without that step. A pipeline is fed by rank 0."""
    run = Run(kind, loop)
    feeding = 1 if kind == "expert" else 0
    for step in range(STEPS):
        if loop == "bare" and step == BAD_STEP:
            continue
        run.step(step, bad=loop != "bare" and step == BAD_STEP and dist.get_rank() == feeding)
    return run.outcome()


def rewind(kind: str, loop: str, out: Path) -> dict[str, Any]:
    """A weight of rank 1's stage or expert turns NaN."""
    run = Run(kind, loop, snapshot_every=1, probation=1)
    for step in range(STEPS):
        if step == DAMAGED_AT and dist.get_rank() == 1:
            with torch.no_grad():
                list(run.net.parameters())[-1].fill_(torch.nan)
        run.step(step)
    return run.outcome()


def save(kind: str, loop: str, out: Path) -> dict[str, Any]:
    run = Run(kind, loop, run_dir=out / f"{kind}-{loop}", locate=False)
    assert run.guard is not None
    for step in range(STEPS):
        if step == SAVED_AT:
            path = run.guard.save()
        run.step(step)
    return {**run.outcome(), "path": path}


def restore(kind: str, loop: str, out: Path) -> dict[str, Any]:
    run = Run(kind, loop, run_dir=out / f"{kind}-{loop}", locate=False)
    assert run.guard is not None
    with torch.no_grad():
        for parameter in run.net.parameters():
            parameter.zero_()
    done = run.guard.restore()
    for step in range(done, STEPS):
        run.step(step)
    return {**run.outcome(), "done": done}


def signal(kind: str, loop: str, out: Path) -> dict[str, Any]:
    """A scheduler asks all ranks to end."""
    folder = out / f"{kind}-{loop}-signal"
    run = Run(kind, loop, run_dir=folder, locate=False)
    assert run.guard is not None
    ended: Any = None
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


SCENARIOS = {
    function.__name__: function for function in (healthy, clip, nan, rewind, save, restore, signal)
}


def main(out: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    with gloo(40):
        for name in names:
            kind, trouble, loop = name.split("-")
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                try:
                    found = SCENARIOS[trouble](kind, loop, out)
                except stepguard.TrainingHalted as halted:
                    found = {"halted": str(halted)}
            found["told"] = [str(w.message) for w in said if issubclass(w.category, GuardDisarmed)]
            torch.save(found, out / f"{name}.{dist.get_rank()}.pt")
            dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
