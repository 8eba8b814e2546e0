"""What saving costs training: a store that writes in the background beside a blocking torch.save.

    python -m benchmarks store                     # 1M, 10M and 100M parameters, about 10 minutes
    python -m benchmarks store --only 1M           # one of them (the others keep their last result)
    python -m benchmarks store --quick             # a tiny model, seconds: shows that it runs

A round trains without saving, then offers a state and trains until it is on disk. What those steps
took beyond as many steps without saving is the stall by the clock. Beside it the processor time of
the writer's thread: other programs do not disturb it, and it is what a machine with a single core
loses. Not covered: copying the state out of the way.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

from benchmarks.disk.states import GOOD
from benchmarks.parts import machine, runner
from stepguard.checkpoints import Background, Store

CADENCE = 300.0
"""Seconds between checkpoints that are called sensible here: five minutes."""
PROMISE = 0.01
WIDTHS = {"1M": 360, "10M": 1120, "100M": 3536}
"""Of the square matrices that make up the model."""
MATRICES = 8
FEWEST = 4
"""Steps of a measurement."""
COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeRemainingColumn(),
)


OPTIONS: dict[str, dict[str, Any]] = {
    "--only": {"metavar": "NAME", "help": "one size: 1M, 10M, 100M"},
    "--rounds": {"type": int, "help": "saves of each kind"},
}


def main(arguments: Sequence[str] | None = None) -> int:
    run = runner.begin("store", __doc__, arguments, OPTIONS, quick="a tiny model and one round")
    options, console = run.options, run.console
    options.rounds = options.rounds or (1 if run.quick else 5)
    options.seconds = 0.01 if run.quick else 1.0
    widths = {"tiny": 32} if run.quick else WIDTHS
    if options.only is not None and options.only not in widths:
        return run.refuse("--only", options.only, widths)
    rows = {}
    for name, width in widths.items():
        if options.only in (None, name):
            rows[name] = _measure(name, width, options, console)
    rows = run.with_earlier(rows, widths)
    console.print(painted(rows))
    run.keep({"promise": PROMISE, "cadence_seconds": CADENCE, "rows": rows})
    return 0


class Timed(Store):
    """Knows the processor time of its last save."""

    used = 0.0

    def save(self, *arguments: Any, **named: Any) -> Path:
        begin = time.thread_time()
        try:
            return super().save(*arguments, **named)
        finally:
            self.used = time.thread_time() - begin


class Training:
    """A model whose steps can be counted and timed, and a copy of its state that stays still."""

    def __init__(self, width: int) -> None:
        layers = [layer for _ in range(MATRICES) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(max(16, 100_000 // width), width)
        self.step()
        self.state = self._copied()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()

    def run(
        self, seconds: float = 0.0, until: Callable[[], bool] = lambda: True
    ) -> tuple[int, float]:
        """Train for so long and until something has happened: steps and seconds."""
        begin, steps = time.perf_counter(), 0
        while True:
            self.step()
            steps += 1
            spent = time.perf_counter() - begin
            if spent >= seconds and steps >= FEWEST and until():
                return steps, spent

    def _copied(self) -> dict[str, Tensor]:
        state = {
            f"model/{name}": tensor.detach().clone()
            for name, tensor in self.model.state_dict().items()
        }
        for index, slots in enumerate(self.optimizer.state.values()):
            state |= {f"optimizer/{index}/{name}": value.clone() for name, value in slots.items()}
        return state


def _measure(
    name: str, width: int, options: argparse.Namespace, console: Console
) -> dict[str, Any]:
    training = Training(width)
    parameters = sum(p.numel() for p in training.model.parameters())
    ways = {"all cores": None, "one core": {min(os.sched_getaffinity(0))}}
    row: dict[str, Any] = {"parameters": parameters, "machine": machine.facts(), "ways": {}}
    row["megabytes"] = sum(t.numel() * t.element_size() for t in training.state.values()) / 1e6
    with Progress(*COLUMNS, console=console, transient=True) as progress:
        task = progress.add_task(f"{name} parameters", total=len(ways) * (options.rounds + 1))
        for way, cores in ways.items():
            row["ways"][way] = _rounds(training, options, cores, lambda t=task: progress.advance(t))
    return row


def _rounds(
    training: Training,
    options: argparse.Namespace,
    cores: set[int] | None,
    progress: Callable[[], None],
) -> dict[str, Any]:
    """Medians over rounds; the first is for warming up."""
    before = os.sched_getaffinity(0)
    found = []
    with tempfile.TemporaryDirectory() as place:
        store = Timed(Path(place) / "ours", keep=1)
        background = Background(store, _fail)
        try:
            os.sched_setaffinity(0, cores or before)
            for step in range(1, options.rounds + 2):
                found.append(_round(training, background, store, step, options.seconds))
                progress()
        finally:
            os.sched_setaffinity(0, before)
            background.close()
    return {key: statistics.median(each[key] for each in found[1:]) for key in found[0]}


def _round(
    training: Training, background: Background, store: Timed, step: int, seconds: float
) -> dict[str, float]:
    steps, spent = training.run(seconds)
    bare = spent / steps
    begin = time.perf_counter()
    assert background.offer(step, training.state, {}, GOOD)
    offered = time.perf_counter() - begin
    steps, spent = training.run(until=background.idle)
    begin = time.perf_counter()
    _blocking(training.state, store.folder / "theirs.pt")
    blocked = time.perf_counter() - begin
    return {
        "step_ms": 1000 * bare,
        "offer_ms": 1000 * offered,
        "save_s": spent,
        "stall_ms": 1000 * (offered + spent - steps * bare),
        "processor_ms": 1000 * store.used,
        "torch_save_ms": 1000 * blocked,
    }


def _blocking(state: dict[str, Tensor], path: Path) -> None:
    """What a careful script does: temporary file, fsync, rename, while training waits."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _fail(text: str) -> None:
    raise RuntimeError(text)


def painted(rows: dict[str, Any]) -> Table:
    """One line a size and way."""
    table = Table(title="what a save costs training", title_justify="left")
    left = ("parameters", "cores")
    ours, theirs = (
        ("offer ms", "save s", "stall ms", "processor ms", "share"),
        ("torch.save ms", "share"),
    )
    for column in (*left, "step ms", *ours, *theirs):
        table.add_column(column, justify="left" if column in left else "right")
    for name, row in rows.items():
        for way, found in row["ways"].items():
            numbers = [
                f"{found[key]:.1f}"
                for key in ("step_ms", "offer_ms", "save_s", "stall_ms", "processor_ms")
            ]
            blocked = [f"{found['torch_save_ms']:.0f}", _share(found["torch_save_ms"])]
            table.add_row(
                f"{name} ({row['megabytes']:.0f} MB)",
                way,
                *numbers,
                _share(found["processor_ms"]),
                *blocked,
            )
    table.caption = f"share: of training time, with a checkpoint every {CADENCE / 60:.0f} minutes"
    return table


def _share(milliseconds: float) -> str:
    return f"{milliseconds / 10 / CADENCE:.2f} %"


if __name__ == "__main__":
    raise SystemExit(main())
