"""Score a tool on the zoo: does one run name the right step, place, sample and cause, and survive?

    python -m zoo                                   # stepguard, every case
    python -m zoo --core                            # two cases for each kind, and controls
    python -m zoo --only masks empty_means          # groups or single cases
    python -m zoo --tool package.module:function    # another tool
    python -m zoo --peers                           # stepguard beside what people use today

The exit code is 0 when every mark is right and no control raised an alarm. With --peers all tools
are marked more mildly: the right step, and the right autograd node or module.
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

from zoo.case import Case
from zoo.catalogue import chosen
from zoo.score import PARTS, Row, Tool, names_place, rates, score
from zoo.tools import TOOLS, named, stepguard

MARK = {True: "[green]yes[/]", False: "[red]NO[/]", None: "[dim]-[/]"}
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "zoo.json"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m zoo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tool", default="stepguard", help="a name, or package.module:function")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="cases or groups")
    parser.add_argument("--core", action="store_true", help="two cases for each kind of incident")
    parser.add_argument("--json", type=Path, help="write rows and rates to this file")
    parser.add_argument("--peers", action="store_true", help="every tool, side by side")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cases = [case for case in chosen(args.only) if case.core or not args.core]
    if args.peers:
        return _compare(cases, keep=not args.only and not args.core)
    return _score(cases, named(args.tool), args.json)


def _score(cases: list[Case], tool: Tool, output: Path | None) -> int:
    rows = []
    for case in track(cases, "scoring", console=Console(stderr=True), transient=True):
        rows.append(score(case, tool))
    console = Console(width=max(120, Console().width))
    console.print(_table(rows))
    for row in rows:
        if not row.right:
            said = row.error.strip().splitlines()[-1:] or [row.said or "no incident"]
            causes = ", ".join(row.causes) or "none"
            console.print(f"{row.case}: causes {causes}; {said[0]}", markup=False, soft_wrap=True)
    done = rates(rows)
    alarms = sum(row.false_alarms for row in rows if row.control)
    controls = sum(row.control for row in rows)
    summary = "  ".join(f"{part} {right}/{asked}" for part, (right, asked) in done.items())
    console.print(f"{len(rows) - controls} incidents: {summary}")
    console.print(f"{controls} controls: {alarms} false alarms")
    if output:
        content = {"rows": [asdict(row) for row in rows], "rates": done, "false_alarms": alarms}
        output.write_text(json.dumps(content, indent=1))
    return 0 if all(row.right for row in rows) else 1


def _table(rows: list[Row]) -> Table:
    shown = Table(title="failure zoo", box=None, header_style="bold")
    shown.add_column("case", no_wrap=True)
    for part in PARTS:
        shown.add_column(part, justify="center")
    shown.add_column("seconds", justify="right")
    for row in rows:
        name = row.case if row.right else f"[bold red]{row.case}[/]"
        shown.add_row(name, *(MARK[mark] for mark in row.marks), f"{row.seconds:.2f}")
    return shown


def _compare(cases: list[Case], keep: bool) -> int:
    """Every tool that can be imported: right step, right node or module, false alarms."""
    totals = {name: {"step": 0, "place": 0, "false_alarms": 0} for name in TOOLS}
    for case in track(cases, "comparing", console=Console(stderr=True), transient=True):
        for name, tool in TOOLS.items():
            if name not in totals:
                continue
            try:
                marks = _marks(case, tool)
            except ImportError:
                del totals[name]
                continue
            for part, mark in marks.items():
                totals[name][part] += mark
    controls = sum(case.control for case in cases)
    title = f"{len(cases) - controls} incidents, {controls} healthy controls"
    table = Table(title=title, box=None, header_style="bold")
    for heading in ("tool", "right step", "right place", "false alarms"):
        table.add_column(heading, justify="left" if heading == "tool" else "right")
    for name, total in totals.items():
        table.add_row(name, *map(str, total.values()))
    Console(width=100).print(table)
    if keep:
        content = {"incidents": len(cases) - controls, "controls": controls, "totals": totals}
        RESULTS.write_text(json.dumps(content, indent=1) + "\n")
    return 0


def _marks(case: Case, tool: Tool) -> dict[str, bool]:
    if tool is stepguard:
        row = score(case, tool)
        noticed = bool(row.detect) and not case.control
        alarm = bool(row.false_alarms)
        return {"step": noticed, "place": bool(row.place), "false_alarms": alarm}
    answer = tool(case.build(False))
    if case.expected is None:
        return {"false_alarms": answer is not None}
    return {
        "step": answer is not None and answer.step == case.expected.step,
        "place": names_place(answer, case.expected),
    }


if __name__ == "__main__":
    sys.exit(main())
