"""Count what one step costs in Python: `python scripts/trace_step.py [--names]`.

Trains Linear-ReLU-Linear with AdamW, one process, run_dir set, and follows one healthy and one bad
step of `guard.step` and of `watch`. For each: calls of functions of ours, modules they are in,
edges between modules, and A-B-A detours (a module calls another, which calls back into the first).
`--names` lists the calls of the healthy steps by function.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import stepguard

OURS = str(Path(stepguard.__file__).parent)
WARMUP = 30


class Trace:
    """Calls of ours between `with` and its end."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.modules: set[str] = set()
        self.edges: set[tuple[str, str]] = set()
        self.detours = 0
        self._stack: list[str | None] = []

    def __enter__(self) -> Trace:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "return":
            if self._stack:
                self._stack.pop()
            return
        if event != "call":
            return
        path = frame.f_code.co_filename
        if not path.startswith(OURS):
            self._stack.append(None)
            return
        module = path[len(OURS) + 1 :]
        chain = [name for name in self._stack if name is not None]
        distinct = [name for i, name in enumerate(chain) if i == 0 or chain[i - 1] != name]
        if distinct and distinct[-1] != module:
            self.edges.add((distinct[-1], module))
            self.detours += module == distinct[-2] if len(distinct) > 1 else 0
        self.calls[f"{module}:{frame.f_code.co_qualname}"] += 1
        self.modules.add(module)
        self._stack.append(module)


def follow(drive: str) -> dict[str, Trace]:
    """One healthy and one bad step, each after the guard has settled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    x, y = torch.randn(32, 16), torch.randint(0, 4, (32,))
    bad = x.clone()
    bad[3, 0] = float("nan")
    with tempfile.TemporaryDirectory() as run_dir:
        config = stepguard.GuardConfig(run_dir=run_dir, terminal="quiet")
        make = stepguard.Guard if drive == "guard.step" else stepguard.watch
        with make(model, optimizer, config=config) as guard:
            step = _step_of(guard, drive, model, optimizer)
            for _ in range(WARMUP):
                step(x, y)
            traces = {"healthy": Trace(), "bad": Trace()}
            with traces["healthy"]:
                step(x, y)
            with traces["bad"]:
                step(bad, y)
    return traces


def _step_of(
    guard: stepguard.Guard, drive: str, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[torch.Tensor, torch.Tensor], object]:
    def loss(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    if drive == "guard.step":
        return lambda x, y: guard.step(loss, (x, y))

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss((x, y)).backward()
        optimizer.step()

    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--names", action="store_true", help="list the calls of healthy steps")
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("step", "calls", "modules", "edges", "A-B-A detours")
    console = Console()
    for drive in ("guard.step", "watch"):
        for kind, trace in follow(drive).items():
            sizes = (sum(trace.calls.values()), len(trace.modules), len(trace.edges), trace.detours)
            table.add_row(f"{drive}, {kind}", *map(str, sizes))
            if given.names and kind == "healthy":
                for name, count in trace.calls.most_common():
                    console.print(f"{count:5d} {drive} {name}", highlight=False)
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
