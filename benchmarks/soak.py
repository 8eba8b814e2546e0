"""Two ranks train unattended for 20 000 steps while something goes wrong every 200 steps or so.

    python -m benchmarks soak [--steps 20000] [--seeds 5] [--guarded-seeds 1]

Two processes over gloo, DistributedDataParallel, AdamW, BatchNorm and dropout. Faults of eight
kinds hit one rank or both: NaN in the data, in the forward, in the backward, in a weight, in an
optimizer slot, in a running mean; a learning rate that is NaN for a step; a gradient that is NaN
once and not when it is computed again. Beside the guard: no fault at all (five seeds, for the
noise), `skip only` (leave out a step whose loss or gradient is not finite on any rank) and `newest
finite` (that, and go back to the newest checkpoint with finite weights, one every 100 steps). Every
run sees the same faults at the same steps.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.parts import machine, runner
from stepguard import Guard, GuardConfig, Policy, TrainingHalted

FEATURES, HIDDEN, CLASSES, BATCH, LR, CLIP = 16, 32, 8, 32, 1e-3, 1.0
EVERY = 200
"""Steps between two faults, on average."""
CHECKPOINT_EVERY = 100
KINDS = ("data", "forward", "backward", "weight", "slot", "buffer", "rate", "transient")
WHERE = ((0,), (1,), (0, 1))
POLICY = Policy(max_rewinds=1000)
"""What such a run needs: the default stops after 3 rewinds, or 100 heals."""
STRATEGIES = ("no fault", "guarded", "skip only", "newest finite")


@dataclass
class Fault:
    """What goes wrong at one step."""

    kind: str
    ranks: tuple[int, ...]
    left: int = 1
    """Times that a transient one still shows."""


class Classifier(nn.Module):
    """A small network that can be told to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, HIDDEN)
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.drop = nn.Dropout(0.1)
        self.last = nn.Linear(HIDDEN, CLASSES)

    def forward(self, inputs: Tensor, fault: str = "") -> Tensor:
        hidden = self.norm(self.first(inputs))
        if fault == "forward":
            hidden = hidden * torch.inf
        if fault in ("backward", "transient"):
            hidden.register_hook(lambda gradient: gradient * torch.nan)
        out: Tensor = self.last(self.drop(torch.relu(hidden)))
        return out


