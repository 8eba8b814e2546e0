"""A story as one JSON document: what the web page of a run, of two runs, or live, shows."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepguard.diagnose import engine
from stepguard.records import Incident, Operand, Origin, Reading
from stepguard.records.incident import place_and_phase
from stepguard.report import phrases
from stepguard.report.health import concerns
from stepguard.report.panel import SAFETY_NOTES, next_commands
from stepguard.report.phrases import done, effect
from stepguard.report.probes import LookRow, LookTable, headline, look_tables, remarks
from stepguard.report.run_report import STATES
from stepguard.report.story import Attempt, Left, Run, Series, StepTable, Story, StoryIncident
from stepguard.report.summary import timeline, worst_ending

# --- The numbers of a run, packed for a web page: exact, small, and quick to read there.


FINITE, NAN, PLUS_INF, MINUS_INF, MISSING = range(5)
"""Kinds of a value, as the page's `data.js` knows them."""
ROUNDED = ("seconds", "grad_norm_clipped")
"""Series that are kept in single precision: a clock's noise, and a product."""
DROPPED, CALIBRATION, PARTIAL = range(1, 4)
"""Kinds of an update that was not an ordinary one."""

Column = dict[str, Any]


def packed(values: NDArray[Any], kinds: NDArray[np.uint8] | None = None) -> Column:
    """A column as the page reads it."""
    column: Column = {"type": f"{values.dtype.kind}{values.dtype.itemsize}"}
    column["data"] = _deflated(_by_significance(values))
    if kinds is not None and kinds.any():
        column["kinds"] = _deflated(kinds.tobytes())
    return column


def _deflated(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 6)).decode("ascii")


def _by_significance(values: NDArray[Any]) -> bytes:
    width = values.dtype.itemsize
    little = np.ascontiguousarray(values.astype(values.dtype.newbyteorder("<")))
    return little.view(np.uint8).reshape(-1, width).T.tobytes()


def dense(series: Series, first: int, end: int) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    """The values of rows `first` to `end`, and their kinds; what is not finite is 0 there."""
    values = np.zeros(end - first)
    kinds = np.full(end - first, MISSING, np.uint8)
    low, high = np.searchsorted(series.rows, [first, end])
    rows = series.rows[low:high] - first
    found = series.values[low:high]
    kinds[rows] = kinds_of(found)
    values[rows] = np.where(np.isfinite(found), found, 0.0)
    return values, kinds


