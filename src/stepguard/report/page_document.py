"""A story as one JSON document: what the web page of a run, of two runs, or live, shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stepguard.records import Incident
from stepguard.report.page_columns import packed_columns, update_states
from stepguard.report.page_facts import (
    chain_of_events,
    checkpoint_marks,
    concern_words,
    fact_groups,
    quick_facts,
    rank_lanes,
    run_line,
    unread_words,
)
from stepguard.report.page_incident import clipped, incident_card
from stepguard.report.page_looks import looks_section
from stepguard.report.story import Left, Run, StepTable, Story

FORMAT = 1
MOST_CARDS = 400
"""Incidents with a whole card; of a run that fails all the time, later ones have a short one."""
LEFT_WORDS = {
    "rewind": "rewound",
    "restart": "restarted",
    "restore": "restored",
    "repeat": "went back",
}

Card = dict[str, Any]
Enrich = Callable[[Incident, Card, Path], None]
"""Adds to a card what lies in the incident's part of a run folder: sample, gradients by module."""


@dataclass(frozen=True, slots=True)
class Extras:
    """What the document of a run takes from elsewhere."""

    enrich: Enrich | None = None
    difference: list[list[str]] | None = None


def story_document(story: Story, name: str, extras: Extras | None = None) -> dict[str, Any]:
    """The document of every run in a folder; the page shows the newest first."""
    runs = []
    for run in story.runs:
        for place, lane in enumerate(run.lanes):
            shown = run_document(lane, name, extras or Extras(), run)
            label = f"{run.number} of {len(story.runs)} in this folder: {shown['line']}"
            runs.append({**shown, "label": label, "group": run.number, "lane": place})
    return {"format": FORMAT, "mode": "report", "runs": runs, "live": None}