def faults(seed: int, steps: int, every: int) -> dict[int, Fault]:
    """The same on every rank and for every strategy; each kind once before one comes again.

    None in the first and the last steps.
    """
    source = random.Random(seed)
    kinds: list[str] = []
    found = {}
    for step in range(every // 2, steps - every // 2):
        if source.random() < 1 / every:
            kinds = kinds or source.sample(KINDS, len(KINDS))
            found[step] = Fault(kinds.pop(), source.choice(WHERE))
    return found


def fixed_teacher() -> nn.Linear:
    """The same task for every seed: else the noise between seeds is that between tasks."""
    with torch.random.fork_rng():
        torch.manual_seed(12345)
        return nn.Linear(FEATURES, CLASSES)


class Soak:
    """One training of this rank."""

    def __init__(self, seed: int, steps: int, every: int) -> None:
        torch.manual_seed(seed)
        self.seed = seed
        self.steps = steps
        self.faults = faults(seed, steps, every)
        self.rank = dist.get_rank()
        self.teacher = fixed_teacher()
        self.model = Classifier()
        self.wrapped = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.wrapped.parameters(), lr=LR)
        torch.manual_seed(1000 * seed + self.rank)
        self.memory: dict[int, int] = {}

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return self._draw(2 * step + self.rank, BATCH)

    def _draw(self, number: int, count: int, seed: int | None = None) -> tuple[Tensor, Tensor]:
        source = torch.Generator()
        source.manual_seed(10**7 * ((self.seed if seed is None else seed) + 1) + number)
        inputs = torch.randn(count, FEATURES, generator=source)
        noise = torch.randn(count, CLASSES, generator=source)
        with torch.no_grad():
            targets = (2 * self.teacher(inputs) + noise).argmax(1)
        return inputs, targets

    def loss(self, batch: Any, fault: Fault | None = None) -> Tensor:
        inputs, targets = batch
        kind = ""
        if fault is not None and self.rank in fault.ranks:
            kind = fault.kind
        if kind == "transient":
            fault.left -= 1  # type: ignore[union-attr]
            if fault.left < 0:  # type: ignore[union-attr]
                kind = ""
        return nn.functional.cross_entropy(self.wrapped(inputs, kind), targets)

    @torch.no_grad()
    def befall(self, fault: Fault | None, batch: tuple[Tensor, Tensor]) -> None:
        """Damage what lies in memory, before the step."""
        if fault is None or self.rank not in fault.ranks:
            return
        weight = self.model.first.weight
        if fault.kind == "data":
            batch[0][3, 5] = torch.nan
        elif fault.kind == "weight":
            weight[1, 1] = torch.nan
        elif fault.kind == "slot":
            self.optimizer.state[weight]["exp_avg"][2, 2] = torch.inf
        elif fault.kind == "buffer":
            assert self.model.norm.running_mean is not None
            self.model.norm.running_mean[0] = torch.nan
        elif fault.kind == "rate":
            self.optimizer.param_groups[0]["lr"] = math.nan

    def held_out(self) -> float:
        self.model.eval()
        with torch.no_grad():
            inputs, targets = self._draw(9_999_991, 4096, seed=0)
            out = nn.functional.cross_entropy(self.model(inputs), targets)
        self.model.train()
        return float(out)

    def steps_with_faults(self, given: dict[int, Fault]) -> Iterator[tuple[int, Any, Fault | None]]:
        """Each step, its batch and its fault, once that has happened; sets the rate."""
        for step in range(self.steps):
            fault = given.get(step)
            batch = self.batch(step)
            self.optimizer.param_groups[0]["lr"] = LR
            self.befall(fault, batch)
            yield step, batch, fault
            if step + 1 in (self.steps // 4, self.steps):
                self.memory[step + 1] = _resident()


def no_fault(run: Soak, folder: Path) -> dict[str, Any]:
    for _, batch, _ in run.steps_with_faults({}):
        _bare_gradients(run, batch, None)
        run.optimizer.step()
    return {}


def skip_only(run: Soak, folder: Path) -> dict[str, Any]:
    left_out = 0
    for _, batch, fault in run.steps_with_faults(run.faults):
        if _bare_gradients(run, batch, fault):
            run.optimizer.step()
        else:
            left_out += 1
    return {"left_out": left_out}


def newest_finite(run: Soak, folder: Path) -> dict[str, Any]:
    kept: Any = None
    back = 0
    for step, batch, fault in run.steps_with_faults(run.faults):
        if step % CHECKPOINT_EVERY == 0 and _all_finite(run.wrapped.parameters()):
            kept = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
        if _bare_gradients(run, batch, fault):
            run.optimizer.step()
        elif kept is not None:
            back += 1
            run.model.load_state_dict(kept[0])
            run.optimizer.load_state_dict(copy.deepcopy(kept[1]))
    return {"went_back": back}


def guarded(run: Soak, folder: Path) -> dict[str, Any]:
    config = GuardConfig(
        run_dir=folder,
        clip_norm=CLIP,
        policy=POLICY,
        terminal="quiet",
        checkpoint_every=2000,
    )
    told: Counter[str] = Counter()
    stopped = ""
    guard = Guard(run.wrapped, run.optimizer, config=config)
    try:
        for _, batch, fault in run.steps_with_faults(run.faults):
            guard.step(lambda given, fault=fault: run.loss(given, fault), batch)
    except TrainingHalted as halt:
        stopped = str(halt)
    for incident in guard._context.incidents:
        assert incident.decision is not None
        told[incident.decision.action] += 1
    guard.close()
    return {"decisions": dict(told), "stopped": stopped, "armed": guard.armed}


PLAYED: dict[str, Callable[[Soak, Path], dict[str, Any]]] = {
    "no fault": no_fault,
    "guarded": guarded,
    "skip only": skip_only,
    "newest finite": newest_finite,
}


def _bare_gradients(run: Soak, batch: Any, fault: Fault | None) -> bool:
    """Backward and clip; is it finite on all ranks? The reduction has spread what is not."""
    run.optimizer.zero_grad(set_to_none=True)
    loss = run.loss(batch, fault)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(run.wrapped.parameters(), CLIP)
    bad = (~torch.isfinite(torch.stack([loss.detach(), norm])).all()).float()
    dist.all_reduce(bad)
    return not bool(bad)


def _all_finite(tensors: Any) -> bool:
    bad = torch.tensor(float(not all(bool(t.isfinite().all()) for t in tensors)))
    dist.all_reduce(bad)
    return not bool(bad)


def _resident() -> int:
    """Bytes of memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def rank_main(strategy: str, seed: int, steps: int, every: int, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    run = Soak(seed, steps, every)
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        more = PLAYED[strategy](run, Path(shared[0]))
        loss = run.held_out()
        dist.barrier()
    found = {
        "strategy": strategy,
        "seed": seed,
        "loss": loss if math.isfinite(loss) else None,
        "finite": _all_finite(run.model.state_dict().values()),
        "memory_quarter": run.memory.get(steps // 4),
        "memory_end": run.memory.get(steps),
        "kinds": dict(Counter(fault.kind for fault in run.faults.values())),
        **more,
    }
    (out / f"{run.rank}.json").write_text(json.dumps(found))
    dist.barrier()
    # a thread of gloo that outlives Python may abort it
    os._exit(0)


def play(strategy: str, seed: int, steps: int, every: int = EVERY) -> list[dict[str, Any]]:
    """Run one training on two ranks; what each of them found."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", "-m", "benchmarks.soak", "--rank-of", strategy]
        command += ["--seed", str(seed), "--steps", str(steps), "--every", str(every)]
        command += ["--out", folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environment, check=True, timeout=3600)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in (0, 1)]


