"""Bad moments, side by side: where does a run end that was hit, by what is done about it?

    python -m benchmarks recovery [--seeds 5] [--only NAME ...] [--quick]

Every strategy sees the same batches in the same order and as many of them; something happens at
half-way. Measured is the loss on held-out data at the end. stepguard has its default settings, and
`anomalies="act"` in the rows marked so, where everything stays finite. The exit code is 0 when
stepguard is best, or equal within noise, in every row.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.parts import runner
from benchmarks.parts.bad_moments import AT, MOMENTS, STEPS, Moment
from benchmarks.parts.strategies import STRATEGIES, all_of, in_a_child

SEEDS = 5
NOISE_SHARE, NOISE = 0.02, 1e-3
"""What counts as equal: two per cent, or so much of the loss."""


def measure(moment: Moment, seeds: Sequence[int], steps: int = STEPS) -> dict[str, Any]:
    """One row: every strategy on every seed."""
    cells: dict[str, Any] = {name: {"losses": [], "done": []} for name in STRATEGIES}
    for seed in seeds:
        ended = in_a_child(moment, seed, steps) if moment.full_disk else all_of(moment, seed, steps)
        for name, (loss, done) in ended.items():
            cells[name]["losses"].append(loss)
            cells[name]["done"].append(done)
    for cell in cells.values():
        cell["mean"], cell["worst"] = statistics.fmean(cell["losses"]), max(cell["losses"])
    return {"moment": moment.name, "acts": moment.acts, "strategies": cells, "held": held(cells)}


def held(cells: dict[str, Any]) -> bool:
    """Is stepguard best, or equal to the best? A run that everybody loses is equal."""
    ours = cells["stepguard"]["mean"]
    best = min(cell["mean"] for name, cell in cells.items() if name != "stepguard")
    if not math.isfinite(best):
        return True
    return bool(math.isfinite(ours) and ours <= best + max(NOISE_SHARE * abs(best), NOISE))


def table(rows: Sequence[dict[str, Any]]) -> Table:
    title = "loss on held-out data at the end: mean (worst) over the seeds"
    drawn = Table("bad moment", *STRATEGIES, title=title, box=None, header_style="bold")
    for row in rows:
        name = f"{row['moment']} (act)" if row["acts"] else row["moment"]
        cells = [_shown(row["strategies"][strategy]) for strategy in STRATEGIES]
        drawn.add_row(name if row["held"] else f"[bold red]{name}[/]", *cells)
    return drawn


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and worst loss of every strategy: what the table shows."""
    return [
        {
            "moment": row["moment"],
            "acts": row["acts"],
            "held": row["held"],
            **{name: [one["mean"], one["worst"]] for name, one in row["strategies"].items()},
        }
        for row in rows
    ]


def _shown(cell: dict[str, Any]) -> str:
    return f"{_number(cell['mean'])} ({_number(cell['worst'])})"


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "lost"
    return f"{value:.3f}" if value < 1e3 else f"{value:.0e}"


def strict(data: Any) -> Any:
    """Infinity, a run that was lost, is null in JSON."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: strict(value) for key, value in data.items()}
    return [strict(value) for value in data] if isinstance(data, list) else data


OPTIONS: dict[str, Mapping[str, Any]] = {
    "--seeds": {"type": int, "default": SEEDS},
    "--only": runner.NAMES,
}


def main(arguments: Sequence[str] | None = None) -> int:
    run = runner.begin("recovery", __doc__, arguments, OPTIONS, quick="one seed")
    options, console = run.options, run.console
    chosen = [
        m for m in MOMENTS if options.only is None or any(part in m.name for part in options.only)
    ]
    seeds = range(1 if options.quick else options.seeds)
    rows = [measure(m, seeds) for m in run.track(chosen, "bad moments")]
    console.print(table(rows))
    for row in rows:
        if not row["held"]:
            console.print(
                f"{row['moment']}: {row['strategies']['stepguard']['done']}",
                markup=False,
                soft_wrap=True,
            )
    lost = [row["moment"] for row in rows if not row["held"]]
    console.print(f"{len(rows) - len(lost)} of {len(rows)} rows: stepguard is best or equal")
    if options.output is not None or (options.only is None and not options.quick):
        kept = {"steps": STEPS, "at": AT, "seeds": len(seeds), "table": summary(rows), "rows": rows}
        run.keep(strict(kept), details=("rows",))
    return 1 if lost else 0


if __name__ == "__main__":
    raise SystemExit(main())
