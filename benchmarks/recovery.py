"""Does a run that was damaged end where one that was never damaged ends? Five strategies, four
failures, five seeds.

    python -m benchmarks.recovery [--quick]

Every run makes the same number of optimizer steps that count. `newest finite` goes back to the
newest of its snapshots (every 10 steps, all finite) when loss or gradient is not finite, at most 5
times; `skip only` leaves such steps out.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.parts import machine
from benchmarks.parts.reader import Reader, accuracy, draw
from stepguard import Guard, GuardConfig, Probes, TrainingHalted

RESULTS = machine.RESULTS / "recovery.json"
STEPS, AT, BATCH, LR, CLIP = 240, 120, 32, 1e-2, 5.0
EVERY, MOST_ROLLBACKS = 10, 5


@dataclass
class Run:
    """One training with its own data; `done` optimizer steps count."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    source: torch.Generator
    steps: int
    done: int = 0
    drawn: int = 0
    damaged: bool = False

    def batch(self) -> tuple[Tensor, Tensor]:
        self.drawn += 1
        return draw(BATCH, self.source)

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])


Harm = Callable[[Run], None]


def begin(seed: int, steps: int) -> Run:
    torch.manual_seed(seed)
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=3e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=steps + 1)
    return Run(model, optimizer, scheduler, torch.Generator().manual_seed(seed), steps)


# --- what goes wrong
# --------------------------------------------------------------------------------------------------


def lr_jump(run: Run) -> None:
    """The schedule of another run is resumed: every rate is 100 times what was configured."""
    for group in run.optimizer.param_groups:
        for key in ("lr", "initial_lr", "max_lr", "min_lr"):
            group[key] *= 100


@torch.no_grad()
def bit_flip(run: Run) -> None:
    """The highest exponent bit of one weight of the last layer."""
    weight = run.model.get_parameter("head.weight")
    weight.view(torch.int32).view(-1)[7] ^= 1 << 30


@torch.no_grad()
def lost_moments(run: Run) -> None:
    """The optimizer comes back without its second moments, and with its step counts: the next
    update is enormous.
    """
    for state in run.optimizer.state.values():
        state["exp_avg_sq"].zero_()


@torch.no_grad()
def bad_statistics(run: Run) -> None:
    """A running variance turns NaN: training goes on as if nothing were wrong, and nothing else
    works.
    """
    run.model.get_buffer("stem.1.running_var")[3] = torch.nan


HARMS: dict[str, Harm] = {
    "lr x100 (resume)": lr_jump,
    "bit flip in a weight": bit_flip,
    "second moments lost": lost_moments,
    "NaN in running variance": bad_statistics,
}


# --- what is done about it
# --------------------------------------------------------------------------------------------


def _harm(run: Run, harm: Harm | None) -> None:
    if harm is not None and not run.damaged and run.done == run.steps // 2:
        run.damaged = True
        harm(run)


def _gradients(run: Run) -> bool:
    """Forward and backward; is everything finite?"""
    run.optimizer.zero_grad()
    loss = run.loss(run.batch())
    torch.autograd.backward(loss)
    norm = nn.utils.clip_grad_norm_(run.model.parameters(), CLIP)
    return bool(torch.isfinite(loss) and torch.isfinite(norm))


def _update(run: Run) -> None:
    run.optimizer.step()
    run.scheduler.step()
    run.done += 1


def do_nothing(run: Run, harm: Harm | None) -> str:
    while run.done < run.steps:
        _harm(run, harm)
        _gradients(run)
        _update(run)
    return ""


def skip_only(run: Run, harm: Harm | None) -> str:
    skipped = 0
    while run.done < run.steps:
        _harm(run, harm)
        if _gradients(run):
            _update(run)
        else:
            skipped += 1
            run.done += 1
    return f"{skipped} skipped"


def newest_finite(run: Run, harm: Harm | None) -> str:
    kept, rollbacks = _copy(run), 0
    while run.done < run.steps:
        _harm(run, harm)
        if run.done % EVERY == 0 and _finite(run.model):
            kept = _copy(run)
        if _gradients(run):
            _update(run)
        elif rollbacks < MOST_ROLLBACKS:
            rollbacks += 1
            _paste(run, kept)
        else:
            run.done += 1
    return f"{rollbacks} rollbacks"


def guarded(run: Run, harm: Harm | None) -> str:
    config = GuardConfig(
        clip_norm=CLIP, terminal="quiet", probes=Probes(locate_budget=0, anomalies="act")
    )
    with Guard(run.model, run.optimizer, scheduler=run.scheduler, config=config) as guard:
        try:
            while guard.steps < run.steps:
                run.done = guard.steps
                _harm(run, harm)
                guard.step(run.loss, run.batch())
        except TrainingHalted:
            return f"stopped at {guard.steps}"
        taken = [i.decision for i in guard.incidents if i.decision is not None]
    return ", ".join(
        f"{d.action} to {d.rewound_to} ({d.data})" if d.action == "rewind" else d.action
        for d in taken
    )


def _finite(model: nn.Module) -> bool:
    return all(bool(torch.isfinite(p).all()) for p in model.parameters())


def _copy(run: Run) -> Any:
    states = (
        run.model.state_dict(),
        run.optimizer.state_dict(),
        run.scheduler.state_dict(),
        run.done,
    )
    return copy.deepcopy(states)


def _paste(run: Run, kept: Any) -> None:
    model, optimizer, scheduler, run.done = copy.deepcopy(kept)
    run.model.load_state_dict(model)
    run.optimizer.load_state_dict(optimizer)
    run.scheduler.load_state_dict(scheduler)


STRATEGIES: dict[str, Callable[[Run, Harm | None], str]] = {
    "do nothing": do_nothing,
    "skip only": skip_only,
    "newest finite": newest_finite,
    "stepguard": guarded,
}


# --- measuring
# --------------------------------------------------------------------------------------------------


def once(
    seed: int, steps: int, strategy: Callable[[Run, Harm | None], str], harm: Harm | None
) -> dict[str, Any]:
    run = begin(seed, steps)
    told = strategy(run, harm)
    return {"seed": seed, "accuracy": accuracy(run.model), "done": told, "batches": run.drawn}


def measure(seeds: Sequence[int], steps: int, harms: Sequence[str]) -> dict[str, Any]:
    never = [once(seed, steps, do_nothing, None) for seed in seeds]
    failures = {
        name: {
            label: [once(seed, steps, s, HARMS[name]) for seed in seeds]
            for label, s in STRATEGIES.items()
        }
        for name in harms
    }
    return {"steps": steps, "damaged_at": steps // 2, "never_failed": never, "failures": failures}


def shown(rows: Sequence[dict[str, Any]]) -> str:
    values = [row["accuracy"] for row in rows]
    return f"{statistics.mean(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def table(found: dict[str, Any]) -> Table:
    title = f"accuracy after {found['steps']} steps; never failed: {shown(found['never_failed'])}"
    drawn = Table("failure", *STRATEGIES, title=title)
    for name, columns in found["failures"].items():
        drawn.add_row(name, *(shown(columns[label]) for label in STRATEGIES))
    return drawn


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one seed, two failures, few steps")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    seeds, steps, harms = (
        ([0], 90, list(HARMS)[:2]) if options.quick else (list(range(5)), STEPS, list(HARMS))
    )
    found = measure(seeds, steps, harms)
    Console().print(table(found))
    if options.output is not None or not options.quick:
        machine.keep({"schema": 1, "machine": machine.facts(), **found}, options.output or RESULTS)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
