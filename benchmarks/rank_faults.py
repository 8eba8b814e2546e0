"""Every exchange of the guard with every fault of one rank: does each rank end in time, with finite
weights?

    python -m benchmarks rank_faults [--quick] [--only WORDS] [--output FILE]

Two ranks train a small model under `guard.step`; one step has a NaN in rank 1's batch, after
another rank 1's weights are NaN, checkpoints are written, the state is saved and restored. In each
cell one fault happens on rank 1 when it comes to one exchange. A rank that has not ended after a
minute counts as hung. The exit code is 0 only if none is, and no weight of a living rank is NaN.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor, nn

import stepguard
from benchmarks.parts import runner
from benchmarks.parts.forked_ranks import HUNG, KILLED, run_ranks
from stepguard.ranks.agreement import Agreement, Meeting

FAULTY = 1
STEPS = 8
BAD_BATCH = 2
BAD_WEIGHTS = 5
WAIT = 1.0
"""`GuardConfig.agree_timeout`; ten times that in `save`, `restore` and the first reduction."""
SLOW = 3.0
FAULTS = ("dies before", "dies inside", "slow", "raises", "disk full", "folder gone")
EXCHANGES = (
    "the first reduction",
    "the reduction of a step",
    "the reading",
    "the origin",
    "the choice of a rewind",
    "a step that was run again",
    "the healing",
    "a checkpoint",
    "guard.save()",
    "guard.restore()",
)
OF_A_REWIND = ("the choice of a rewind", "a step that was run again")
NO_COPY = stepguard.Policy(actions=("retry", "leave_out", "skip", "rewind", "stop"))
"""Else the damaged rank is healed by the other one, and nothing is rewound."""
QUICK = (
    ("dies before", "the reading"),
    ("dies inside", "the origin"),
    ("slow", "the reading"),
    ("raises", "the choice of a rewind"),
    ("disk full", "a checkpoint"),
    ("folder gone", "the origin"),
    ("raises", "a step that was run again"),
    ("slow", "the healing"),
    ("raises", "guard.save()"),
)
RUNS_ON = "runs on"
DISARMED = "disarmed"
HALTED = "stops"
TORCH = "torch's error"


class OneFault:
    """Happens once, on one rank, when it comes to one exchange."""

    def __init__(self, fault: str, exchange: str, folder: Path) -> None:
        self._fault = fault
        self._exchange = exchange
        self._folder = folder
        self.happened = False

    def install(self) -> None:
        """Stand before the meeting, before the answer and before the reduction."""
        meet = Meeting.all_came
        reduce = Agreement.reduce

        def all_came(meeting: Meeting, what: str, *args: Any, **kwargs: Any) -> None:
            self._at(what, inside=False)
            meet(meeting, what, *args, **kwargs)
            self._at(what, inside=True)

        def reduced(agreement: Agreement, *args: Any, **kwargs: Any) -> Tensor | None:
            if agreement.now():
                self._at("the reduction of a step", inside=False)
            return reduce(agreement, *args, **kwargs)

        Meeting.all_came = all_came  # type: ignore[method-assign]
        Agreement.reduce = reduced  # type: ignore[method-assign]

    def _at(self, what: str, *, inside: bool) -> None:
        if self.happened or what != self._exchange or inside != (self._fault == "dies inside"):
            return
        self.happened = True
        if self._fault.startswith("dies"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault == "slow":
            time.sleep(SLOW)
        if self._fault == "raises":
            raise OSError("a fault of one rank")
        if self._fault == "disk full":
            # no file of this process can grow any more
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        if self._fault == "folder gone":
            shutil.rmtree(self._folder)


def train(fault: str, exchange: str, rank: int, folder: Path) -> dict[str, Any]:
    """One rank's run, and what came of it."""
    run_dir = folder / "run"
    one = OneFault(fault, exchange, run_dir)
    if rank == FAULTY:
        one.install()
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_average)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    config = stepguard.GuardConfig(
        run_dir=run_dir,
        terminal="quiet",
        ranks=stepguard.Ranks(timeout=WAIT),
        snapshots=stepguard.Snapshots(every=2, probation=1),
        checkpoint_every=3,
        policy=NO_COPY if exchange in OF_A_REWIND else stepguard.Policy(),
    )
    warnings.simplefilter("ignore")
    guard = stepguard.Guard(model, optimizer, config=config)
    began = time.monotonic()
    how = ""
    said = ""
    try:
        # a finite ruin shows by its origin only: a NaN by the reading, which brings the ways back
        ruin = 1e30 if exchange == "the choice of a rewind" else torch.nan
        _steps(guard, model, rank, ruin)
        if guard.armed:
            guard.save()
            guard.restore()
    except stepguard.TrainingHalted as stop:
        how = HALTED
        said = str(stop)
    except stepguard.StepguardError as error:
        how = type(error).__name__
        said = str(error)
    except RuntimeError as error:
        how = TORCH
        said = str(error)
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    if not how:
        how = RUNS_ON if guard.armed else DISARMED
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    seconds = time.monotonic() - began
    ended = {"how": how, "said": said, "finite": finite, "seconds": seconds}
    return {**ended, "happened": one.happened}


