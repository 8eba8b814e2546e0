"""Silent failures: what trains wrongly with finite numbers, planted in small trainings. Does
stepguard tell it, and does it keep quiet about the healthy twin?

    python -m benchmarks silent [--only SG902,transformer] [--families] [--quick]

Every mistake is planted in at least three trainings, each time in another way than on the page of
its code, beside the healthy training that looks most like it. `found`: the code was told with
default settings, `often`: with a look every ten steps. `false`: a twin (five seeds) was told
anything at all, with either. `curve`: the mean loss of the last 20 steps lies outside the range of
the five twins. That is generous to a loss curve: nobody has five runs without the mistake to
compare with.

`--families` looks at every family of healthy training (zoo/healthy) as well, one seed each,
and lists what it was told.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from zoo.healthy import catalogue as healthy
from zoo.healthy import drive
from zoo.healthy.training import Family
from zoo.silent.catalogue import chosen
from zoo.silent.loops import Loop
from zoo.silent.plant import Plant

import stepguard
from benchmarks.parts import runner

STEPS, LAST = 150, 20
"""Steps of a run, and those at its end whose mean loss is its result."""
SEEDS, QUICK_SEEDS = 5, 1
OFTEN = 10
"""Steps between two looks, where they are not left to the default."""
FAMILY_STEPS = 150
GOAL = 30
"""Mistakes that are to be found with default settings."""
LookEvery = int | Literal["auto"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One planted mistake and its twins."""

    code: str
    training: str
    mistake: str
    told: list[str]
    """Codes that the run with the mistake was told, with default settings."""
    told_often: list[str]
    """The same with a look every ten steps."""
    loss: float
    twins: int
    false: list[str]
    """Codes that healthy twins were told."""
    twin_losses: list[float]
    curve: bool
    """The loss at the end lies outside the range of the twins."""

    @property
    def found(self) -> bool:
        return self.code in self.told

    @property
    def found_often(self) -> bool:
        return self.code in self.told_often


def run(
    plant: Plant, seed: int, *, wrong: bool, look_every: LookEvery = "auto"
) -> tuple[list[str], float]:
    """What a watched run was told, and its loss at the end."""
    torch.manual_seed(seed)
    loop = plant.build(seed, wrong=wrong)
    with tempfile.TemporaryDirectory(prefix="stepguard-silent-") as folder:
        losses = watched(loop, Path(folder), look_every)
        return drive.silent_codes(Path(folder)), fmean(losses[-LAST:])


def watched(loop: Loop, folder: Path, look_every: LookEvery) -> list[float]:
    """The loop as it is, with a guard attached by one line, after the run before it."""
    if loop.before is not None:
        watched(loop.before, folder, look_every)
        loop.resume()
    probes = stepguard.Probes(look_every=look_every, audit_every=loop.audit_every)
    config = stepguard.GuardConfig(run_dir=folder, probes=probes, terminal="quiet")
    guard = stepguard.watch(
        loop.model, loop.optimizer, scheduler=loop.scheduler, state=loop.state, config=config
    )
    loop.follow = guard.follow
    with guard:
        return [loop.step(step) for step in range(STEPS)]


def judge(plant: Plant, seeds: int) -> Result:
    """Run the mistake once, and its twin with every seed."""
    told, loss = run(plant, 0, wrong=True)
    told_often, _ = run(plant, 0, wrong=True, look_every=OFTEN)
    false: set[str] = set()
    losses = []
    for seed in range(seeds):
        codes, twin_loss = run(plant, seed, wrong=False)
        false.update(codes, run(plant, seed, wrong=False, look_every=OFTEN)[0])
        losses.append(twin_loss)
    return Result(
        code=plant.code,
        training=plant.training,
        mistake=plant.name,
        told=told,
        told_often=told_often,
        loss=loss,
        twins=seeds,
        false=sorted(false),
        twin_losses=losses,
        curve=not min(losses) <= loss <= max(losses),
    )


