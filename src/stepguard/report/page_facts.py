"""The words around the curves of a run's page: its state in a few numbers, ranks, settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stepguard.records import Incident
from stepguard.report import phrases
from stepguard.report.health import concerns
from stepguard.report.page_incident import clipped
from stepguard.report.run_words import STATES
from stepguard.report.story import Attempt, Run, Story
from stepguard.report.summary import worst_ending
from stepguard.report.timeline import timeline

ENDINGS = {
    "running": (STATES["running"], "plain"),
    "closed": (STATES["closed"], "good"),
    "error": (STATES["error"], "bad"),
    "signal": (STATES["signal"], "note"),
    "stopped": (STATES["stopped"], "bad"),
    "killed": (STATES["killed"], "bad"),
}
CHECKPOINT_STATES = {"rewound_to": "rewound to"}
MOST_RANKS = 64
MOST_LINKS = 1000


def run_line(run: Run) -> str:
    header = run.header
    parts_of_line = []
    if run.began is not None:
        parts_of_line.append(f"began {phrases.moment(run.began)}")
    if len(run.attempts) > 1:
        parts_of_line.append(phrases.count(len(run.attempts), "attempt"))
    for name in ("stepguard", "torch"):
        if header.get(name):
            parts_of_line.append(f"{name} {header[name]}")
    if run.world > 1:
        parts_of_line.append(f"{run.world} ranks")
    parts_of_line.append(str(run.path))
    return ", ".join(parts_of_line)


def verdict(run: Run) -> dict[str, str]:
    """State and incidents of the run: the worst of its optimizers, and the sum over them."""
    ending = worst_ending(run)
    text, weight = ENDINGS[ending]
    if ending == "signal":
        text = f"ended by {next(filter(None, (one.attempts[-1].signal for one in run.lanes)))}"
    told = [one for lane in run.lanes for one in lane.incidents]
    acted = [one for one in told if one.done != "told"]
    if not acted:
        return {"text": f"{text}, no incident", "weight": "good" if weight == "plain" else weight}
    weight = "note" if weight in ("good", "plain") else weight
    return {"text": f"{text}, {phrases.count(len(acted), 'incident')}", "weight": weight}


def tiles(run: Run) -> list[list[str]]:
    """The run in a few numbers; of several optimizers, one tile each."""
    if run.further:
        return [_lane_tile(lane) for lane in run.lanes]
    table = run.steps
    losses = table.values("loss", table.counts)
    kept = int(table.counts.sum())
    rows = [["steps committed", f"{kept:,}", f"of {len(table):,} seen"]]
    left = int((table.committed & ~table.kept).sum())
    if left:
        rows[0][2] += f", {left:,} left behind"
    calibrations = int(table.calibration.sum())
    note = f"and {phrases.count(calibrations, 'calibration')}" if calibrations else ""
    rows.append(["updates dropped", f"{int(table.dropped.sum()):,}", note])
    rows.append(["incidents", f"{len(run.incidents):,}", ""])
    if len(losses):
        best = phrases.number(float(losses.min()))
        rows.append(["loss", phrases.number(float(losses[-1])), f"best {best}"])
    seconds = table.values("seconds")
    if len(seconds):
        rows.append(["time a step", f"{phrases.number(float(np.median(seconds)))} s", "median"])
    if run.goings_back:
        rows.append(["went back", f"{len(run.goings_back):,}", "rewinds and restarts"])
    return rows


def _lane_tile(run: Run) -> list[str]:
    table = run.steps
    losses = table.values("loss", table.counts)
    words = [f"{int(table.counts.sum()):,} of {len(table):,} steps"]
    if len(losses):
        words.append(f"loss {phrases.number(float(losses[-1]))}")
    words.append(STATES[worst_ending(run)])
    return [clipped(run.name), phrases.count(len(run.incidents), "incident"), ", ".join(words)]


def update_words(run: Run) -> str:
    table = run.steps
    return (
        f"{int(table.committed.sum()):,} made, {int(table.dropped.sum()):,} dropped, "
        f"{phrases.count(int(table.calibration.sum()), 'loss-scale calibration')}"
    )


def checkpoint_marks(run: Run) -> list[dict[str, Any]]:
    shown = []
    for event in run.checkpoints:
        state = CHECKPOINT_STATES.get(event.state, event.state)
        shown.append({"step": event.step, "state": state, "text": clipped(event.text or state)})
    return shown


def rank_lanes(run: Run) -> list[dict[str, Any]]:
    """One lane a rank: what it has seen, and where it was to blame."""
    known = {*run.by_rank, *range(min(run.world, MOST_RANKS))}
    lanes = []
    for rank in sorted(known):
        marks = []
        for told in run.incidents:
            if rank in told.ranks:
                blamed = rank in _blamed(told.incident)
                words = "the origin is here" if blamed else "recorded here"
                marks.append({"step": told.incident.step, "blamed": blamed, "text": words})
        table = run.by_rank.get(rank, run.steps)
        steps = table.step if len(table) else run.steps.step
        first = int(steps.min()) if len(steps) else 0
        last = int(steps.max()) if len(steps) else 0
        text = f"{phrases.count(len(marks), 'incident')} recorded"
        lanes.append({"rank": rank, "first": first, "last": last, "marks": marks, "text": text})
    return lanes


def _blamed(incident: Incident) -> tuple[int, ...]:
    if incident.origin is not None and incident.origin.rank is not None:
        return (incident.origin.rank,)
    return tuple(incident.reading.bad_ranks)


def chain_of_events(run: Run) -> list[dict[str, Any]]:
    """What led to what, each link with the steps it lasted."""
    links = []
    for event in timeline(run):
        last = event.step if event.last_step is None else event.last_step
        link = {"steps": event.steps, "first": min(event.step, last), "last": max(event.step, last)}
        links.append({**link, "text": clipped(event.text), "weight": event.weight})
    return links[:MOST_LINKS]


def concern_words(run: Run) -> list[list[str]]:
    """What `stepguard live` would hold against the run: how grave, and what."""
    weights = {"unhealthy": "bad", "attention": "note"}
    return [[weights[one.weight], clipped(one.text)] for one in concerns(run)]


def unread_words(run: Run) -> str:
    if not run.torn:
        return ""
    lines = phrases.count(run.torn, "line")
    return f"not shown, because they cannot be read: {lines} of the journal"


def fact_groups(run: Run, difference: list[list[str]] | None) -> list[dict[str, Any]]:
    groups = []
    if difference is not None:
        rows = difference
        title = "Difference to the last good run" if rows else "No difference to the last good run"
        groups.append({"title": title, "rows": rows, "open": True})
    header = {key: value for key, value in run.header.items() if key not in ("v", "type", "config")}
    groups.append({"title": "Run facts", "rows": _pairs(header), "open": True})
    if len(run.attempts) > 1:
        groups.append({"title": "Attempts", "rows": _attempts(run.attempts), "open": False})
    config = run.header.get("config") or run.header.get("settings")
    if isinstance(config, Mapping):
        groups.append({"title": "Configuration", "rows": _pairs(config), "open": False})
    return groups


def _pairs(values: Mapping[str, Any], prefix: str = "") -> list[list[str]]:
    rows: list[list[str]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            rows += _pairs(value, f"{name}.")
        elif key == "time":
            rows.append([clipped(name), clipped(phrases.moment(value))])
        else:
            rows.append([clipped(name), clipped(str(value))])
    return rows


def _attempts(attempts: Sequence[Attempt]) -> list[list[str]]:
    rows = []
    for place, attempt in enumerate(attempts, start=1):
        words = [f"ended by {attempt.signal}" if attempt.signal else ENDINGS[attempt.ending][0]]
        if attempt.time is not None:
            words.insert(0, f"started {phrases.moment(attempt.time)}")
        if attempt.restored is not None:
            words.append(f"from the checkpoint of step {attempt.restored}")
        if attempt.error:
            words.append(attempt.error)
        rows.append([f"attempt {place}", clipped(", ".join(words))])
    return rows


def overview(story: Story) -> dict[str, str]:
    """One line of the list of runs."""
    run = story.latest
    state = verdict(run)
    table = run.steps
    losses = table.values("loss", table.counts)
    return {
        "state": state["text"],
        "weight": state["weight"],
        "steps": f"{int(table.counts.sum()):,}",
        "loss": phrases.number(float(losses[-1])) if len(losses) else "-",
        "incidents": f"{sum(len(lane.incidents) for lane in run.lanes):,}",
        "last": "-" if run.last_step is None else f"{run.last_step:,}",
    }


def quick_facts(run: Run, whole: Run) -> dict[str, Any]:
    """What changes with every row, of one optimizer and of the whole run it is part of."""
    return {"tiles": tiles(whole), "verdict": verdict(whole), "updateWords": update_words(run)}
