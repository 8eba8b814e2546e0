"""What locating costs: time in bare steps, and the most memory alive, on a 7M transformer.

    python -m benchmarks location [--quick]

The failure is a square root at 0 beside the real loss, so the whole forward and backward have to be
looked through. Promise: at most 6 bare steps plus 0.3 s, and twice the step's memory.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.parts import runner
from benchmarks.parts.workloads import FULL, QUICK, Workload
from stepguard.locate import locate
from stepguard.records import Origin, Reading
from stepguard.state.batch import Step
from stepguard.state.buffers import BufferKeeper
from stepguard.state.rng import capture_rng

STEPS_PROMISED, SECONDS_PROMISED, MEMORY_PROMISED = 6.0, 0.3, 2.0


class Alive(TorchDispatchMode):
    """The most bytes of new tensors that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, key, storage.nbytes())

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def scene(workload: Workload) -> tuple[Step, Callable[[], None]]:
    """A bad step of the workload, and the bare step to compare with."""
    torch.manual_seed(0)
    model = workload.build()
    batch = workload.batch(torch.Generator().manual_seed(0))
    weight = next(p for p in model.parameters() if p.dim() == 2)

    def loss_fn(given: Any) -> Tensor:
        return workload.loss(model, given) + torch.sqrt((weight * 0.0).square().sum())

    buffers = BufferKeeper([model])
    buffers.remember()
    step = Step(
        0,
        model,
        torch.optim.AdamW(model.parameters()),
        {},
        buffers,
        loss_fn,
        (batch,),
        [capture_rng()],
    )

    def bare() -> None:
        model.zero_grad(set_to_none=True)
        torch.autograd.backward(workload.loss(model, batch))

    return step, bare


def seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def most_alive(run: Callable[[], Any]) -> int:
    with Alive() as alive:
        run()
    return alive.most


def measure(workload: Workload, rounds: int) -> dict[str, Any]:
    step, bare = scene(workload)
    reading = Reading(
        step=0, loss=1.0, micro_losses=(1.0,), grad_norm=float("nan"), grads_finite=False
    )
    found: list[Origin] = []

    def find() -> None:
        found.append(locate(step, reading))

    bare()
    find()
    pairs = [(seconds(bare), seconds(find)) for _ in range(rounds)]
    usual = statistics.median(b for b, _ in pairs)
    ratios = sorted(f / b for b, f in pairs)
    origin = found[-1]
    return {
        "what": workload.what,
        "origin": f"{origin.phase} {origin.op} {origin.node}",
        "bare_seconds": usual,
        "locate_seconds": statistics.median(f for _, f in pairs),
        "steps": statistics.median(ratios),
        "spread": [ratios[0], ratios[-1]],
        "memory": most_alive(find) / most_alive(bare),
        "kept": statistics.median(f for _, f in pairs) <= STEPS_PROMISED * usual + SECONDS_PROMISED,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    run = runner.begin("location", __doc__, arguments, quick="a tiny model: try the benchmark")
    quick = run.quick
    workload = next(iter((QUICK if quick else FULL).values()))()
    row = measure(workload, 2 if quick else 7)
    table = Table(
        "workload",
        "origin",
        "bare",
        "locate",
        "in bare steps",
        "memory",
        title="locating a bad step",
    )
    spread = f"{row['steps']:.2f} ({row['spread'][0]:.2f}-{row['spread'][1]:.2f})"
    times = [f"{row[key] * 1000:.0f} ms" for key in ("bare_seconds", "locate_seconds")]
    table.add_row(row["what"], row["origin"], *times, spread, f"{row['memory']:.2f}x")
    run.console.print(table)
    if not quick:
        run.keep({"promise": {"steps": 6, "seconds": 0.3, "memory": 2}, **row})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
