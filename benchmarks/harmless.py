"""First, do no harm: healthy trainings that look ill, guarded and bare from one seed. Did the guard
change anything?

    python -m benchmarks harmless [--seeds 20] [--steps 300] [--families dqn,gan] [--quick] [--jobs
    2]

Every family is run bare and guarded with default settings in one process. Counted are interventions
(a veto, a rewind, a halt, a retry, a sample left out), calls of the loss function or the model that
the bare run did not make, and parts of the final state (weights, gradients, buffers, optimizers,
schedules, scalers, random generators, what the loop holds) that are not bit for bit the same. The
exit code is 0 only when all of them are 0. What was told is counted beside them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from zoo.healthy.catalogue import chosen, load
from zoo.healthy.drive import Anomalies, Outcome, compare
from zoo.healthy.training import Family

from benchmarks.parts import runner

SEEDS, STEPS, QUICK_SEEDS = 20, 300, 2


def measure(
    families: Sequence[Family], seeds: int, options: argparse.Namespace, console: Console
) -> list[Outcome]:
    """Every family with every seed. A family's runs stay in one process, bare and guarded."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    outcomes: list[Outcome] = []
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("healthy runs", total=len(families) * seeds)
        for outcome in _outcomes(families, seeds, options):
            outcomes.append(outcome)
            progress.update(bar, advance=1, description=f"{outcome.family:40}")
    return outcomes


def _outcomes(
    families: Sequence[Family], seeds: int, options: argparse.Namespace
) -> Iterator[Outcome]:
    if options.jobs == 1:
        for family in families:
            for seed in range(seeds):
                yield compare(family, seed, options.steps, options.anomalies)
        return
    alone = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=alone, initializer=_prepare) as pool:
        asked = [
            pool.submit(runs_of, family.name, seeds, options.steps, options.anomalies)
            for family in families
        ]
        for answer in as_completed(asked):
            yield from answer.result()


def runs_of(name: str, seeds: int, steps: int, anomalies: Anomalies) -> list[Outcome]:
    """All runs of one family, in a process that may be another one than that of its neighbours."""
    return [compare(load()[name], seed, steps, anomalies) for seed in range(seeds)]


def _prepare() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def by_family(families: Sequence[Family], outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """One row a family: runs, steps, and everything that was not nothing."""
    rows = []
    for family in families:
        runs = [outcome for outcome in outcomes if outcome.family == family.name]
        done: Counter[str] = Counter()
        for run in runs:
            done.update(run.interventions)
        rows.append(
            {
                "family": family.name,
                "group": family.group,
                "runs": len(runs),
                "steps": sum(run.steps for run in runs),
                "clean": sum(run.clean for run in runs),
                "interventions": dict(done),
                "extra_calls": sum(run.extra_calls for run in runs),
                "unequal": sum(bool(run.unequal) for run in runs),
                "differing": sorted({name for run in runs for name in run.unequal})[:5],
                "errors": sorted({run.error for run in runs if run.error}),
                "refused_saves": sum(run.refused_saves for run in runs),
                "notes": sum(run.notes for run in runs),
                "cpu_seconds": sum(run.cpu_seconds for run in runs),
                "warnings": sorted({text for run in runs for text in run.warnings}),
            }
        )
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    return {
        "families": len(rows),
        "runs": sum(row["runs"] for row in rows),
        "steps": sum(row["steps"] for row in rows),
        "interventions": sum(sum(row["interventions"].values()) for row in rows),
        "extra_calls": sum(abs(row["extra_calls"]) for row in rows),
        "unequal_runs": sum(row["unequal"] for row in rows),
        "failed": sum(bool(row["errors"]) for row in rows),
        "unclean_runs": sum(row["runs"] - row["clean"] for row in rows),
        "refused_saves": sum(row["refused_saves"] for row in rows),
        "notes": sum(row["notes"] for row in rows),
    }


def table(rows: Sequence[dict[str, Any]]) -> Table:
    drawn = Table(title="healthy training, guarded beside bare", box=None, header_style="bold")
    drawn.add_column("family", no_wrap=True)
    for name in ("runs", "interventions", "extra calls", "not bit-equal", "refused saves", "told"):
        drawn.add_column(name, justify="right")
    for row in rows:
        name = row["family"] if row["clean"] == row["runs"] else f"[bold red]{row['family']}[/]"
        counted = ("runs", "extra_calls", "unequal", "refused_saves", "notes")
        runs, *others = (str(row[what]) for what in counted)
        drawn.add_row(name, runs, str(sum(row["interventions"].values())), *others)
    return drawn


def explained(row: dict[str, Any]) -> str:
    """What happened to a family that is not clean."""
    parts = [f"{count} x {action}" for action, count in row["interventions"].items()]
    if row["extra_calls"]:
        parts.append(f"{row['extra_calls']} calls of user code more")
    if row["differing"]:
        parts.append(f"differs: {', '.join(row['differing'])}")
    return f"{row['family']}: {'; '.join([*parts, *row['errors']])}"


OPTIONS: dict[str, Mapping[str, Any]] = {
    "--seeds": {"type": int, "default": SEEDS},
    "--steps": {"type": int, "default": STEPS},
    "--families": {"type": lambda text: text.split(","), "help": "parts of names, or groups"},
    "--anomalies": {
        "choices": ("note", "act", "off"),
        "default": "note",
        "help": "GuardConfig.anomalies",
    },
    "--jobs": runner.JOBS,
}


def main(arguments: Sequence[str] | None = None) -> int:
    run = runner.begin("harmless", __doc__, arguments, OPTIONS, quick=f"{QUICK_SEEDS} seeds")
    options, console = run.options, run.console
    _prepare()
    families = chosen(options.families)
    seeds = QUICK_SEEDS if options.quick else options.seeds
    outcomes = measure(families, seeds, options, Console(stderr=True))
    rows = by_family(families, outcomes)
    total = summary(rows)
    console.print(table(rows))
    for row in rows:
        if row["clean"] < row["runs"]:
            console.print(explained(row), markup=False, soft_wrap=True)
    console.print(
        f"{total['families']} families, {total['runs']} runs, {total['steps']} steps: "
        f"{total['interventions']} interventions, {total['extra_calls']} further calls of user "
        f"code, "
        f"{total['unequal_runs']} runs not bit-equal, {total['notes']} anomalies told"
    )
    whole = options.families is None and not options.quick and options.anomalies == "note"
    if options.output is not None or whole:
        seconds = sum(outcome.cpu_seconds for outcome in outcomes)
        run.keep({"cpu_seconds": seconds, **total, "rows": rows}, details=("rows",))
    return 0 if total["unclean_runs"] == 0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
