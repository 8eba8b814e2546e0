"""Before it breaks: how many failures are foretold, how early, and how often for nothing?

    python -m benchmarks forecast [--seeds 10] [--look-every 5] [--only NAME ...] [--quick]

Trainings that fail by themselves, with no injected value, run under a guard with default settings
(or with a deep look every so many steps) until they break; sound trainings of the same families run
to their end. A failure is predicted if a forecast (SG951 to SG956) came at least one step before
it; the lead is counted from the first one. Beside it stand two rules that people write by hand.
Thresholds were chosen on other seeds (`--development`) than those that are reported.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.parts import failing_trainings, runner, sound_trainings
from benchmarks.parts.forecast_runs import Outcome, first_loss_above, first_norm_above, train
from benchmarks.parts.trainings import Kind

SEEDS = 10
QUICK_KINDS = ("activations outgrow float16", "plateau and escape")
FIRST_SEED = 200
"""Seeds below were used to choose thresholds, and are not reported."""
FIRST_DEVELOPMENT_SEED = 0
EARLY = 10
"""Steps of lead that leave time to do something."""

LookEvery = int | Literal["auto"]
Warner = Callable[[Outcome], list[int]]
"""The steps at which a rule warns of this run."""


def forecast_steps(outcome: Outcome) -> list[int]:
    """Steps at which stepguard told a forecast."""
    return [int(note["step"]) for note in outcome.told]


def reading_steps(outcome: Outcome) -> list[int]:
    """The same without deep looks: from loss, gradient norm and loss scale alone."""
    found = []
    for note in outcome.told:
        if not note["forecast"]["place"]:
            found.append(int(note["step"]))
    return found


WARNERS: dict[str, Warner] = {
    "stepguard": forecast_steps,
    "stepguard, no looks": reading_steps,
    "norm > 10 x median": first_norm_above,
    "loss > 6 sigma": first_loss_above,
}


def measure(
    kinds: Sequence[Kind], seeds: Sequence[int], look_every: LookEvery, console: Console
) -> list[Outcome]:
    """Every kind with every seed."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    outcomes = []
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("runs", total=len(kinds) * len(seeds))
        for kind in kinds:
            for seed in seeds:
                outcomes.append(train(kind, seed, look_every))
                progress.update(bar, advance=1, description=f"{kind.name:40}")
    return outcomes


