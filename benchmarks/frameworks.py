"""What a guard costs inside a framework's own loop: steps of the guarded loop against those of the
bare one.

    python -m benchmarks frameworks                  # a few minutes a loop
    python -m benchmarks frameworks --only trainer
    python -m benchmarks frameworks --quick          # tiny models, seconds: says nothing about cost

Guarded and bare runs of a few steps alternate on the same model, in an order drawn anew each time;
the median steps of two neighbours give one ratio, and the median of these is reported. The control
is bare on both sides.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.parts import framework_loops, runner
from benchmarks.parts.framework_loops import FULL, QUICK, Loop, Size, Spent
from benchmarks.parts.lightning_loop import LightningLoop
from benchmarks.parts.timing import SEED, interval_of_median

LOOPS: dict[str, Callable[[Size], Loop]] = {
    **framework_loops.LOOPS,
    "lightning": lambda size: LightningLoop(size, fused=True),
    "lightning-foreach": lambda size: LightningLoop(size, fused=False),
}
PROMISE = 1.01
STEPS, PAIRS = 9, 24
"""Steps of one run, of which the first is left out, and runs of each kind."""


@dataclass(frozen=True)
class Result:
    """Guarded against bare (or, `control`, bare against bare) in one framework."""

    loop: str
    what: str
    control: bool
    pairs: int
    ratio: float
    interval: tuple[float, float]
    cpu_ratio: float
    cpu_interval: tuple[float, float]
    milliseconds: float
    """Median bare step, wall clock."""


OPTIONS: dict[str, dict[str, Any]] = {
    "--only": {"metavar": "NAME", "help": f"one loop: {', '.join(LOOPS)}"},
    "--pairs": {"type": int, "help": f"runs of each kind ({PAIRS})"},
}


def main(arguments: Sequence[str] | None = None) -> int:
    run = runner.begin("frameworks", __doc__, arguments, OPTIONS, quick="tiny models, few runs")
    options, console = run.options, run.console
    if options.only is not None and options.only not in LOOPS:
        return run.refuse("--only", options.only, LOOPS)
    pairs = options.pairs or (2 if run.quick else PAIRS)
    size = QUICK if options.quick else FULL
    results = []
    for name in LOOPS if options.only is None else [options.only]:
        loop = LOOPS[name](size)
        try:
            results += [compare(name, loop, pairs, control=control) for control in (True, False)]
        finally:
            loop.close()
    console.print(painted(size.what, results))
    kept = _merge(run.output, results)
    run.keep({"promise": PROMISE, "what": size.what, "loops": kept})
    return 0


def compare(name: str, loop: Loop, pairs: int, *, control: bool) -> Result:
    """Alternate the two kinds of run; every pair of neighbours gives one ratio."""
    draw = random.Random(SEED)
    ratios, cpu_ratios, bare_steps = [], [], []
    loop.run(2, guarded=not control)  # imports and first allocations
    for _ in range(pairs):
        first = draw.random() < 0.5
        one, other = [
            _typical(loop, guarded=guarded and not control) for guarded in (first, not first)
        ]
        guarded_step, bare_step = (one, other) if first else (other, one)
        ratios.append(guarded_step[0] / bare_step[0])
        cpu_ratios.append(guarded_step[1] / max(bare_step[1], 1e-9))
        bare_steps.append(bare_step[0])
    return Result(
        loop=name,
        what=loop.what,
        control=control,
        pairs=pairs,
        ratio=statistics.median(ratios),
        interval=interval_of_median(ratios),
        cpu_ratio=statistics.median(cpu_ratios),
        cpu_interval=interval_of_median(cpu_ratios),
        milliseconds=1e3 * statistics.median(bare_steps),
    )


def _typical(loop: Loop, *, guarded: bool) -> Spent:
    """The median step of one short run, its first left out."""
    gc.collect()
    steps = loop.run(STEPS + 1, guarded=guarded)[1:]
    return statistics.median(wall for wall, _ in steps), statistics.median(cpu for _, cpu in steps)


def _merge(path: Path, results: Sequence[Result]) -> list[dict[str, Any]]:
    """Loops that were not measured now keep what was measured before."""
    before = json.loads(path.read_text(encoding="utf-8"))["loops"] if path.exists() else []
    measured = {result.loop for result in results}
    return [row for row in before if row["loop"] not in measured] + [
        asdict(result) for result in results
    ]


def painted(what: str, results: Sequence[Result]) -> Table:
    table = Table(
        title=f"{what}, 1 thread: guarded steps against bare ones",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("loop")
    for column in ("ratio", "95 % of it", "CPU", "95 % of it", "bare ms"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in results:
        spread, cpu = (
            "-".join(f"{end:.3f}" for end in ends)
            for ends in (result.interval, result.cpu_interval)
        )
        label = f"{result.what}{' (control: bare on both sides)' if result.control else ''}"
        numbers = (
            f"{result.ratio:.3f}",
            spread,
            f"{result.cpu_ratio:.3f}",
            cpu,
            f"{result.milliseconds:.0f}",
        )
        table.add_row(label, *numbers, style="dim" if result.control else "bold")
    return table


if __name__ == "__main__":
    raise SystemExit(main())
