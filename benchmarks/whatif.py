"""How often is the right fix ranked first, of those that `guard.whatif()` tries?

    python -m benchmarks whatif [--seeds 5] [--quick] [--later STEPS]

On trainings whose failure was planted together with its cure, and on the cases of the zoo whose
cure can be applied from outside (by the sample or the cause they are known for). Beside it: "always
lower the learning rate", and a candidate drawn at random of those that were tried.

A change of the case's own line that the panel offers as tried counts as right as well:
`python -m benchmarks remedies` shows that those train on.

The ranking was corrected after a first run (one seed) of `planted` and `zoo`: 5 of 7 and 45 of 50
were right then. `fresh` and `zoo, at once` were not looked at before: they are the honest figures.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.table import Table
from zoo.case import Case, Scene
from zoo.catalogue import chosen as zoo_cases
from zoo.plain import autocast, make_scaler

import stepguard
from benchmarks.parts import runner
from benchmarks.parts.known_fixes import FAILS, FRESH, PLANTED, Planted, Training, run
from stepguard.records.probes import WhatIf

SEEDS = 5
QUICK = ("NaN in one sample", "learning rate jumps", "happens once")
LOWER = frozenset({"lr x0.5", "lr x0.1"})
BY_CAUSE: dict[str, frozenset[str]] = {
    "SG501": frozenset({"clip"}),
    "SG502": frozenset({"eps"}),
    "SG504": frozenset({"keep lr", "lr x0.1", "lr x0.5"}),
    "SG505": frozenset({"lr x0.1", "lr x0.5", "clip", "no decay"}),
    "SG301": frozenset({"wider module", "float32", "loss scale"}),
    "SG302": frozenset({"wider module", "float32"}),
    "SG702": frozenset({"nothing"}),
}
"""What cures a cause of the zoo from outside. A case with one guilty sample is cured without it."""
LEAST_STEP = 2
"""A case that fails earlier, "at once", has no steps before it to try anything on."""
KINDS = ("planted", "fresh", "zoo", "zoo, at once")


def judged(name: str, kind: str, right: frozenset[str], found: WhatIf | None) -> dict[str, Any]:
    """One row: what came first, and what the two plain rules would have come to."""
    row: dict[str, Any] = {"case": name, "kind": kind, "right": sorted(right), "found": False}
    if found is None:
        return row
    right |= {"fix"}
    offered = [one.name for one in found.outcomes]
    first = found.best.name if found.best is not None else "nothing helps"
    row.update(
        found=True,
        first=first,
        ranked_right=first in right,
        tried=len(offered),
        lower_rate=bool(LOWER & right),
        random=len(right.intersection(offered)) / max(len(offered), 1),
        steps=found.steps,
        window=found.window,
    )
    return row


def planted(one: Planted, seed: int, later: int = 0) -> dict[str, Any]:
    """One training with a known cure, asked about `later` steps after its incident."""
    per_step = bare_step_seconds(one.build(seed))
    guard = run(one.build(seed), one.incidents, later)
    found: WhatIf | None = None
    began = time.perf_counter()
    if guard.incidents:
        with contextlib.suppress(stepguard.ConfigError):  # it says why nothing can be tried
            found = guard.whatif()
    seconds = time.perf_counter() - began
    guard.close()
    kind = "fresh" if one in FRESH else "planted"
    row = judged(one.name, kind, one.right, found)
    row["seed"] = seed
    row["time_in_steps"] = seconds / per_step
    return row


def bare_step_seconds(training: Training) -> float:
    """Median time of a step of the plain loop, before anything fails."""
    times = []
    for step in range(FAILS):
        training.before_step(step)
        batch = training.batch(step)
        began = time.perf_counter()
        training.optimizer.zero_grad()
        training.loss(batch).backward()
        training.optimizer.step()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def cure(case: Case) -> frozenset[str]:
    """What cures a case of the zoo from outside; empty where only its code can be changed."""
    if case.control or case.wanted.event.startswith(("param:", "buffer:", "opt:", "checkpoint")):
        return frozenset()
    if case.wanted.sample is not None:
        return frozenset({"leave out"})
    return BY_CAUSE.get(case.accepted[0], frozenset())


def of_zoo(case: Case) -> dict[str, Any]:
    """One case of the zoo, up to its first incident."""
    scene = case.build(False)
    found: WhatIf | None = None
    with tempfile.TemporaryDirectory() as folder:
        guard = _guard(scene, folder)
        try:
            _train(scene, guard)
            if guard.incidents:
                found = guard.whatif()
        except stepguard.ConfigError:
            found = None
        finally:
            guard.close()
    kind = "zoo, at once" if case.wanted.step < LEAST_STEP else "zoo"
    return judged(case.name, kind, cure(case), found)


def _guard(scene: Scene, folder: str) -> stepguard.Guard:
    modules = {"criterion": scene.criterion} if scene.criterion is not None else None
    config = stepguard.GuardConfig(
        clip_norm=scene.clip,
        run_dir=folder,
        terminal="quiet",
        probes=stepguard.Probes(look_every=None),
    )
    return stepguard.Guard(
        scene.model, scene.optimizer, scaler=make_scaler(scene), modules=modules, config=config
    )


def _train(scene: Scene, guard: stepguard.Guard) -> None:
    def loss_fn(batch: Any) -> torch.Tensor:
        with autocast(scene):
            return scene.loss(scene.model, batch)

    for step in range(scene.steps):
        if scene.before_step:
            scene.before_step(step)
        try:
            guard.step(loss_fn, *scene.micro_batches(step))
        except stepguard.TrainingHalted:
            return
        if guard.incidents:
            return
        if scene.after_step:
            scene.after_step(step)


def totals(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Shares over rows, of each kind."""
    shares: dict[str, Any] = {}
    for kind in KINDS:
        of_kind = [row for row in rows if row["kind"] == kind]
        told = [row for row in of_kind if row["found"]]
        if not told:
            continue
        shares[kind] = {
            "cases": len(of_kind),
            "tried": len(told),
            "right first": statistics.fmean(row["ranked_right"] for row in told),
            "always lower the rate": statistics.fmean(row["lower_rate"] for row in told),
            "a random candidate": statistics.fmean(row["random"] for row in told),
            "steps, median": statistics.median(row["steps"] for row in told),
        }
        harder = [row for row in told if row["right"] != ["leave out"]]
        shares[kind]["cured otherwise than without a sample"] = len(harder)
        if harder:
            shares[kind]["right first of these"] = statistics.fmean(
                row["ranked_right"] for row in harder
            )
        timed = [row["time_in_steps"] for row in told if "time_in_steps" in row]
        if timed:
            shares[kind]["time in bare steps, median"] = statistics.median(timed)
    return shares


