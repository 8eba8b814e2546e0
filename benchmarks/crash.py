"""Kill -9 at random instants of save, rotation, rename and resume: stepguard's store beside what
people use.

    python -m benchmarks crash --runs 1000         # all of them, about 15 minutes
    python -m benchmarks crash --only stepguard    # one of them (the others keep their last result)

Each restart goes on in the folder of the last one, litter included; what must be there is known
outside the killed process. Beside it a disk that fills up. Not covered: power loss
(tests/checkpoints/test_background.py tries every prefix of the operations), network filesystems.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.disk.campaign import campaign
from benchmarks.disk.formats import FORMATS
from benchmarks.disk.full import fill_up
from benchmarks.parts import machine, runner

SIZE = 1_000_000
COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeRemainingColumn(),
)


OPTIONS: dict[str, dict[str, Any]] = {
    "--runs": {"type": int, "default": 200, "help": "kills of each format"},
    "--size": {"type": int, "default": SIZE, "help": "parameters, of three floats each"},
    "--seed": {"type": int, "default": 0},
    "--only": {"metavar": "NAME", "help": f"one format: {', '.join(FORMATS)}"},
}


def main(arguments: Sequence[str] | None = None) -> int:
    run = runner.begin("crash", __doc__, arguments, OPTIONS)
    options, console = run.options, run.console
    if options.only is not None and options.only not in FORMATS:
        return run.refuse("--only", options.only, FORMATS)
    rows = {name: _row(name, options, console) for name in FORMATS if options.only in (None, name)}
    rows = run.with_earlier(rows, FORMATS)
    console.print(painted(rows))
    console.print(painted_full(rows))
    run.keep({"rows": rows})
    return int(lost(rows))


def _row(name: str, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    make = FORMATS[name]
    row: dict[str, Any] = {
        "what": make().what,
        "missing": make().missing(),
        "machine": machine.facts(),
    }
    if row["missing"]:
        return row
    with (
        tempfile.TemporaryDirectory() as place,
        Progress(*COLUMNS, console=console, transient=True) as progress,
    ):
        task = progress.add_task(row["what"], total=options.runs)
        tally = campaign(
            make,
            Path(place) / "run",
            runs=options.runs,
            size=options.size,
            seed=options.seed,
            progress=lambda: progress.advance(task),
        )
        full = fill_up(make, Path(place) / "small", SIZE)
    megabytes = options.size * 12 / 1e6
    return {
        **row,
        "megabytes": megabytes,
        **asdict(tally),
        "full": None if full is None else asdict(full),
    }


def lost(rows: dict[str, Any]) -> bool:
    """Did ours lose, mix or misread anything?"""
    ours = rows.get("stepguard")
    return bool(ours) and any(
        ours[key] for key in ("newest_unusable", "all_lost", "mixed", "went_back")
    )


def painted(rows: dict[str, Any]) -> Table:
    """One line a format."""
    table = Table(
        title="kill -9 at a random instant, restart in the same folder", title_justify="left"
    )
    table.add_column("format")
    for column in ("kills", "newest unusable", "all lost", "mixed", "went back", "litter MB"):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        style = "bold" if name == "stepguard" else ("dim" if row["missing"] else "")
        table.add_row(row["what"], *_cells(row), style=style)
    table.caption = (
        "newest unusable: a resume fails until somebody deletes it; all lost: nothing loads; "
        "mixed: loads silently as "
        "parts of different steps; litter: the most that lay beside it at a restart"
    )
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    if row["missing"]:
        return [row["missing"]] + 5 * [""]
    numbers = [
        str(row[key]) for key in ("killed", "newest_unusable", "all_lost", "mixed", "went_back")
    ]
    return [*numbers, f"{row['litter_bytes'] / 1e6:.0f}"]


def painted_full(rows: dict[str, Any]) -> Table:
    """What a third save does with half a state of room left."""
    table = Table(title="a disk that is full", title_justify="left")
    for column in ("format", "saved", "a resume gets", "MB left behind", "a small state fits then"):
        table.add_column(column)
    for row in rows.values():
        if full := row.get("full"):
            loads = "an error" if full["loads"] is None else f"step {full['loads']}"
            fits = "yes" if full["small_save_fits"] else "no"
            table.add_row(
                row["what"],
                f"step {full['saved']}",
                loads,
                f"{full['partial_bytes'] / 1e6:.0f}",
                fits,
            )
    return table


if __name__ == "__main__":
    raise SystemExit(main())
