"""One training, three times: unguarded it dies, guarded it survives and is explained, repaired it
never fails.

    python -m examples.demo                        # under a minute; writes to ./demo_run
    python -m examples.demo --steps 100 --run-dir somewhere

No NaN is injected: see denoiser.py for the bug. Seed, data and loop are the same; the guard is the
only difference.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import rich
import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import stepguard
from examples.denoiser import LEVELS, Batch, Denoiser, batches, loss_of, quality, untouched_quality

STEPS = 300
SEED = 5
CLIP = 1.0
INTRODUCTION = (
    "A small denoiser learns to clean pictures. One sample in a thousand has noise level 0, "
    "and the network takes its logarithm. No NaN is injected.\n"
)
MARKER = "made-by-stepguard-demo"
"""A folder with this file in it is an earlier demo's and may be replaced; no other is touched."""


@dataclass(frozen=True)
class Outcome:
    """How one of the trainings ended."""

    name: str
    first_bad: int | None
    """The first step whose batch gave a loss that is not finite, whatever was made of it."""
    committed: int
    """Updates made from a finite loss."""
    skipped: int
    left_out: int
    """Samples that an update was made without."""
    nan_tensors: int
    tensors: int
    loss: float
    """Mean of the last thirty steps that were trained on."""
    last_loss: float
    decibels: float
    incidents: tuple[stepguard.Incident, ...] = ()

    @property
    def alive(self) -> bool:
        """Finite everywhere, and better than pictures left noisy."""
        return self.nan_tensors == 0 and self.decibels > untouched_quality()


class Loop:
    """The loop as everybody writes it."""

    name = "unguarded"

    def __init__(self) -> None:
        torch.manual_seed(SEED)
        self.model = Denoiser()
        self.optimizer = AdamW(self.model.parameters(), lr=2e-3)

    def step(self, batch: Batch) -> tuple[float, bool]:
        """The loss, and whether an update was made."""
        self.optimizer.zero_grad()
        loss = loss_of(self.model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        return loss.item(), True

    def close(self) -> tuple[stepguard.Incident, ...]:
        return ()


class GuardedLoop(Loop):
    """The same step, run by the guard."""

    name = "guarded"

    def __init__(self, run_dir: Path, *, quiet: bool = False) -> None:
        super().__init__()
        config = stepguard.GuardConfig(
            clip_norm=CLIP,
            run_dir=run_dir,
            build="examples.demo:rebuild",
            terminal="quiet" if quiet else "auto",
        )
        self.guard = stepguard.Guard(self.model, self.optimizer, config=config)

    def step(self, batch: Batch) -> tuple[float, bool]:
        result = self.guard.step(functools.partial(loss_of, self.model), batch)
        return math.nan if result.loss is None else result.loss, result.committed

    def close(self) -> tuple[stepguard.Incident, ...]:
        self.guard.close()
        return self.guard.incidents


def rebuild() -> tuple[nn.Module, Optimizer, Callable[[Batch], Tensor]]:
    """What `stepguard replay` needs to run a recorded step again."""
    loop = Loop()
    return loop.model, loop.optimizer, functools.partial(loss_of, loop.model)


class RepairedLoop(Loop):
    """The unguarded loop without the bug: the grid of noise levels starts above 0."""

    name = "bug repaired"

    def step(self, batch: Batch) -> tuple[float, bool]:
        return super().step({**batch, "level": batch["level"].clamp(min=1 / LEVELS)})


def train(loop: Loop, steps: int, console: Console) -> Outcome:
    """Run one of the loops over the same batches, with a bar."""
    losses: list[float] = []
    updates, skipped, first_bad = 0, 0, None
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[at]}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(loop.name, total=steps, at="")
        for index, batch in enumerate(batches(steps, SEED)):
            loss, updated = loop.step(batch)
            updates += updated and math.isfinite(loss)
            skipped += not updated
            if first_bad is None and not math.isfinite(loss):
                first_bad = index
            if updated:
                losses.append(loss)
            bar.update(task, advance=1, at=f"loss {loss:.4f}")
    return _outcome(loop, first_bad, (updates, skipped), losses)


def _outcome(
    loop: Loop, first_bad: int | None, counts: tuple[int, int], losses: list[float]
) -> Outcome:
    incidents = loop.close()
    told = [
        incident.step for incident in incidents
    ]  # the guard trains on the rest of a bad batch: that loss is finite
    seen = [first_bad] if first_bad is not None else []
    state = [t for t in loop.model.state_dict().values() if t.is_floating_point()]
    last = losses[-30:]
    return Outcome(
        name=loop.name,
        first_bad=min(told + seen, default=None),
        committed=counts[0],
        skipped=counts[1],
        left_out=sum(_left_out(incident) for incident in incidents),
        nan_tensors=sum(bool(t.isnan().any()) for t in state),
        tensors=len(state),
        loss=sum(last) / len(last) if last else math.nan,
        last_loss=losses[-1] if losses else math.nan,
        decibels=quality(loop.model),
        incidents=incidents,
    )