def comparison_document(
    first: tuple[Run, str], second: tuple[Run, str], rows: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Two runs on one page; `rows` are aspect, first, second."""
    runs = [run_document(run, name, Extras()) for run, name in (first, second)]
    return {
        "format": FORMAT,
        "mode": "compare",
        "runs": runs,
        "live": None,
        "comparison": [[clipped(str(cell)) for cell in row] for row in rows],
    }


def run_document(run: Run, name: str, extras: Extras, whole: Run | None = None) -> dict[str, Any]:
    """One run: facts that change rarely, and its columns.

    `whole`: the run that this is one optimizer's lane of.
    """
    names = drawn_columns(run.steps)
    return {
        **run_facts(run, name, extras, whole),
        "columns": packed_columns(run.steps, names, states_of(run)),
        "parts": parts(run),
    }


def run_facts(run: Run, name: str, extras: Extras, whole: Run | None = None) -> dict[str, Any]:
    """Everything but the rows: the live page takes it again when something else than rows came."""
    whole = whole or run
    return {
        "name": clipped(run.name if whole.further else name),
        "title": clipped(name),
        "number": run.number,
        "line": clipped(run_line(run)),
        **quick_facts(run, whole),
        "panels": panels(run.steps),
        "incidents": _cards(run, extras),
        "checkpoints": checkpoint_marks(run),
        "ranks": rank_lanes(run),
        "chain": chain_of_events(run),
        "concerns": concern_words(run),
        "looks": looks_section(run),
        "groups": fact_groups(run, extras.difference),
        "unread": unread_words(run),
        "version": version(run, len(whole.lanes)),
    }


def version(run: Run, lanes: int = 1) -> str:
    """Changes whenever something else than an ordinary row was written, or the process has gone."""
    counted = (len(run.incidents), len(run.notes), len(run.attempts), len(run.branches), run.torn)
    told = (*counted, len(run.looks), len(run.steps.series), int(run.ended), lanes)
    return "-".join(map(str, told))


def states_of(run: Run) -> Any:
    """What became of each row's update."""
    partial = np.zeros(len(run.steps), np.bool_)
    for told in run.incidents:
        if told.done == "partial" and told.row is not None:
            partial[told.row] = True
    return update_states(run.steps, partial)


# --- lines and branches


def parts(run: Run) -> list[dict[str, Any]]:
    """Stretches of rows that were kept, or left, together."""
    table = run.steps
    if not len(table):
        return []
    changes = (np.diff(table.branch) != 0) | (np.diff(table.kept.astype(np.int8)) != 0)
    firsts = [0, *(np.flatnonzero(changes) + 1).tolist()]
    lasts = [*firsts[1:], len(table)]
    found = []
    for first, last in zip(firsts, lasts, strict=True):
        found.append(_part(run, first, last))
    return found


def _part(run: Run, first: int, last: int) -> dict[str, Any]:
    table = run.steps
    steps = f"steps {table.step[first]} to {table.step[last - 1]}"
    attempt = f"attempt {int(table.attempt[first]) + 1}"
    left = None if table.kept[first] else _why_left(run, first)
    part: dict[str, Any] = {"first": first, "last": last, "left": None, "joint": None}
    part["text"] = f"{attempt}, {steps}"
    if left is None and table.kept[first]:
        return part
    by = left.by if left else "repeat"
    words = f"{LEFT_WORDS[by]} to step {left.to}" if left else LEFT_WORDS[by]
    part["left"] = {"kind": by, "text": clipped(f"{steps}, left: {words}")}
    part["text"] = clipped(f"{attempt}, {steps}, left: {words}")
    if first and table.branch[first - 1] == table.branch[first]:
        part["joint"] = first - 1
    return part


def _why_left(run: Run, row: int) -> Left | None:
    """The first going back after this row that took its step away."""
    step = int(run.steps.step[row])
    for branch in run.branches[int(run.steps.branch[row]) :]:
        if branch.left is not None and branch.left.to <= step:
            return branch.left
    return None


# --- panels


def panels(table: StepTable) -> list[dict[str, Any]]:
    """What is drawn over the steps, from the most telling down."""
    names = set(table.series)
    made = [
        _panel("loss", "loss", _loss_series(table), height=230, smooth=True),
        _panel(
            "grad-norm",
            "gradient norm",
            [("before clipping", "grad_norm"), ("after clipping", "grad_norm_clipped")],
            height=160,
            smooth=True,
            colour=2,
        ),
        _panel("lr", "learning rate", _rates(table), height=120, colour=4, linear=True),
        _panel("scale", "loss scale", [("loss scale", "scale")], height=110, colour=3),
    ]
    for place, name in enumerate(sorted(n for n in names if n.startswith("followed/"))):
        label = name.removeprefix("followed/")
        made.append(
            _panel(
                f"followed-{place}", label, [(label, name)], height=120, smooth=True, colour=place
            )
        )
    made.append(_panel("labels", "targets in the step", [("targets", "labels")], height=90))
    made.append(
        _panel("seconds", "step time", [("seconds", "seconds")], height=110, smooth=True, colour=5)
    )
    return [_seen(panel, names) for panel in made if _seen(panel, names)["series"]]


def drawn_columns(table: StepTable) -> list[str]:
    """Names of the series that some panel draws."""
    return [series["column"] for panel in panels(table) for series in panel["series"]]


def _panel(
    name: str,
    title: str,
    series: Sequence[tuple[str, str]],
    *,
    height: int,
    smooth: bool = False,
    linear: bool = False,
    colour: int = 0,
) -> dict[str, Any]:
    listed = []
    for place, (label, column) in enumerate(series):
        # Components and further groups are drawn without a median of their own.
        minor = place > 0
        listed.append({"label": clipped(label), "column": column, "minor": minor})
    return {
        "id": name,
        "title": clipped(title),
        "series": listed,
        "height": height,
        "smooth": smooth,
        "linear": linear,
        "colour": colour,
    }


def _seen(panel: dict[str, Any], names: set[str]) -> dict[str, Any]:
    series = [one for one in panel["series"] if one["column"] in names]
    return {**panel, "series": series}


def _loss_series(table: StepTable) -> list[tuple[str, str]]:
    components = sorted(name for name in table.series if name.startswith("loss/"))
    return [("loss", "loss"), *((name.removeprefix("loss/"), name) for name in components)]


def _rates(table: StepTable) -> list[tuple[str, str]]:
    further = sorted(name for name in table.series if name.startswith("lr/"))
    if not further:
        return [("learning rate", "lr")]
    return [("group 0", "lr"), *((f"group {name.removeprefix('lr/')}", name) for name in further)]


# --- incidents


def _cards(run: Run, extras: Extras) -> list[Card]:
    cards = []
    for place, told in enumerate(run.incidents):
        card = incident_card(told)
        if place < MOST_CARDS and extras.enrich is not None:
            extras.enrich(told.incident, card, run.path.parent)
        cards.append(card)
    return cards


def run_name(path: Path) -> str:
    """The folder of a run, by which people know it."""
    folder = path.resolve() if path.is_dir() else path.resolve().parent
    return folder.name or str(folder)
