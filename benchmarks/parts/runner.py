"""What every benchmark shares: arguments, console, progress, and JSON with the machine's facts."""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.parts import machine

WIDTH = 120
"""Columns that a table of results needs."""


class Run:
    """One start of a benchmark: `options`, a console for tables, and where its results go."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.options = name, options
        self.console = Console(width=max(WIDTH, Console().width))
        self.quick = bool(getattr(options, "quick", False))

    def track(self, work: Iterable[Any], description: str | None = None) -> Iterable[Any]:
        """The same work, with a bar on stderr while it is done."""
        bar = Console(stderr=True)
        return track(list(work), description or self.name, console=bar, transient=True)

    @property
    def output(self) -> Path:
        """Where the JSON goes; results of `--quick` lie beside the others and not in git."""
        name = f"{self.name}-quick.json" if self.quick else f"{self.name}.json"
        return self.options.output or machine.RESULTS / name

    def keep(self, content: Mapping[str, Any], *, details: Sequence[str] = ()) -> None:
        """Write the results with the machine's facts."""
        found = {"schema": 1, "machine": machine.facts(), **content}
        machine.keep(found, self.output, details=details)
        self.console.print(f"written to {self.output.name}")

    def with_earlier(self, rows: Mapping[str, Any], order: Iterable[str]) -> dict[str, Any]:
        """These rows, and those of an earlier start that were not measured now."""
        before: dict[str, Any] = {}
        if self.output.exists():
            before = json.loads(self.output.read_text(encoding="utf-8"))["rows"]
        both = {**before, **rows}
        return {name: both[name] for name in order if name in both}

    def refuse(self, option: str, value: str, known: Iterable[str]) -> int:
        """Say that an option does not have this value, and which it has."""
        said = f"{option} {value}: not known; use one of {', '.join(known)}."
        self.console.print(said, style="red", markup=False)
        return 2


def begin(
    name: str,
    doc: str | None,
    arguments: Sequence[str] | None,
    more: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    quick: str | None = None,
) -> Run:
    """Read the arguments: those of every benchmark and `more`; one thread, warnings off.

    `quick` says what `--quick` measures; None: the benchmark has no short form.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if quick is not None:
        parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--output", type=Path, default=None, help="where the JSON goes")
    for option, settings in (more or {}).items():
        parser.add_argument(option, **settings)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return Run(name, options)


NAMES: Mapping[str, Any] = {
    "nargs": "*",
    "metavar": "NAME",
    "default": None,
    "help": "parts of names; the others are left out",
}
"""Settings of an option that chooses rows by name."""
JOBS: Mapping[str, Any] = {
    "type": int,
    "default": os.cpu_count() or 1,
    "help": "processes side by side",
}