def _left_out(incident: stepguard.Incident) -> int:
    gone = incident.decision is not None and incident.decision.action == "leave_out"
    return len(incident.origin.samples) if gone and incident.origin is not None else 0


def comparison(outcomes: Sequence[Outcome], steps: int) -> Table:
    """The trainings side by side."""
    title = f"the same training of {steps} steps"
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 2)
    )
    table.add_column("")
    for outcome in outcomes:
        table.add_column(
            Text(outcome.name, style="green" if outcome.alive else "red"), justify="right"
        )
    rows = {
        "first bad step": [
            str(o.first_bad) if o.first_bad is not None else "none" for o in outcomes
        ],
        "good updates": [str(o.committed) for o in outcomes],
        "steps skipped": [str(o.skipped) for o in outcomes],
        "samples dropped": [str(o.left_out) for o in outcomes],
        "tensors with NaN at the end": [f"{o.nan_tensors} of {o.tensors}" for o in outcomes],
        "training loss at the end": [f"{o.loss:.4f}" for o in outcomes],
        "quality of denoised pictures": [f"{o.decibels:.1f} dB" for o in outcomes],
    }
    for name, cells in rows.items():
        table.add_row(name, *(_coloured(cell, o) for cell, o in zip(cells, outcomes, strict=True)))
    table.caption = f"  pictures left as noisy as they came: {untouched_quality():.1f} dB"
    table.caption_justify = "left"
    return table


def _coloured(cell: str, outcome: Outcome) -> Text:
    bad = "nan" in cell or (not outcome.alive and cell.endswith(f" of {outcome.tensors}"))
    return Text(cell, style="bold red" if bad else "")


def fresh_folder(path: Path) -> str | None:
    """Make room for the run; returns why not, when the folder is not ours to replace."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        return f"{path} is not a folder of an earlier demo; give another one with --run-dir."
    if path.exists() and any(path.iterdir()):
        if not (path / MARKER).is_file():
            return (
                f"{path} holds something that no demo wrote; move it, or give another one with "
                f"--run-dir."
            )
        shutil.rmtree(path)
    path.mkdir(parents=True, exist_ok=True)
    (path / MARKER).write_text("replaced by the next python -m examples.demo\n", encoding="utf-8")
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--steps", type=int, default=STEPS, help=f"optimizer steps of each training ({STEPS})"
    )
    parser.add_argument(
        "--run-dir", type=Path, default=Path("demo_run"), help="where the guarded run is recorded"
    )
    options = parser.parse_args(arguments)
    console = rich.get_console()  # the guard prints above bars of this console
    refused = fresh_folder(options.run_dir)
    if refused is not None:
        console.print(refused, style="red", markup=False)
        return 2
    console.print(INTRODUCTION)
    loops = (Loop, functools.partial(GuardedLoop, options.run_dir), RepairedLoop)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # pictures this small gain nothing from more
    try:
        outcomes = [train(make(), options.steps, console) for make in loops]
    finally:
        torch.set_num_threads(threads)
    console.print()
    console.print(comparison(outcomes, options.steps))
    return _verdict(console, outcomes[1], options.run_dir)


def _verdict(console: Console, guarded: Outcome, run_dir: Path) -> int:
    if not guarded.alive:
        console.print("The guarded run did not survive.", style="bold red")
        return 1
    console.print(f"\nThe guarded run is recorded in {run_dir}. Look further:", markup=False)
    for command in next_commands(guarded, run_dir):
        console.print(f"  {command}", style="bold", markup=False, soft_wrap=True)
    return 0


def next_commands(guarded: Outcome, run_dir: Path) -> list[str]:
    """What to type next. `make demo` runs in a venv that the shell may not be in."""
    program = "stepguard"
    if shutil.which(program) is None:
        program = os.path.relpath(Path(sys.executable).parent / program)
    commands = [f"{program} report {run_dir}"]
    if find_spec("matplotlib") is not None:
        # `make demo` installs the core only; plots need the extra `plot`
        commands.append(f"{program} plot {run_dir}")
    capsules = [i.capsule for i in guarded.incidents if i.capsule]
    if capsules:
        commands.append(f"{program} replay {run_dir}/{capsules[0]}")
    return commands


if __name__ == "__main__":
    raise SystemExit(main())