def judge_family(family: Family) -> dict[str, Any]:
    """What one healthy training is told when it is looked at often."""
    outcome = drive.Outcome(family=family.name, seed=0, steps=FAMILY_STEPS, look_every=OFTEN // 2)
    drive.run_guarded(family, 0, FAMILY_STEPS, outcome)
    return {"family": family.name, "told": outcome.silent}


def judge_named(name: str, seeds: int) -> Result:
    """In a process of its own: a plant's function does not travel, its name does."""
    (plant,) = chosen([name])
    return judge(plant, seeds)


def judge_family_named(name: str, seeds: int) -> dict[str, Any]:
    return judge_family(healthy.load()[name])


def measure(
    ask: Callable[[str, int], T], names: Sequence[str], options: argparse.Namespace
) -> list[T]:
    """Ask for every name, in as many processes as are wanted; the answers in their order."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    seeds = QUICK_SEEDS if options.quick else SEEDS
    answers = {}
    alone = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(options.jobs, mp_context=alone, initializer=prepare) as pool,
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
    ):
        bar = progress.add_task("runs", total=len(names))
        asked = {pool.submit(ask, name, seeds): name for name in names}
        for answer in as_completed(asked):
            answers[asked[answer]] = answer.result()
            progress.update(bar, advance=1, description=f"{asked[answer]:40}")
    return [answers[name] for name in names]


def prepare() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def table(results: Sequence[Result]) -> Table:
    drawn = Table(title="silent failures, beside their twins", box=None, header_style="bold")
    for name in ("code", "training", "mistake"):
        drawn.add_column(name, no_wrap=True)
    for name in ("found", "often", "also told", "false", "loss", "twins", "curve shows it"):
        drawn.add_column(name, justify="right")
    for one in results:
        others = [code for code in one.told if code != one.code]
        drawn.add_row(
            one.code,
            one.training,
            one.mistake,
            "yes" if one.found else "[bold red]no[/]",
            "yes" if one.found_often else "[bold red]no[/]",
            " ".join(others),
            f"[bold red]{' '.join(one.false)}[/]" if one.false else "0",
            f"{one.loss:.3f}",
            f"{min(one.twin_losses):.3f} to {max(one.twin_losses):.3f}",
            "yes" if one.curve else "no",
        )
    return drawn


def summary(results: Sequence[Result]) -> dict[str, int]:
    return {
        "mistakes": len(results),
        "codes": len({one.code for one in results}),
        "found": sum(one.found for one in results),
        "found_often": sum(one.found_often for one in results),
        "curve": sum(one.curve for one in results),
        "twins": sum(one.twins for one in results),
        "false": sum(bool(one.false) for one in results),
    }


OPTIONS: dict[str, Mapping[str, Any]] = {
    "--only": {
        "type": lambda text: text.split(","),
        "help": "codes, trainings or names of mistakes",
    },
    "--families": {"action": "store_true", "help": "look at healthy families as well"},
    "--jobs": runner.JOBS,
}


def main(arguments: Sequence[str] | None = None) -> int:
    run = runner.begin("silent", __doc__, arguments, OPTIONS, quick=f"{QUICK_SEEDS} twin of each")
    options, console = run.options, run.console
    began = time.perf_counter()
    results = measure(judge_named, [one.name for one in chosen(options.only)], options)
    families: list[dict[str, Any]] = []
    if options.families:
        looped = [one.name for one in healthy.chosen() if one.way in drive.LOOPED]
        families = measure(judge_family_named, looped, options)
    total = summary(results)
    console.print(table(results))
    for row in families:
        if row["told"]:
            console.print(f"healthy family {row['family']}: {' '.join(row['told'])}")
    console.print(
        f"{total['found']} of {total['mistakes']} mistakes found with default settings, "
        f"{total['found_often']} with a look every {OFTEN} steps; a curve beside five healthy runs "
        f"shows {total['curve']}; {total['false']} of {total['mistakes']} twins falsely told "
        f"({total['twins']} runs, {time.perf_counter() - began:.0f} s)"
    )
    if options.output is not None or (options.only is None and not options.quick):
        rows = [{**asdict(one), "found": one.found} for one in results]
        content = {**total, "rows": rows, "families": families}
        run.keep(content, details=("rows", "families"))
    return 0 if total["found"] >= min(GOAL, total["mistakes"]) and not total["false"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
