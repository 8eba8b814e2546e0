"""What reading a checkpoint costs: stepguard.verify, torch.load with an isnan loop, and merely
reading the file.

    python -m benchmarks verify            # two files of 2 GB, warm and cold cache, about 5 minutes
    python -m benchmarks verify --quick    # 40 MB, seconds: shows that it runs, says nothing about
    speed

Every contender runs in a process of its own, in turns; times are without imports, memory is the
growth of the peak. Cold: the file's pages are dropped from the cache before (posix_fadvise); the
disk's own cache stays.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.parts import runner
from benchmarks.parts.reading import CONTENDERS

PROMISE, MEMORY = 0.8, 300.0
"""Share of the bandwidth of merely reading (the faster of two readers); megabytes that the peak may
grow.
"""
FORMATS = ("torch zip", "safetensors")


OPTIONS: dict[str, dict[str, Any]] = {
    "--megabytes": {"type": int, "help": "size of each file"},
    "--rounds": {"type": int, "help": "turns of every contender"},
    "--folder": {"type": Path, "help": "where files are made; the system's temporary folder"},
}


def main(arguments: Sequence[str] | None = None) -> int:
    run = runner.begin("verify", __doc__, arguments, OPTIONS, quick="a small file and two rounds")
    options, console = run.options, run.console
    options.megabytes = options.megabytes or (40 if run.quick else 2000)
    options.rounds = options.rounds or (2 if run.quick else 5)
    files = {}
    with tempfile.TemporaryDirectory(prefix="stepguard-verify-", dir=options.folder) as folder:
        for name in FORMATS:
            path = make(Path(folder), name, options.megabytes)
            try:
                files[name] = {
                    cache: _measure(path, cache, options, console) for cache in ("warm", "cold")
                }
            finally:
                path.unlink()
            for cache, rows in files[name].items():
                console.print(painted(f"{name}, {options.megabytes} MB, cache {cache}", rows))
    promise = {"bandwidth": PROMISE, "megabytes": MEMORY}
    measured = {"megabytes": options.megabytes, "rounds": options.rounds, "files": files}
    run.keep({"promise": promise, **measured})
    return 0


def make(folder: Path, name: str, megabytes: int) -> Path:
    """A state dict of matrices as a language model has them, made piece by piece into the file's
    format.
    """
    generator = torch.Generator().manual_seed(0)
    count = max(2, megabytes // 20)
    state = {
        f"layers.{n}.weight": torch.randn(megabytes * 1_000_000 // count // 4, generator=generator)
        for n in range(count)
    }
    if name == "safetensors":
        from safetensors.torch import save_file

        save_file(state, path := folder / "model.safetensors")
    else:
        torch.save(state, path := folder / "model.pt")
    return path


def _measure(
    path: Path, cache: str, options: argparse.Namespace, console: Console
) -> list[dict[str, Any]]:
    suffix = path.suffix
    names = [name for name, contender in CONTENDERS.items() if suffix in contender.suffixes]
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(f"{path.name}, {cache}", total=len(names) * (options.rounds + 1))
        for turn in range(options.rounds + 1):
            for name in names:
                _prepare(path, cache)
                seen = _child(name, path)
                if turn:  # the first turn warms up
                    turns[name].append(seen)
                progress.advance(task)
    both = zip(turns["read"], turns["read large"], strict=True)
    reading = [min(small["seconds"], large["seconds"]) for small, large in both]
    return [_row(name, path.stat().st_size, turns[name], reading) for name in names]


def _row(
    name: str, size: int, turns: list[dict[str, float]], reading: list[float]
) -> dict[str, Any]:
    ratios = [read / turn["seconds"] for turn, read in zip(turns, reading, strict=True)]
    seconds = median(turn["seconds"] for turn in turns)
    return {
        "name": name,
        "what": CONTENDERS[name].what,
        "seconds": seconds,
        "gigabytes_a_second": size / seconds / 1e9,
        "cpu_seconds": median(turn["cpu"] for turn in turns),
        "of_reading": median(ratios),
        "of_reading_range": [min(ratios), max(ratios)],
        "peak_megabytes": max(turn["peak"] for turn in turns) / 1e6,
    }


def _prepare(path: Path, cache: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if cache == "cold":
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            while os.read(descriptor, 8 << 20):
                pass
    finally:
        os.close(descriptor)


def _child(name: str, path: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.parts.reading", name, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr}")
    seen: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seen


def painted(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """One line a contender."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("")
    for column in ("s", "GB/s", "of reading", "range", "CPU s", "peak MB"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        low, high = row["of_reading_range"]
        numbers = (
            f"{row['seconds']:.2f}",
            f"{row['gigabytes_a_second']:.2f}",
            f"{row['of_reading']:.2f}",
        )
        style = "bold" if row["name"] == "stepguard" else ""
        rest = (
            f"{low:.2f}-{high:.2f}",
            f"{row['cpu_seconds']:.2f}",
            f"{row['peak_megabytes']:.0f}",
        )
        table.add_row(row["what"], *numbers, *rest, style=style)
    return table


if __name__ == "__main__":
    raise SystemExit(main())
