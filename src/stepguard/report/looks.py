"""Show the deep looks of a run: worst first, and how each figure moved over the run."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stepguard.records.look import Look, StepFacts
from stepguard.report import phrases
from stepguard.report.look_tables import LookRow, LookTable, look_tables
from stepguard.report.story import Run
from stepguard.report.unbroken import middle

MOST_LISTED = 12
"""Rows of each table; `--all` shows every one, `--json` has everything."""
LONGEST_NAME = 38
FEWEST_STEPS = 3
MOST_DRAWN = 16
"""Looks that a line of blocks shows, the newest."""


def paint(looks: Sequence[Look], console: Console, *, most: int | None = MOST_LISTED) -> None:
    """Print the newest look, and the history of what it shows."""
    console.print(Text(headline(looks)))
    for table in look_tables(looks, most):
        console.print()
        console.print(_painted(table))
    for sentence in remarks(looks[-1]):
        console.print(Text(f"- {sentence}"))


def why_none(run: Run) -> str:
    """Why a run has no looks, as far as its journal says."""
    config = run.header.get("config")
    if isinstance(config, dict) and config.get("look_every", "") is None:
        return "GuardConfig(look_every=None)"
    for note in reversed(run.notes):
        if note.type == "no_look" or note.kind == "look":
            return f"{note.fields.get('reason')} (step {note.step})"
    if len(run.steps) < FEWEST_STEPS:
        return f"it has {phrases.count(len(run.steps), 'step')}, and the first look is at the third"
    return "none of the steps at which one was due was committed"


def headline(looks: Sequence[Look]) -> str:
    """How often was the run looked at?"""
    times = "once" if len(looks) == 1 else f"{len(looks)} times"
    steps = phrases.first_few([look.step for look in looks], 12)
    return f"looked {times}, at step {steps}; the newest took {looks[-1].seconds:.2f} s"


def remarks(look: Look) -> list[str]:
    """What else the look has seen, in sentences."""
    told = [*_remarks_on_loss(look.facts), *_remarks_on_loop(look.facts)]
    missing = [one.name for one in look.parameters if one.trainable and not one.owned]
    if missing:
        told.append(f"no optimizer updates {phrases.first_few(missing, 4)}")
    if look.left_out:
        told.append(f"{phrases.count(look.left_out, 'row')} left out of the record")
    return told


def _remarks_on_loss(facts: StepFacts) -> list[str]:
    told = []
    if facts.labels and facts.ignored:
        share = facts.ignored / facts.labels
        told.append(f"{share:.0%} of {facts.labels:,} targets are ignored by the loss")
    if facts.softmax_twice:
        told.append("the logits of the cross entropy are probabilities already")
    return told


def _remarks_on_loop(facts: StepFacts) -> list[str]:
    told = []
    if not facts.training:
        told.append("the model is in evaluation mode")
    elif facts.dropout:
        names = phrases.first_few(facts.dropout, 4)
        told.append(f"dropout in evaluation mode while the model trains: {names}")
    if facts.kept_gradients:
        told.append("the step began with the gradients of the one before")
    if facts.repeats:
        told.append(f"the batch is the same as in {phrases.count(facts.repeats, 'earlier look')}")
    return told


def _painted(table: LookTable) -> Table:
    drawn = Table(
        title=table.title, title_justify="left", box=None, padding=(0, 1), title_style="bold"
    )
    headings = table.headings
    if table.history:
        headings = (*headings, table.history)
    for position, heading in enumerate(headings):
        # names are cut in the middle already; numbers line up on the right
        drawn.add_column(heading, justify="left" if position == 0 else "right", no_wrap=True)
    for row in table.rows:
        cells = _cells(row)
        if table.history:
            cells.append(Text(_trend(row)))
        drawn.add_row(*cells)
    return drawn


def _cells(row: LookRow) -> list[Text]:
    cells = [Text(middle(row.cells[0], LONGEST_NAME))]
    for number, words in enumerate(row.cells[1:], start=1):
        cells.append(Text(words, style="bold red" if number in row.warns else ""))
    return cells


def _trend(row: LookRow) -> str:
    values = [value for _, value in row.history[-MOST_DRAWN:]]
    if len(values) < 2:
        return ""
    return phrases.sparkline(values)
