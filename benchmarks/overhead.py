"""What a healthy step costs: stepguard and the checks people use today, against a bare step with
clipping.

    python -m benchmarks overhead                  # three models, about 20 minutes
    python -m benchmarks overhead --only gpt-7m    # one of them; the others keep their last result
    python -m benchmarks overhead --quick          # tiny models, seconds: says nothing about cost

Not covered: accelerators, several processes, torch.compile.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.parts import machine, runner
from benchmarks.parts.look_cost import LookCost, look_cost
from benchmarks.parts.timing import Row, compare
from benchmarks.parts.variants import VARIANTS, Variant
from benchmarks.parts.workloads import FULL, QUICK, Workload

PROMISE = 1.01
WARMUP = 3
OWN_ROUNDS = 40
"""Rounds without forward and backward: they are short, and the difference to be seen is small."""


OPTIONS: dict[str, dict[str, Any]] = {
    "--only": {"metavar": "NAME", "help": f"one workload: {', '.join(FULL)}"},
    "--variants": {
        "nargs": "+",
        "metavar": "NAME",
        "help": "only these; the others keep their last result",
    },
    "--rounds": {"type": int, "help": "timed rounds a workload, instead of its own number"},
    "--threads": {
        "type": int,
        "default": 1,
        "help": "torch threads (1: with more, a busy machine drowns one per cent)",
    },
}


def main(arguments: Sequence[str] | None = None) -> int:
    run = runner.begin("overhead", __doc__, arguments, OPTIONS, quick="tiny models, few rounds")
    options, console = run.options, run.console
    torch.set_num_threads(options.threads)
    workloads = QUICK if run.quick else FULL
    if options.only is not None and options.only not in workloads:
        return run.refuse("--only", options.only, workloads)
    known = [v.name for v in VARIANTS]
    for name in options.variants or ():
        if name not in known:
            return run.refuse("--variants", name, known)
    chosen = [make() for name, make in workloads.items() if options.only in (None, name)]
    results = _measure(chosen, options, console)
    run.keep(_merge(run.output, results, quick=run.quick))
    console.print("`python -m benchmarks table` puts it into docs/evidence.md")
    return 0


def _measure(
    workloads: Sequence[Workload], options: argparse.Namespace, console: Console
) -> dict[str, Any]:
    results = {}
    variants = _chosen(options.variants)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    for workload in workloads:
        rounds = options.rounds or workload.rounds, workload.rounds if options.quick else OWN_ROUNDS
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task(workload.what, total=_pairs(rounds, variants))
            rows = compare(
                workload, variants, rounds, WARMUP, lambda p=progress, t=task: p.advance(t)
            )
        console.print(painted(workload, rows))
        cost = look_cost(workload)
        console.print(look_words(cost))
        results[workload.name] = {
            "what": workload.what,
            "rounds": rounds[0],
            "own_rounds": rounds[1],
            "machine": machine.facts(),
            "rows": [{**asdict(row), "added_share": row.added_share} for row in rows],
            "looks": {**asdict(cost), "steps": cost.steps, "amortised": cost.amortised},
        }
    return results


def look_words(cost: LookCost) -> str:
    """The cost of deep looks in one line."""
    return (
        f"a deep look takes the time of {cost.steps:.1f} steps; by look_every='auto' a run takes "
        f"{cost.amortised:.4f} of its time without looks"
    )


def _chosen(names: Sequence[str] | None) -> list[Variant]:
    """These variants and what they are compared with."""
    if names is None:
        return list(VARIANTS)
    needed = set(names) | {v.reference for v in VARIANTS if v.name in names}
    return [v for v in VARIANTS if v.name in needed]


def _pairs(rounds: tuple[int, int], variants: Sequence[Variant]) -> int:
    paired = [v for v in variants if v.missing is None and v.name != v.reference]
    outside = sum(not v.inside for v in paired)
    return (rounds[0] + WARMUP) * len(paired) + (rounds[1] + WARMUP) * outside


def _merge(path: Path, results: dict[str, Any], *, quick: bool) -> dict[str, Any]:
    """Workloads that were not measured now keep what was measured before."""
    before = json.loads(path.read_text(encoding="utf-8"))["workloads"] if path.exists() else {}
    order = QUICK if quick else FULL
    for name, result in results.items():
        rows = {
            row["variant"]: row for row in [*before.get(name, {}).get("rows", []), *result["rows"]]
        }
        result["rows"] = [rows[v.name] for v in VARIANTS if v.name in rows]
    workloads = {
        name: (before | results)[name] for name in order if name in before or name in results
    }
    return {"promise": PROMISE, "warmup": WARMUP, "workloads": workloads}


def painted(workload: Workload, rows: Sequence[Row]) -> Table:
    """The comparison as a table, one line a variant."""
    threads = torch.get_num_threads()
    title = (
        f"{workload.what}, {threads} thread{'s' if threads > 1 else ''}, against the bare step "
        f"with the same AdamW"
    )
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("step")
    for column in ("ratio", "95 % of it", "CPU", "ms", "+ms", "share"):
        table.add_column(column, justify="right", no_wrap=True)
    table.caption = (
        "ratio and CPU: of whole steps; +ms and share: of the check itself, forward "
        "and backward taken out"
    )
    table.caption_justify = "left"
    for row in rows:
        table.add_row(
            row.what, *cells(row), style="bold" if row.ours else ("dim" if row.missing else "")
        )
    return table


def cells(row: Row) -> list[str]:
    """The numbers of a line, or why there are none."""
    if row.ratio is None or row.milliseconds is None or row.interval is None:
        return [row.missing or "not measured"] + 5 * [""]
    if row.variant.startswith("bare"):
        return ["1", "", "1", f"{row.milliseconds:.0f}", "", ""]
    interval = f"{row.interval[0]:.3f}-{row.interval[1]:.3f}"
    numbers = [f"{row.ratio:.3f}", interval, f"{row.cpu_ratio:.3f}", f"{row.milliseconds:.0f}"]
    if row.added_milliseconds is None or row.added_share is None:
        return [*numbers, "", ""]
    return [*numbers, f"{row.added_milliseconds:.2f}", f"{100 * row.added_share:.2f} %"]


if __name__ == "__main__":
    machine.keep_memory()
    raise SystemExit(main())
