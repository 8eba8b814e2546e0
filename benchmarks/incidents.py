"""Public incidents as small trainings: is the cause named, is the step at least stopped?

    python -m benchmarks incidents [--only I117 ...]

The listed half of 195 incidents from public trackers, gathered without regard to what stepguard
can name; the other half is kept for scoring. Every one that a CPU can run is run once with default
settings under `watch`, files under `verify`. `named`: a code of its cause is the first finding of
an incident, or is reported as a silent failure, a forecast or a `WiringWarning`. `stopped`:
something else was reported.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.table import Table
from zoo.incidents import CHECKPOINTS, INCIDENTS, NOT_HERE, Reproduction, Training

import stepguard
from benchmarks.parts import runner
from stepguard.journal import read_run


def reported(training: Training, folder: Path) -> list[str]:
    """The codes that a guarded run of it reports, the first finding of each incident first."""
    if training.before is not None:
        reported(training.before, folder)
    config = stepguard.GuardConfig(run_dir=folder, terminal="quiet")
    guard = stepguard.watch(
        training.model,
        training.optimizer,
        scheduler=training.scheduler,
        scaler=training.scaler,
        config=config,
    )
    raised: list[str] = []
    with guard:
        training.begin()
        try:
            for number in range(training.steps):
                training.step(number)
        except stepguard.TrainingHalted:
            pass
        except ValueError as fault:  # torch itself refuses some of them
            raised.append(f"{type(fault).__name__} of the program")
        found = [one.findings[0].code if one.findings else "none" for one in guard.incidents]
    for note in read_run(folder).notes:
        if note.get("kind") in ("silent", "forecast", "anomaly"):
            found.append(str(note.get("code") or "a note"))
        elif note.get("kind") == "wiring":
            found.append("wiring")  # a warning, which has no code
    return list(dict.fromkeys([*found, *raised]))


def score(one: Reproduction) -> tuple[str, list[str]]:
    """`named`, `stopped` or `nothing`, and what was reported."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = reported(one.build(), Path(folder))
    if set(found) & set(one.codes):
        return "named", found
    return ("stopped" if found else "nothing"), found


def main(arguments: Sequence[str] | None = None) -> int:
    only = {"nargs": "+", "metavar": "ID", "help": "only these incidents"}
    run = runner.begin("incidents", __doc__, arguments, {"--only": only})
    known = [one.name for one in INCIDENTS] + list(CHECKPOINTS)
    wanted = run.options.only or known
    for name in wanted:
        if name not in known:
            return run.refuse("--only", name, known)
    rows = {}
    for one in run.track([one for one in INCIDENTS if one.name in wanted]):
        rows[one.name] = (one.thread, *score(one))
    for name, (thread, write) in CHECKPOINTS.items():
        if name in wanted:
            with tempfile.TemporaryDirectory() as folder:
                write(Path(folder))
                refused = not stepguard.verify(Path(folder)).ok
            rows[name] = (thread, "named" if refused else "nothing", ["refused"] if refused else [])
    table = Table("incident", "thread", "", "reported", title="public incidents that a CPU can run")
    for name in sorted(rows):
        thread, state, found = rows[name]
        table.add_row(name, thread, state, ", ".join(found))
    run.console.print(table)
    counts = Counter(state for _, state, _ in rows.values())
    left = sum(len(names.split()) for names in NOT_HERE.values())
    run.console.print(
        f"{counts['named']} of {len(rows)} named ({counts['named'] / len(rows):.0%}), "
        f"{counts['stopped']} stopped, {counts['nothing']} not noticed; {left} of the listed half "
        "have no reproduction (zoo/incidents.py says why)"
    )
    if not run.options.only:
        states = {name: state for name, (_, state, _) in sorted(rows.items())}
        run.keep({"rows": states, "counts": dict(counts), "not_here": left})
    return 0


if __name__ == "__main__":
    sys.exit(main())