def _steps(guard: stepguard.Guard, model: nn.Module, rank: int, ruin: float) -> None:
    for step in range(STEPS):
        source = torch.Generator().manual_seed(10 * step + rank)
        inputs = torch.randn(3, 4, generator=source)
        if rank == FAULTY and step == BAD_BATCH:
            inputs[0, 0] = torch.nan
        if rank == FAULTY and step == BAD_WEIGHTS and guard.armed:
            with torch.no_grad():
                next(model.parameters()).fill_(ruin)
        guard.step(partial(_loss, model), inputs)


def _loss(model: nn.Module, inputs: Tensor) -> Tensor:
    loss: Tensor = model(inputs).square().mean()
    return loss


def _average(parameter: Tensor) -> None:
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()


def cell(fault: str, exchange: str) -> dict[str, Any]:
    """Both ranks' ends, and whether that is as promised."""
    ends = []
    for how, facts in run_ranks(2, partial(train, fault, exchange)):
        if facts is None or isinstance(facts, str):
            ends.append({"how": how, "finite": how == KILLED, "seconds": 0.0, "happened": True})
        else:
            ends.append(facts)
    hung = any(end["how"] == HUNG for end in ends)
    good = not hung and ends[FAULTY]["happened"] and all(end["finite"] for end in ends)
    return {"fault": fault, "exchange": exchange, "ends": ends, "good": good}


def _words(found: dict[str, Any]) -> str:
    first, second = found["ends"]
    if not second["happened"]:
        return "not reached"
    words = f"{first['how']}, {first['seconds']:.0f} s"
    if second["how"] not in (first["how"], KILLED):
        words += f" (rank {FAULTY}: {second['how']})"
    if not found["good"]:
        words += " NOT AS PROMISED"
    return words


def _table(found: list[dict[str, Any]]) -> Table:
    cells = {(one["fault"], one["exchange"]): _words(one) for one in found}
    table = Table("rank 1, at", *FAULTS, title="how rank 0 ends, after which time")
    for exchange in EXCHANGES:
        table.add_row(exchange, *(cells.get((fault, exchange), "") for fault in FAULTS))
    return table


OPTIONS: dict[str, dict[str, Any]] = {
    "--only": {"default": "", "help": "cells whose fault or exchange has this in it"},
}


def main(arguments: Sequence[str] | None = None) -> int:
    run = runner.begin("rank_faults", __doc__, arguments, OPTIONS, quick="one cell of each fault")
    options, console = run.options, run.console
    wanted = QUICK
    if not options.quick:
        every = ((fault, exchange) for exchange in EXCHANGES for fault in FAULTS)
        # that reduction has no inside where Python runs
        wanted = tuple(one for one in every if one != ("dies inside", "the reduction of a step"))
    found = []
    for fault, exchange in wanted:
        if options.only in f"{fault} {exchange}":
            found.append(cell(fault, exchange))
            console.print(f"{exchange} | {fault} | {_words(found[-1])}")
    console.print(_table(found))
    if options.output is not None or not (run.quick or options.only):
        good = sum(one["good"] for one in found)
        run.keep({"count": len(found), "good": good, "cells": found}, details=("cells",))
    return 0 if found and all(one["good"] for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