def kinds_of(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Which values are finite, and which not in what way."""
    kinds = np.full(len(values), FINITE, np.uint8)
    kinds[np.isnan(values)] = NAN
    kinds[values == np.inf] = PLUS_INF
    kinds[values == -np.inf] = MINUS_INF
    return kinds


def narrowed(values: NDArray[np.float64], name: str) -> NDArray[Any]:
    """In single precision where that loses nothing that was measured."""
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    exact = np.array_equal(narrow.astype(np.float64), values)
    if exact or (name in ROUNDED and np.isfinite(narrow).all()):
        return narrow
    return values


def update_states(table: StepTable, partial: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """What became of the update of each row; 0 is an ordinary one."""
    states = np.zeros(len(table), np.uint8)
    states[table.dropped] = DROPPED
    states[table.calibration] = CALIBRATION
    states[partial & table.committed] = PARTIAL
    return states


def packed_columns(table: StepTable, names: list[str], states: NDArray[np.uint8]) -> dict[str, Any]:
    """All columns of a run, by name."""
    columns = {"step": packed(table.step.astype(np.float64)), "state": packed(states)}
    for name in names:
        values, kinds = dense(table.column(name), 0, len(table))
        columns[name] = packed(narrowed(values, name), kinds)
    return columns


def plain_columns(
    table: StepTable, names: list[str], states: NDArray[np.uint8], first: int
) -> dict[str, Any]:
    """The rows from `first` on as plain lists, for the few that come at a time."""
    columns: dict[str, Any] = {
        "step": {"values": table.step[first:].tolist()},
        "state": {"values": states[first:].tolist()},
    }
    for name in names:
        values, kinds = dense(table.column(name), first, len(table))
        if (kinds == MISSING).all():
            continue
        columns[name] = {"values": values.tolist()}
        if kinds.any():
            columns[name]["kinds"] = kinds.tolist()
    return columns


# --- The card of one incident on a web page, as plain text and numbers.


DTYPE_EXPONENTS = {
    "float64": (-1074, -1022, 1024),
    "float32": (-149, -126, 128),
    "bfloat16": (-133, -126, 128),
    "float16": (-24, -14, 16),
    "float8_e4m3fn": (-9, -6, 9),
    "float8_e5m2": (-16, -14, 16),
}
"""Powers of two: the least above 0, the least normal one, the first that is too large."""
UNPLACED = "not located: the step could not be run again, or locating is off"
LONGEST_TEXT = 4000
"""Characters of one text of a journal that a card shows; the rest is counted."""


def incident_card(told: StoryIncident) -> dict[str, Any]:
    """Everything the page shows of an incident, without what lies in its folder."""
    incident = told.incident
    card = {
        "id": incident.id,
        "step": incident.step,
        "row": told.row,
        "bad": bad_values(incident.reading),
        "kept": told.kept,
        "title": phrases.verdict_title(incident.verdict.kind),
        "summary": clipped(incident.verdict.summary or incident.verdict.kind),
        "action": incident.decision.action if incident.decision else "",
        "weight": _weight(incident),
        "done": _done(incident),
        "done_more": [],
        "where": None,
        "unplaced": UNPLACED,
        "operands": [],
        "cause": "",
        "culprits": "",
        "findings": [_finding(finding) for finding in incident.findings],
        "facts": _facts(incident.reading, told.ranks),
        "samples": [],
        "heat": None,
        "commands": next_commands(incident),
    }
    if incident.decision is not None:
        card["done_more"] = _done_more(incident)
    if incident.findings:
        card["cause"] = f"{incident.findings[0].code} {clipped(incident.findings[0].title)}"
    if incident.origin is not None:
        card["where"] = _where(incident.origin)
        card["operands"] = _operands(incident.origin)
        card["culprits"] = clipped(phrases.culprits(incident.origin))
    return card


def bad_values(reading: Reading) -> dict[str, int]:
    """Values of the step that are not finite, by the name of their series; the kind of each."""
    named: dict[str, float | None] = {"loss": reading.loss, "grad_norm": reading.grad_norm}
    named |= {f"loss/{name}": value for name, value in reading.components.items()}
    named |= {f"followed/{name}": value for name, value in reading.followed.items()}
    found = {}
    for name, value in named.items():
        if value is not None and not math.isfinite(value):
            found[name] = int(kinds_of(np.array([value]))[0])
    return found


def clipped(text: str) -> str:
    """A text of a journal, which may have any length."""
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[:LONGEST_TEXT]} … ({len(text) - LONGEST_TEXT:,} more characters)"


def _weight(incident: Incident) -> str:
    if incident.decision is not None and incident.decision.action == "note":
        return "note"
    return "bad"


def _done(incident: Incident) -> str:
    if incident.decision is None:
        return "recorded; what was done is not known"
    if incident.decision.action == "rewind" and incident.decision.rewound_to is not None:
        return f"rewound to step {incident.decision.rewound_to}"
    return clipped(done(incident.decision))


def _done_more(incident: Incident) -> list[str]:
    decision = incident.decision
    assert decision is not None
    lines = [effect(incident), decision.reason]
    if decision.lr_factor is not None:
        lines.append(f"every learning rate times {decision.lr_factor:g}")
    if decision.new_scale is not None:
        lines.append(f"loss scale is now {decision.new_scale:g}")
    lines.append(f"{decision.consecutive} in a row, {decision.total} in this run")
    return [clipped(line) for line in lines if line]


def _where(origin: Origin) -> dict[str, Any]:
    remarks = list(origin.remarks)
    if origin.reproduced is True:
        remarks.insert(0, "the replay shows it again")
    elif origin.reproduced is False:
        remarks.insert(0, "the replay does not show it again")
    return {
        "text": clipped(place_and_phase(origin)),
        "context": [clipped(line) for line in origin.context],
        "remarks": [clipped(remark) for remark in remarks],
    }


def _operands(origin: Origin) -> list[dict[str, Any]]:
    shown = [_operand(operand, operand.called) for operand in origin.inputs]
    if origin.output is not None:
        shown.append(_operand(origin.output, "output"))
    return shown


def _operand(operand: Operand, name: str) -> dict[str, Any]:
    limits = DTYPE_EXPONENTS.get(operand.dtype)
    return {
        "name": clipped(name),
        "dtype": operand.dtype,
        "type": f"{operand.dtype} {_shape(operand.shape)}".strip(),
        "span": _span(operand),
        "bad": _bad(operand),
        "at": _at(operand),
        "zeros": operand.zeros,
        "nan": operand.nan,
        "posinf": operand.posinf,
        "neginf": operand.neginf,
        "exponents": [list(pair) for pair in operand.exponents],
        "range": dict(zip(("least", "normal", "most"), limits, strict=True)) if limits else None,
    }


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _span(operand: Operand) -> str:
    if operand.min is None or operand.max is None:
        return ""
    text = f"{phrases.number(operand.min)} to {phrases.number(operand.max)}"
    if operand.zeros:
        text += f", {phrases.count(operand.zeros, 'zero')}"
    return text


def _bad(operand: Operand) -> str:
    counted = {"NaN": operand.nan, "+Inf": operand.posinf, "-Inf": operand.neginf}
    bad = [f"{amount:,} {kind}" for kind, amount in counted.items() if amount]
    if not bad:
        return "none"
    return f"{', '.join(bad)} of {math.prod(operand.shape):,}"


def _at(operand: Operand) -> str:
    if operand.value is None:
        return ""
    value = phrases.number(operand.value)
    if operand.index is None:
        return value
    return f"{value} at [{', '.join(map(str, operand.index))}]"


def _finding(finding: Any) -> dict[str, Any]:
    remedies = []
    for remedy in finding.remedies:
        note = SAFETY_NOTES.get(remedy.safety, "")
        title = clipped(remedy.title) + (f" ({note})" if note else "")
        title += f"; {clipped(remedy.tried)}" if remedy.tried else ""
        remedies.append({"title": title, "snippet": clipped(remedy.snippet)})
    return {
        "code": clipped(finding.code),
        "title": clipped(finding.title),
        "certainty": finding.certainty,
        "evidence": [clipped(sentence) for sentence in finding.evidence],
        "remedies": remedies,
    }


def _facts(reading: Reading, ranks: Sequence[int]) -> list[list[str]]:
    named: dict[str, float | None] = {"loss": reading.loss, **reading.components}
    named |= {"gradient norm": reading.grad_norm, "loss scale": reading.scale}
    named |= reading.followed
    rows = []
    for name, value in named.items():
        if value is not None:
            rows.append([clipped(str(name)), phrases.number(value)])
    if reading.lr:
        rows.append(["learning rate", phrases.rates(reading.lr, clipped(reading.schedule))])
    if reading.bad_grads:
        rows.append(["bad gradients", clipped(phrases.first_few(reading.bad_grads, 6))])
    if reading.bad_state:
        rows.append(["bad state", clipped(phrases.first_few(reading.bad_state, 6))])
    if reading.bad_inputs:
        rows.append(["bad inputs", clipped(phrases.first_few(reading.bad_inputs, 6))])
    if len(ranks) > 1:
        rows.append(["recorded by ranks", phrases.first_few(ranks)])
    if reading.bad_ranks:
        rows.append(["bad on ranks", phrases.first_few(reading.bad_ranks)])
    return rows


# --- The words around the curves of a run's page: its state in a few numbers, ranks, settings.


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


# --- The section of a run's page that shows its deep looks, silent failures and forecasts.


MOST_LISTED = 15
"""Rows of each table, the worst ones."""
MOST_POINTS = 60
"""Looks that the history of a row draws, the newest."""


def looks_section(run: Run) -> dict[str, Any] | None:
    """Tables of the newest look with their history, and what was told; None where there is none."""
    findings = _findings(run)
    if not run.looks:
        return {"line": "", "findings": findings, "tables": [], "remarks": []} if findings else None
    return {
        "line": headline(run.looks),
        "findings": findings,
        "tables": [_table(one) for one in look_tables(run.looks, MOST_LISTED)],
        "remarks": [clipped(sentence) for sentence in remarks(run.looks[-1])],
    }


def _findings(run: Run) -> list[list[str]]:
    """Step, code and sentence of everything that was told about a healthy step."""
    found = []
    for note in run.notes:
        code = str(note.fields.get("code", ""))
        if code.startswith((*engine.SERIES, engine.FORECAST_SERIES)):
            words = clipped(str(note.fields.get("summary", "")))
            found.append([str(note.fields.get("step", "")), code, words])
    return found


def _table(table: LookTable) -> dict[str, Any]:
    return {
        "title": table.title,
        "headings": list(table.headings),
        "history": table.history,
        "rows": [_row(row) for row in table.rows],
    }


def _row(row: LookRow) -> dict[str, Any]:
    return {
        "cells": [clipped(cell) for cell in row.cells],
        "warns": list(row.warns),
        "history": [list(point) for point in row.history[-MOST_POINTS:]],
    }


# --- A story as one JSON document: what the web page of a run, of two runs, or live, shows.


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
