"""What the guard costs with many ranks: counted and timed on a few, modelled for many.

    python -m benchmarks scale [--quick]

Measured here over gloo: collectives, bytes and requests to the store of a healthy step, a bad
step, a healing, a comparison and a save at 2, 4 and 8 ranks, under DDP and FSDP2; the processor
time of the guard's own code in a healthy step on 2 ranks; the time of a bad step, a rewind and a
save. Modelled: what the counted messages take on a network of a stated latency and bandwidth, for
8, 512 and 16 384 ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.parts import runner
from stepguard import Guard, GuardConfig, Policy, Ranks, Snapshots
from stepguard.ranks import agreement as rank_agreement

WIDTH, LAYERS, BATCH = 64, 12, 8
WARMUP, STEPS, BLOCKS, COMPARED = 6, 20, 5, 12
RANKS = (2, 4, 8)
MODELLED = (8, 512, 16_384)
LATENCY = 10e-6
"""Seconds of one message between two ranks."""
BANDWIDTH = 25e9
"""Bytes a second of one rank's link: 200 Gbit/s."""
COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "all_gather_into_tensor")
REQUESTS = ("set", "get", "add", "compare_set", "delete_key")
LOOKS = ("check",)
"""How often a waiting rank looks depends on how long it waits."""


class Counted:
    """Counts what the guard sends: collectives, bytes of one rank, requests to the store."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        for name in COLLECTIVES:
            counted = self._collective(name, getattr(distributed_c10d, name))
            setattr(distributed_c10d, name, counted)
            setattr(dist, name, counted)
        # the meeting asks for the store each time, so a wrapper of it is seen
        given = rank_agreement.default_store
        rank_agreement.default_store = lambda: _CountedStore(given(), self.found)  # type: ignore[assignment]

    def _collective(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, *rest: Any, **more: Any) -> Any:
            sent = rest[0] if name == "all_gather" else first
            if isinstance(sent, Tensor):
                self.found[name] += 1
                self.found[f"{name} bytes"] += sent.numel() * sent.element_size()
            return original(first, *rest, **more)

        return call

    def during(self, act: Callable[[], object]) -> dict[str, int]:
        self.found.clear()
        act()
        return dict(self.found)


class _CountedStore:
    def __init__(self, store: Any, found: Counter[str]) -> None:
        self._store = store
        self._found = found

    def __getattr__(self, name: str) -> Any:
        if name in REQUESTS:
            self._found["store"] += 1
        if name in LOOKS:
            self._found["store looks"] += 1
        return getattr(self._store, name)


class Workload:
    """One model under one engine, with a guard or without."""

    def __init__(
        self,
        engine: str,
        folder: Path | None,
        *,
        guarded: bool = True,
        snapshot_every: int | Literal["auto"] = 8,
    ) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        if engine == "ddp":
            self.model = DistributedDataParallel(self.model)
        else:
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.guard: Guard | None = None
        if guarded:
            self.guard = Guard(
                self.model,
                self.optimizer,
                config=GuardConfig(
                    run_dir=folder,
                    terminal="quiet",
                    snapshots=Snapshots(every=snapshot_every),
                    ranks=Ranks(compare_every=COMPARED if folder is not None else None),
                    policy=Policy(max_rewinds=100),
                ),
            )

    def step(self, *, bad: bool = False) -> None:
        batch = torch.randn(BATCH, WIDTH)
        if bad and dist.get_rank() == 1:
            batch[0, 0] = torch.nan
        if self.guard is not None:
            self.guard.step(lambda given: self.model(given).square().mean(), batch)
            return
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()
        self.optimizer.step()

    def spoil(self, ranks: Sequence[int]) -> None:
        """A NaN in one weight, met by the step that follows."""
        if dist.get_rank() in ranks:
            with torch.no_grad():
                weight = next(iter(self.model.parameters()))
                getattr(weight, "to_local", lambda: weight)().view(-1)[0] = torch.nan


def counts(engine: str, folder: Path) -> dict[str, dict[str, int]]:
    """Messages of one rank for each kind of moment."""
    counted = Counted()
    work = Workload(engine, folder)
    assert work.guard is not None
    for _ in range(WARMUP):
        work.step()
    found = {"healthy step": counted.during(work.step)}
    found["bad step"] = counted.during(lambda: work.step(bad=True))
    while work.guard.steps < COMPARED:
        work.step()
    found["comparison of the ranks"] = counted.during(work.step)
    if engine == "ddp":
        work.spoil([1])
        found["healing"] = counted.during(work.step)
        found["save"] = counted.during(work.guard.save)
    work.guard.close()
    return found


def seconds(folder: Path) -> dict[str, float]:
    """Wall clock of what happens rarely; the median of three."""
    work = Workload("ddp", folder)
    assert work.guard is not None
    for _ in range(2 * WARMUP):
        work.step()
    found: dict[str, list[float]] = {}
    for _ in range(3):
        for name, before, act in (
            ("healthy step", lambda: None, work.step),
            ("bad step", lambda: None, lambda: work.step(bad=True)),
            ("healing", lambda: work.spoil([1]), work.step),
            ("rewind", lambda: work.spoil([0, 1]), work.step),
            ("save", lambda: None, work.guard.save),
        ):
            before()
            dist.barrier()
            began = time.perf_counter()
            act()
            found.setdefault(name, []).append(time.perf_counter() - began)
            for _ in range(8):
                work.step()
    work.guard.close()
    return {f"{name} (ms)": 1e3 * statistics.median(times) for name, times in found.items()}


def own_time(engine: str) -> dict[str, float]:
    """Processor time of this thread in a healthy step, bare and guarded in turn.

    Not wall clock: ranks that share two cores wait for each other all the time. The best of the
    blocks, since others on the machine only ever add.
    """
    bare = Workload(engine, None, guarded=False)
    guarded = Workload(engine, None, snapshot_every="auto")
    times: dict[str, list[float]] = {"bare": [], "guarded": []}
    for block in range(BLOCKS + 1):
        for name, work in (("bare", bare), ("guarded", guarded)):
            began = time.thread_time()
            for _ in range(STEPS):
                work.step()
            if block:
                times[name].append((time.thread_time() - began) / STEPS)
    found = {name: 1e6 * min(values) for name, values in times.items()}
    assert guarded.guard is not None
    guarded.guard.close()
    return {
        "bare (us)": found["bare"],
        "guarded (us)": found["guarded"],
        "own (us)": found["guarded"] - found["bare"],
    }


def store_request() -> float:
    """Microseconds of one request to the store and back, asked by one rank alone.

    The best of 20 turns; more than the store itself takes, which answers several ranks at a time.
    """
    store = rank_agreement.default_store()
    dist.barrier()
    turns = []
    for _ in range(20 if dist.get_rank() == 0 else 0):
        began = time.perf_counter()
        for _ in range(50):
            store.add("scale", 1)
        turns.append((time.perf_counter() - began) / 50)
    dist.barrier()
    return 1e6 * min(turns, default=0.0)


def rank_main(out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    shared = [str(out)]
    dist.broadcast_object_list(shared)
    folder = Path(shared[0])
    found: dict[str, Any] = {"ranks": dist.get_world_size()}
    if dist.get_world_size() == 2:
        found["store request (us)"] = store_request()
        found["own"] = {engine: own_time(engine) for engine in ("ddp", "fsdp2")}
        found["time"] = seconds(folder / "seconds")
    found["counts"] = {engine: counts(engine, folder / engine) for engine in ("ddp", "fsdp2")}
    if dist.get_rank() == 0:
        (out / "found.json").write_text(json.dumps(found))
    dist.barrier()
    # torch keeps meshes, and through them the group; a thread of gloo that outlives Python aborts
    os._exit(0)


def play(ranks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), "-m", "benchmarks.scale", "--rank", folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environment, check=True, timeout=600)
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
        return found


# --- the model of a network


def all_reduce(ranks: int, size: float) -> float:
    """The better of a ring and a tree up and down."""
    ring = 2 * (ranks - 1) * LATENCY + 2 * size * (ranks - 1) / ranks / BANDWIDTH
    tree = 2 * math.ceil(math.log2(ranks)) * (LATENCY + size / BANDWIDTH)
    return min(ring, tree)


def all_gather(ranks: int, size: float) -> float:
    """Doubling: as many rounds as a tree, and every rank gets the bytes of all."""
    return math.ceil(math.log2(ranks)) * LATENCY + (ranks - 1) * size / BANDWIDTH


def broadcast(ranks: int, size: float) -> float:
    return math.ceil(math.log2(ranks)) * (LATENCY + size / BANDWIDTH)


FORMULAS: dict[str, Callable[[int, float], float]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "broadcast": broadcast,
}


def modelled(found: dict[str, int], ranks: int, request: float) -> dict[str, float]:
    """Milliseconds on the network and at the store, and bytes that each rank receives."""
    network = 0.0
    received = 0.0
    for name, formula in FORMULAS.items():
        calls = found.get(name, 0)
        if calls:
            size = found[f"{name} bytes"] / calls
            network += calls * formula(ranks, size)
            received += calls * size * (ranks - 1 if name == "all_gather" else 1)
    # one process answers the requests of all ranks, one after the other
    store = found.get("store", 0) * ranks * request
    return {
        "network (ms)": 1e3 * network,
        "store (ms)": 1e3 * store,
        "received (bytes)": round(received),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    hidden = {"--rank": {"type": Path, "help": argparse.SUPPRESS}}
    run = runner.begin("scale", __doc__, arguments, hidden, quick="2 and 4 ranks only")
    given = run.options
    if given.rank is not None:
        rank_main(given.rank)
    measured = [play(ranks) for ranks in (RANKS[:2] if given.quick else RANKS)]
    request = measured[0]["store request (us)"] / 1e6
    many: dict[str, Any] = {}
    for engine, moments in measured[-1]["counts"].items():
        for moment, found in moments.items():
            at = {str(ranks): modelled(found, ranks, request) for ranks in MODELLED}
            many[f"{engine}, {moment}"] = at
    data = {
        "latency (us)": 1e6 * LATENCY,
        "bandwidth (GB/s)": BANDWIDTH / 1e9,
        "measured": measured,
        "modelled": many,
    }
    show(data)
    run.keep(data)
    return 0


def show(data: dict[str, Any]) -> None:
    console = Console(width=140)
    table = Table(title="counted: messages of one rank")
    for name in ("ranks", "engine", "moment", "collectives", "bytes of one rank", "store", "looks"):
        table.add_column(name)
    for run in data["measured"]:
        for engine, moments in run["counts"].items():
            for moment, found in moments.items():
                calls = sum(found.get(name, 0) for name in COLLECTIVES)
                size = sum(found.get(f"{name} bytes", 0) for name in COLLECTIVES)
                asked = (found.get("store", 0), found.get("store looks", 0))
                row = (run["ranks"], engine, moment, calls, size, *asked)
                table.add_row(*map(str, row))
    console.print(table)
    for name in ("own", "time", "store request (us)"):
        console.print(name, data["measured"][0][name])
    model = Table(title="modelled: network / store seconds, bytes a rank receives")
    model.add_column("moment")
    for ranks in MODELLED:
        model.add_column(f"{ranks} ranks")
    for moment, at in data["modelled"].items():
        model.add_row(moment, *(_cell(at[str(ranks)]) for ranks in MODELLED))
    console.print(model)


def _cell(found: dict[str, float]) -> str:
    network, store = (f"{found[name]:.3g} ms" for name in ("network (ms)", "store (ms)"))
    return f"{network} / {store}, {found['received (bytes)'] / 1024:.4g} KiB"


if __name__ == "__main__":
    sys.exit(main())