def collect(steps: int, seeds: int, guarded_seeds: int, path: Path) -> dict[str, Any]:
    """Play what is asked for, and keep what is there after every run."""
    plan = [("guarded", seed) for seed in range(guarded_seeds)]
    plan += [("no fault", seed) for seed in range(seeds)]
    plan += [(name, seed) for seed in range(guarded_seeds) for name in STRATEGIES[2:]]
    runs: list[dict[str, Any]] = []
    data: dict[str, Any] = {}
    for strategy, seed in plan:
        ranks = play(strategy, seed, steps)
        runs.append({**ranks[0], "memory_rank1": [r["memory_end"] for r in ranks][1]})
        runs[-1]["memory_rank1_quarter"] = ranks[1]["memory_quarter"]
        data = {"machine": machine.facts(), "steps": steps, "every": EVERY, "runs": runs}
        machine.keep(data, path)
    return data


def show(data: dict[str, Any]) -> None:
    table = Table(title=f"{data['steps']} steps, 2 ranks, a fault every {data['every']} on average")
    for name in (
        "strategy",
        "held-out loss",
        "finite",
        "memory at 25 % and 100 %",
        "what was done",
    ):
        table.add_column(name)
    for strategy in STRATEGIES:
        runs = [run for run in data["runs"] if run["strategy"] == strategy]
        losses = [run["loss"] for run in runs if run["loss"] is not None]
        if not runs:
            continue
        said = "nan"
        if losses:
            said = f"{statistics.mean(losses):.4f} ({min(losses):.4f} to {max(losses):.4f})"
        finite = f"{sum(run['finite'] for run in runs)} of {len(runs)}"
        memory = " and ".join(f"{runs[0][k] / 2**20:.0f}" for k in ("memory_quarter", "memory_end"))
        table.add_row(strategy, said, finite, f"{memory} MiB", _done(runs[0]))
    Console(width=150).print(table)


def _done(run: dict[str, Any]) -> str:
    if "decisions" in run:
        return ", ".join(f"{name} {times}" for name, times in sorted(run["decisions"].items()))
    return str(run.get("left_out", run.get("went_back", "")))


OPTIONS: dict[str, dict[str, Any]] = {
    "--steps": {"type": int, "default": 20_000},
    "--seeds": {"type": int, "default": 5, "help": "of the run without a fault"},
    "--guarded-seeds": {"type": int, "default": 1, "help": "of the others"},
    "--rank-of": {"choices": STRATEGIES, "help": argparse.SUPPRESS},
    "--every": {"type": int, "default": EVERY, "help": argparse.SUPPRESS},
    "--seed": {"type": int, "default": 0, "help": argparse.SUPPRESS},
    "--out": {"type": Path, "help": argparse.SUPPRESS},
}


def main(arguments: Sequence[str] | None = None) -> int:
    run = runner.begin("soak", __doc__, arguments, OPTIONS)
    given = run.options
    if given.rank_of is not None:
        rank_main(given.rank_of, given.seed, given.steps, given.every, given.out)
    else:
        show(collect(given.steps, given.seeds, given.guarded_seeds, run.output))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
