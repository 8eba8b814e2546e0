"""Scores stepguard on the zoo: does one guarded run name the right step, place, sample and cause,
and survive?

    python -m benchmarks.zoo.score [--json OUT] [--only NAME ...]

A name is a case or a group. The exit code is 0 when every mark is right and no control raised an
alarm.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.zoo.catalogue import chosen
from benchmarks.zoo.guarded import PARTS, Row, score

MARK = {True: "[green]yes[/]", False: "[red]NO[/]", None: "[dim]-[/]"}


def rates(rows: list[Row]) -> dict[str, tuple[int, int]]:
    """How many of the questions that apply were answered rightly, by part."""
    asked = {part: [getattr(row, part) for row in rows if not row.control] for part in PARTS}
    return {
        part: (sum(bool(m) for m in marks), sum(m is not None for m in marks))
        for part, marks in asked.items()
    }


def table(rows: list[Row]) -> Table:
    shown = Table(title="failure zoo", box=None, header_style="bold")
    shown.add_column("case", no_wrap=True)
    for part in PARTS:
        shown.add_column(part, justify="center")
    shown.add_column("seconds", justify="right")
    for row in rows:
        name = row.case if row.right else f"[bold red]{row.case}[/]"
        shown.add_row(name, *(MARK[mark] for mark in row.marks), f"{row.seconds:.2f}")
    return shown


def explain(row: Row) -> str:
    """What was said where it was wrong."""
    if row.error:
        return f"{row.case}: {row.error.strip().splitlines()[-1]}"
    return f"{row.case}: findings {', '.join(row.findings) or 'none'}; {row.said or 'no incident'}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write rows and rates to this file")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="cases or groups")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    console = Console(width=max(120, Console().width))
    cases = chosen(args.only)
    rows = [
        score(case)
        for case in track(
            cases, description="scoring", console=Console(stderr=True), transient=True
        )
    ]
    console.print(table(rows))
    for row in rows:
        if not row.right:
            console.print(explain(row), markup=False, soft_wrap=True)
    done, alarms = rates(rows), sum(row.false_alarms for row in rows if row.control)
    controls = sum(row.control for row in rows)
    summary = "  ".join(f"{part} {right}/{asked}" for part, (right, asked) in done.items())
    console.print(
        f"{len(rows) - controls} incidents: {summary}\n{controls} controls: {alarms} false alarms"
    )
    if args.json:
        content = {"rows": [asdict(row) for row in rows], "rates": done, "false_alarms": alarms}
        args.json.write_text(json.dumps(content, indent=1))
    return 0 if all(row.right for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