def failing_row(name: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """One kind of failure: share foretold and lead, for every rule."""
    broken = [one for one in outcomes if one.failed is not None]
    row: dict[str, Any] = {"kind": name, "runs": len(outcomes), "failed": len(broken)}
    row["failed_at"] = [one.failed for one in broken]
    row["codes"] = sorted({str(note["code"]) for one in broken for note in one.told})
    row["interval_held"] = sum(interval_held(one) for one in broken)
    row["rules"] = {}
    for rule, warn in WARNERS.items():
        leads = []
        for one in broken:
            steps = [step for step in warn(one) if step < (one.failed or 0)]
            if steps:
                leads.append((one.failed or 0) - min(steps))
        row["rules"][rule] = {"foretold": len(leads), "leads": sorted(leads), **spread(leads)}
        row["rules"][rule]["early"] = sum(lead >= EARLY for lead in leads)
    return row


def interval_held(outcome: Outcome) -> bool:
    """The run broke within the interval of a forecast that came before."""
    for note in outcome.told:
        forecast = note["forecast"]
        if forecast["earliest"] <= (outcome.failed or 0) <= forecast["latest"]:
            return True
    return False


def spread(leads: Sequence[int]) -> dict[str, float | None]:
    """Median and tenth percentile, in steps."""
    if not leads:
        return {"median": None, "tenth": None}
    ordered = sorted(leads)
    return {"median": statistics.median(ordered), "tenth": ordered[len(ordered) // 10]}


def sound_row(name: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """One family of healthy runs: warnings that were for nothing."""
    row: dict[str, Any] = {"kind": name, "runs": len(outcomes)}
    row["steps"] = sum(one.steps for one in outcomes)
    row["broken"] = sum(one.failed is not None for one in outcomes)
    row["warnings"] = {}
    for rule, warn in WARNERS.items():
        row["warnings"][rule] = sum(len(warn(one)) for one in outcomes)
    return row


def by_kind(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """In the order in which they were run."""
    groups: dict[str, list[Outcome]] = {}
    for one in outcomes:
        groups.setdefault(one.kind, []).append(one)
    return groups


def failing_table(rows: Sequence[dict[str, Any]]) -> Table:
    title = "foretold of those that failed; lead in steps: median (tenth percentile)"
    drawn = Table("failure", "failed", *WARNERS, "told by", title=title, box=None)
    for row in rows:
        cells = [_shown(row["rules"][rule], row["failed"]) for rule in WARNERS]
        failed = f"{row['failed']} of {row['runs']}"
        drawn.add_row(row["kind"], failed, *cells, ", ".join(row["codes"]) or "nothing")
    return drawn


def _shown(cell: dict[str, Any], failed: int) -> str:
    if not cell["foretold"]:
        return f"0 of {failed}"
    return f"{cell['foretold']} of {failed}; {cell['median']:g} ({cell['tenth']:g})"


def sound_table(rows: Sequence[dict[str, Any]]) -> Table:
    title = "warnings in healthy runs"
    drawn = Table("healthy family", "runs", "steps", *WARNERS, title=title, box=None)
    for row in rows:
        cells = [str(row["warnings"][rule]) for rule in WARNERS]
        drawn.add_row(row["kind"], str(row["runs"]), str(row["steps"]), *cells)
    return drawn


def totals(failing: Sequence[dict[str, Any]], sound: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All kinds together, for every rule."""
    steps = sum(row["steps"] for row in sound)
    failed = sum(row["failed"] for row in failing)
    found: dict[str, Any] = {"failed": failed, "healthy_steps": steps, "rules": {}}
    found["healthy_runs"] = sum(row["runs"] for row in sound)
    found["interval_held"] = sum(row["interval_held"] for row in failing)
    for rule in WARNERS:
        leads = [lead for row in failing for lead in row["rules"][rule]["leads"]]
        false = sum(row["warnings"][rule] for row in sound)
        found["rules"][rule] = {
            "foretold": len(leads),
            "early": sum(lead >= EARLY for lead in leads),
            **spread(leads),
            "false_warnings": false,
            "false_per_1000_steps": 1000.0 * false / steps if steps else None,
        }
    return found


def tell(content: dict[str, Any], console: Console) -> None:
    """Print both tables and what they come to."""
    console.print(failing_table(content["failing"]))
    console.print(sound_table(content["sound"]))
    total = content["totals"]
    for rule, row in total["rules"].items():
        if row["foretold"]:
            lead = f"lead {row['median']:g} steps (tenth percentile {row['tenth']:g})"
        else:
            lead = "no lead"
        console.print(
            f"{rule}: {row['foretold']} of {total['failed']} failures foretold, {row['early']} at "
            f"least {EARLY} steps ahead, {lead}; {row['false_warnings']} warnings in "
            f"{total['healthy_steps']} healthy steps",
            soft_wrap=True,
        )
    blind = [row["kind"] for row in content["failing"] if not row["rules"]["stepguard"]["foretold"]]
    console.print(f"nothing is foretold of: {', '.join(blind) or 'none'}", soft_wrap=True)


OPTIONS: dict[str, Mapping[str, Any]] = {
    "--seeds": {"type": int, "default": SEEDS},
    "--only": runner.NAMES,
    "--development": {"action": "store_true", "help": "the seeds for thresholds"},
    "--look-every": {
        "type": lambda text: text if text == "auto" else int(text),
        "default": "auto",
        "metavar": "N",
        "help": "steps between two looks; by default as a guard does it",
    },
}


def main(arguments: Sequence[str] | None = None) -> int:
    run = runner.begin("forecast", __doc__, arguments, OPTIONS, quick="two kinds, one seed")
    options = run.options
    only = QUICK_KINDS if options.quick else options.only
    first = FIRST_DEVELOPMENT_SEED if options.development else FIRST_SEED
    seeds = range(first, first + (1 if options.quick else options.seeds))
    stderr = Console(stderr=True)
    failing = measure(chosen(failing_trainings.KINDS, only), seeds, options.look_every, stderr)
    sound = measure(chosen(sound_trainings.KINDS, only), seeds, options.look_every, stderr)
    content = document(failing, sound, len(seeds), options.look_every)
    tell(content, Console(width=max(160, run.console.width)))
    whole = only is None and not options.development and options.look_every == "auto"
    if options.output is not None or whole:
        run.keep(content, details=("failing", "sound"))
    return 0


def chosen(kinds: Sequence[Kind], only: Sequence[str] | None) -> list[Kind]:
    """Those whose name holds one of these parts."""
    if only is None:
        return list(kinds)
    return [kind for kind in kinds if any(part in kind.name for part in only)]


def document(
    failing: Sequence[Outcome], sound: Sequence[Outcome], seeds: int, look_every: LookEvery
) -> dict[str, Any]:
    """What is kept and printed."""
    failing_rows = [failing_row(name, group) for name, group in by_kind(failing).items()]
    sound_rows = [sound_row(name, group) for name, group in by_kind(sound).items()]
    return {
        "seeds": seeds,
        "look_every": look_every,
        "failing": failing_rows,
        "sound": sound_rows,
        "totals": totals(failing_rows, sound_rows),
    }


if __name__ == "__main__":
    raise SystemExit(main())