def table(rows: Sequence[dict[str, Any]]) -> Table:
    drawn = Table("case", "right", "ranked first", box=None, header_style="bold")
    for row in rows:
        first = row.get("first", "no incident")
        style = "green" if row.get("ranked_right") else "red"
        drawn.add_row(row["case"], ", ".join(row["right"]), f"[{style}]{first}[/]")
    return drawn


OPTIONS: dict[str, dict[str, Any]] = {
    "--seeds": {"type": int, "default": SEEDS},
    "--later": {
        "type": int,
        "default": 0,
        "help": "steps trained on before the question; no zoo then",
    },
}


def main(arguments: Sequence[str] | None = None) -> int:
    quick = "three trainings, one seed, no zoo"
    run = runner.begin("whatif", __doc__, arguments, OPTIONS, quick=quick)
    options, console = run.options, run.console
    chosen = [one for one in (*PLANTED, *FRESH) if not options.quick or one.name in QUICK]
    seeds = range(1 if options.quick else options.seeds)
    whole = not options.quick and not options.later
    cases = [case for case in zoo_cases() if cure(case)] if whole else []
    work = [(one, seed) for one in chosen for seed in seeds]
    rows = [planted(one, seed, options.later) for one, seed in run.track(work, "planted")]
    rows += [of_zoo(case) for case in run.track(cases, "zoo")]
    console.print(table(rows))
    shares = totals(rows)
    for kind, figures in shares.items():
        told = ", ".join(f"{name} {_shown(value)}" for name, value in figures.items())
        console.print(f"{kind}: {told}", markup=False)
    if options.output is not None or whole:
        run.keep({"totals": shares, "rows": rows}, details=("rows",))
    return 0


def _shown(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    return f"{value:.0%}" if value <= 1.0 else f"{value:.0f}"


if __name__ == "__main__":
    raise SystemExit(main())
