"""What a snapshot costs: the time training stands still for one, at 1M, 10M and 100M parameters,
and amortised.

    python -m benchmarks snapshot [--quick]

The state is that of AdamW (three numbers a parameter). Beside it the same by `copy.deepcopy` of the
state dicts. Promise: under 0.5 % of the time of training at the cadence `auto` chooses, whatever a
step takes.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.table import Table
from torch import nn

from benchmarks.parts import runner
from stepguard.state.run_state import RunState
from stepguard.state.snapshot import Cadence, Ring

SIZES = {"1M": 1_000_000, "10M": 10_000_000, "100M": 100_000_000}
LAYERS = 24
STEP_SECONDS = (0.05, 0.5, 5.0)


def trained(parameters: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """So many parameters in square layers, and an AdamW that has made a step."""
    width = max(2, int((parameters / LAYERS) ** 0.5))
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(parameters: int, rounds: int) -> dict[str, Any]:
    model, optimizer = trained(parameters)
    whole, ring = RunState({"": model}, optimizer), Ring(2, 2**62)

    def snapshot() -> None:
        state = whole.gather()
        ring.too_small(state)
        ring.drop(lambda s: len(ring.snapshots) > 1 and s is ring.snapshots[0])
        ring.take(0, state)

    def peer() -> Any:
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    first = seconds(snapshot)
    snapshot()
    ours = [seconds(snapshot) for _ in range(rounds)]
    theirs = [seconds(peer) for _ in range(rounds)]
    size = sum(t.numel() * t.element_size() for t in ring.snapshots[0].state.tensors.values())
    stall = statistics.median(ours)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes": size,
        "stall_seconds": stall,
        "spread": [min(ours), max(ours)],
        "first_seconds": first,
        "deepcopy_seconds": statistics.median(theirs),
        "amortised": {str(step): amortised(stall, step) for step in STEP_SECONDS},
    }


def amortised(stall: float, step_seconds: float) -> dict[str, float]:
    """The cadence that `auto` settles at, and the share of time it costs, on a clock that is driven
    by hand.
    """
    now = [0.0]
    cadence, taken = Cadence("auto", lambda: now[0]), []
    for step in range(200_000):
        if cadence.due(step):
            now[0] += stall
            cadence.took(step, stall)
            taken.append(step)
        now[0] += step_seconds
        if len(taken) == 8:
            break
    width = taken[-1] - taken[-2]
    return {"every": width, "share": stall / (width * step_seconds)}


def table(rows: dict[str, dict[str, Any]]) -> Table:
    drawn = Table(
        "parameters",
        "state",
        "stall",
        "deepcopy",
        *(f"step {s:g} s" for s in STEP_SECONDS),
        title="snapshots",
    )
    for name, row in rows.items():
        costs = [f"every {int(a['every'])}, {a['share']:.2%}" for a in row["amortised"].values()]
        times = [f"{row[key] * 1000:.2f} ms" for key in ("stall_seconds", "deepcopy_seconds")]
        drawn.add_row(name, f"{row['bytes'] / 2**20:.0f} MiB", *times, *costs)
    return drawn


def main(arguments: Sequence[str] | None = None) -> int:
    run = runner.begin("snapshot", __doc__, arguments, quick="a tiny model: try the benchmark")
    options = run.options
    sizes = {"10k": 10_000} if options.quick else SIZES
    rows = {name: measure(count, 3 if options.quick else 9) for name, count in sizes.items()}
    run.console.print(table(rows))
    if options.output is not None or not options.quick:
        run.keep({"promise": Cadence.SHARE, "sizes": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
