"""Run a recipe healthy, unguarded, with the report's own fix, and guarded; print one table; fail
unless it is survived.

    python -m recipes.verify                     # all recipes, some minutes each
    python -m recipes.verify radiodiff --short   # one, with fewer steps: what CI runs

Writes the picture and the numbers beside the recipe with --save. Not covered: accelerators.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from recipes.common.expect import problems
from recipes.common.experiment import Beforehand, Experiment
from recipes.common.outcome import MODES, Mode, Outcome
from recipes.common.show import draw, table

HERE = Path(__file__).parent
RECIPES = tuple(sorted(path.parent.name for path in HERE.glob("*/modes.py")))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.verify", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(RECIPES)}; all when none is given"
    )
    parser.add_argument("--short", action="store_true", help="fewer steps")
    parser.add_argument(
        "--save", action="store_true", help="write verify.png and verify.json beside the recipe"
    )
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in RECIPES]
    if unknown:
        parser.error(f"{unknown[0]!r} is no recipe; use {', '.join(RECIPES)}")
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # a ruined state is full of them, and five times slower
    console = Console(width=None if sys.stdout.isatty() else 150)
    wrong = [
        problem for name in options.names or RECIPES for problem in verify(name, options, console)
    ]
    console.print(
        f"{len(wrong)} problems" if wrong else "all as expected",
        style="bold red" if wrong else "bold green",
    )
    return 1 if wrong else 0


def verify(name: str, options: argparse.Namespace, console: Console) -> list[str]:
    """All experiments of a recipe, each in its four modes."""
    sys.path.insert(
        0, str(HERE / name)
    )  # the recipe's scripts import each other as the reports have them
    try:
        experiments: Sequence[Experiment | Beforehand] = importlib.import_module(
            f"recipes.{name}.modes"
        ).EXPERIMENTS
    finally:
        sys.path.remove(str(HERE / name))
    found: list[str] = []
    for experiment in experiments:
        if isinstance(experiment, Beforehand):
            wrong = _beforehand(experiment, console)
        elif not (experiment.in_short if options.short else experiment.in_full):
            continue
        else:
            wrong = _modes(experiment, name, options, console)
        for problem in wrong:
            console.print(f"  {problem}", style="red")
        found += [f"{experiment.name}: {problem}" for problem in wrong]
    return found


def _beforehand(experiment: Beforehand, console: Console) -> list[str]:
    said, wrong = experiment.look()
    console.print(experiment.title, style="italic")
    console.print(said, markup=False, highlight=False, soft_wrap=True)
    return wrong


def _modes(
    experiment: Experiment, name: str, options: argparse.Namespace, console: Console
) -> list[str]:
    outcomes: dict[Mode, Outcome] = {}
    for mode in MODES:
        with console.status(f"{experiment.title}: {mode}"):
            outcomes[mode] = experiment.run(mode, options.short)
    console.print(table(experiment.title, experiment.expected, outcomes))
    if options.save:
        save(HERE / name, experiment, outcomes)
    return problems(experiment.expected, outcomes)


def save(folder: Path, experiment: Experiment, outcomes: dict[Mode, Outcome]) -> None:
    """The picture in the recipe's README, and its numbers."""
    draw(folder / f"{experiment.name}.png", experiment.title, outcomes)
    numbers = {mode: _plain(outcome) for mode, outcome in outcomes.items()}
    (folder / f"{experiment.name}.json").write_text(
        json.dumps(numbers, indent=1) + "\n", encoding="utf-8"
    )


def _plain(outcome: Outcome) -> dict[str, Any]:
    return {
        "first_bad": outcome.first_bad,
        "detected": outcome.detected,
        "cause": outcome.cause,
        "actions": outcome.actions,
        "bad_tensors": outcome.bad_parameters + outcome.bad_buffers,
        "tensors": outcome.tensors,
        "metric": outcome.metric if outcome.metric == outcome.metric else None,
        **outcome.also,
        "seconds": round(outcome.seconds, 1),
    }


if __name__ == "__main__":
    raise SystemExit(main())
