"""The web page of a run, or live: a JSON document of the story, and HTML around it."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepguard.records import Incident, Operand, Reading, Remedy
from stepguard.records.codec import KINDS, to_plain
from stepguard.records.incident import place_and_phase
from stepguard.report import phrases
from stepguard.report.health import concerns
from stepguard.report.probes import headline, look_tables, remarks
from stepguard.report.run_report import STATES, heading
from stepguard.report.sinks import named_numbers
from stepguard.report.story import Run, Story, StoryIncident
from stepguard.report.summary import RunSummary, flat, summarize, timeline, worst_ending

Json = dict[str, Any]
"""A part of the document."""
LONGEST_TEXT = 4000
"""Characters of one text of a journal that the page shows; the rest is counted."""


def clipped(value: Any) -> Any:
    """A text of a journal, which may have any length, cut; so are all texts in lists and dicts."""
    if isinstance(value, dict):
        return {key: clipped(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return list(map(clipped, value))
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        return f"{value[:LONGEST_TEXT]} … ({len(value) - LONGEST_TEXT:,} more characters)"
    return value


# --- The numbers of a run, packed for a web page: exact, small, and quick to read there.


FINITE, NAN, PLUS_INF, MINUS_INF, MISSING = range(5)
"""Kinds of a value, as the page's `data.js` knows them."""
DROPPED, CALIBRATION, PARTIAL = range(1, 4)
"""Kinds of an update that was not an ordinary one."""
NOT_DRAWN = ("clip_factor",)

Column = tuple[NDArray[Any], NDArray[np.uint8]]
"""Values with 0 for what is not finite, and their kinds."""


def columns(run: Run, first: int = 0) -> dict[str, Column]:
    """Everything that is drawn of the rows from `first` on, without series that none of them has.

    `state` is what became of the update; 0 is an ordinary one.
    """
    table = run.steps
    count = len(table) - first
    states = np.zeros(len(table), np.uint8)
    states[table.dropped] = DROPPED
    states[table.calibration] = CALIBRATION
    for one in run.incidents:
        if one.done == "partial" and one.row is not None and table.committed[one.row]:
            states[one.row] = PARTIAL
    plain = np.zeros(count, np.uint8)
    found: dict[str, Column] = {
        "step": (table.step[first:].astype(np.float64), plain),
        "state": (states[first:], plain),
    }
    for name, series in table.series.items():
        recent = slice(int(np.searchsorted(series.rows, first)), None)
        rows = series.rows[recent] - first
        if not len(rows) or name in NOT_DRAWN:
            continue
        values = np.zeros(count)
        kinds = np.full(count, MISSING, np.uint8)
        kinds[rows] = kinds_of(series.values[recent])
        values[rows] = np.where(np.isfinite(series.values[recent]), series.values[recent], 0.0)
        found[name] = (values, kinds)
    return found


def kinds_of(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Which values are finite, and which not in what way."""
    kinds = np.full(len(values), FINITE, np.uint8)
    kinds[np.isnan(values)] = NAN
    kinds[values == np.inf] = PLUS_INF
    kinds[values == -np.inf] = MINUS_INF
    return kinds


def packed(values: NDArray[Any], kinds: NDArray[np.uint8]) -> Json:
    """A column as the page reads it: bytes of equal significance side by side, compressed."""
    width = values.dtype.itemsize
    little = np.ascontiguousarray(values.astype(values.dtype.newbyteorder("<")))
    by_significance = little.view(np.uint8).reshape(-1, width).T.tobytes()
    column = {"type": f"{values.dtype.kind}{width}", "data": _deflated(by_significance)}
    if kinds.any():
        column["kinds"] = _deflated(kinds.tobytes())
    return column


def _deflated(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 6)).decode("ascii")


# --- The card of one incident, as plain text and numbers.


DTYPE_EXPONENTS = {
    "float64": (-1074, -1022, 1024),
    "float32": (-149, -126, 128),
    "bfloat16": (-133, -126, 128),
    "float16": (-24, -14, 16),
    "float8_e4m3fn": (-9, -6, 9),
    "float8_e5m2": (-16, -14, 16),
}
"""Powers of two: the least above 0, the least normal one, the first that is too large."""
REPLAYED = {
    True: ["the replay shows it again"],
    False: ["the replay does not show it again"],
    None: [],
}


def incident_card(told: StoryIncident) -> Json:
    """Everything the page shows of an incident, without what lies in its folder."""
    incident = told.incident
    origin = incident.origin
    card: Json = {
        "id": incident.id,
        "step": incident.step,
        "row": told.row,
        "bad": bad_values(incident.reading),
        "kept": told.kept,
        "title": phrases.verdict_title(incident.verdict.kind),
        "summary": incident.verdict.summary or incident.verdict.kind,
        "action": "",
        "weight": "bad",
        "done": "recorded; what was done is not known",
        "done_more": [],
        "where": None,
        "unplaced": "not located: the step could not be replayed, or locating is off",
        "operands": [],
        "cause": "",
        "culprits": "",
        "findings": [],
        "fixes": [],
        "facts": _facts(incident.reading, told.ranks),
        "samples": [],
        "heat": None,
        "commands": phrases.next_commands(incident),
    }
    decision = incident.decision
    if decision is not None:
        more = [phrases.effect(incident), *phrases.changes(decision), phrases.budget(decision)]
        card["action"] = decision.action
        card["done"] = phrases.done(decision)
        card["done_more"] = list(filter(None, more))
        if decision.action == "note":
            card["weight"] = "note"
    if origin is not None:
        seen = [*REPLAYED[origin.reproduced], *origin.remarks]
        # source lines behind their numbers, without the indentation that all of them have
        parted = [line.partition(" | ") for line in origin.context]
        code = dedent("\n".join(code for _, _, code in parted)).split("\n")
        lines = [f"{parts[0]}{parts[1]}{text}" for parts, text in zip(parted, code, strict=False)]
        card["where"] = {"text": place_and_phase(origin), "context": lines, "remarks": seen}
        card["operands"] = [_operand(operand, operand.called) for operand in origin.inputs]
        if origin.output is not None:
            card["operands"].append(_operand(origin.output, "output"))
        card["culprits"] = phrases.culprits_of(incident)
    for finding in incident.findings:
        card["cause"] = card["cause"] or f"{finding.code} {finding.title}"
        remedies = list(map(_remedy, finding.remedies))
        card["findings"].append({**to_plain(finding), "remedies": remedies})
    if not incident.findings:
        card["fixes"] = list(map(_remedy, phrases.first_remedies(incident)))
    return dict(clipped(card))


def _remedy(remedy: Remedy) -> dict[str, str]:
    title = remedy.title + phrases.SAFETY_NOTES.get(remedy.safety, "")
    if remedy.tried:
        title += f"; {remedy.tried}"
    return {"title": title, "snippet": dedent(remedy.snippet).strip("\n")}


def bad_values(reading: Reading) -> dict[str, int]:
    """Values of the step that are not finite, by the name of their series; the kind of each."""
    numbers = named_numbers(reading)
    kinds = kinds_of(np.array(list(numbers.values()), np.float64))
    return {name: int(kind) for name, kind in zip(numbers, kinds, strict=True) if kind != FINITE}


def _operand(operand: Operand, name: str) -> Json:
    limits = DTYPE_EXPONENTS.get(operand.dtype)
    shown = operand.span
    if shown and operand.zeros:
        shown += f", {phrases.count(operand.zeros, 'zero')}"
    drawn = {"min", "max", "value", "index", "label"}
    return {
        **{field: value for field, value in to_plain(operand).items() if field not in drawn},
        "name": name,
        "type": f"{operand.dtype} {_shape(operand.shape)}".strip(),
        "span": shown,
        "bad": operand.bad or "none",
        "at": operand.picked,
        "range": dict(zip(("least", "normal", "most"), limits, strict=True)) if limits else None,
    }


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _facts(reading: Reading, ranks: Sequence[int]) -> list[list[str]]:
    named = {"loss": reading.loss, **reading.components}
    named |= {"gradient norm": reading.grad_norm, "loss scale": reading.scale, **reading.followed}
    rows = [
        [str(name), phrases.number(value)] for name, value in named.items() if value is not None
    ]
    if reading.lr:
        rows.append(["learning rate", phrases.rates(reading.lr, reading.schedule)])
    lists = {
        "bad gradients": phrases.first_few(reading.bad_grads, 6),
        "bad state": phrases.first_few(reading.bad_state, 6),
        "bad inputs": phrases.first_few(reading.bad_inputs, 6),
        "recorded by ranks": phrases.first_few(ranks if len(ranks) > 1 else ()),
        "bad on ranks": phrases.first_few(reading.bad_ranks),
    }
    return rows + [[name, text] for name, text in lists.items() if text]


# --- What lies in an incident's folder: gradient norms by module, and the guilty samples.


MOST_CELLS = 64
"""Modules, and steps, of a heat map."""
MOST_NUMBERS = 48
LARGEST_FACTS = 1 << 26
"""Bytes of a capsule's JSON that are read."""
NOT_FINITE = (213, 94, 0)
"""The colour of pixels that are not finite."""
UNREADABLE = (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError)


def _inside(home: Path, name: str) -> Path | None:
    """The path of this name below `home`; None where it leads out of it."""
    home = home.resolve()
    try:
        path = (home / name).resolve()
    except (OSError, ValueError):
        return None
    return path if path.is_relative_to(home) else None


def gradient_heat(incident: Incident, run_folder: Path) -> Json | None:
    """Modules, steps, norms and the first that is not finite; None where nothing fits."""
    name = incident.id
    if incident.rank:
        name += f"-rank{incident.rank}"
    path = _inside(run_folder / "incidents", f"{name}/gradients.json")
    try:
        # Bytes of a table of gradients that are read
        if path is None or path.stat().st_size > 1 << 21:
            return None
        table = json.loads(path.read_bytes())
        modules = [str(module)[:200] for module in table["modules"]][:MOST_CELLS]
        steps = list(map(int, table["steps"]))[-MOST_CELLS:]
        rows = []
        for norms in table["norms"][: len(modules)]:
            rows.append(list(map(_norm, norms[-len(steps) :])))
    except UNREADABLE:
        return None
    if not modules or not steps or list(map(len, rows)) != [len(steps)] * len(modules):
        return None
    first = _first_bad(rows, modules, incident)
    return {"modules": modules, "steps": steps, "values": rows, "first": first}


def _first_bad(rows: list[list[Any]], modules: list[str], incident: Incident) -> list[int] | None:
    """The first step with a bad norm; in it the module of the origin, or else the first bad one."""
    born = ""
    if incident.origin is not None:
        born = f"{incident.origin.module}."
    for step, norms in enumerate(zip(*rows, strict=True)):
        bad = [place for place, norm in enumerate(norms) if isinstance(norm, str)]
        if bad:
            return [max(bad, key=lambda place: born.startswith(f"{modules[place]}.")), step]
    return None


def _norm(value: Any) -> float | str | None:
    if value in KINDS:
        return str(value)
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None


def samples_of(incident: Incident, run_folder: Path) -> list[Json]:
    """The tensors and texts of the samples an incident names; empty where they cannot be read."""
    folder = _inside(run_folder, incident.capsule) if incident.capsule else None
    if folder is None or not folder.is_dir() or incident.origin is None:
        return []
    micro = incident.origin.micro_batch or 0
    shown: list[Json] = []
    for sample in incident.origin.samples[:3]:
        try:
            shown += _texts(folder, micro, sample)
            shown += _tensors(folder, micro, sample)
        except UNREADABLE as fault:
            words = f"sample {sample} cannot be shown: {type(fault).__name__}"
            shown.append({"kind": "text", "caption": words, "text": ""})
    return shown


def _tensors(folder: Path, micro: int, sample: int) -> Iterator[Json]:
    from safetensors import safe_open

    with safe_open(folder / "tensors.safetensors", framework="np") as file:
        names = [name for name in file.keys() if name.startswith(f"batch/{micro}")]  # noqa: SIM118
        for name in sorted(names)[:8]:
            rows = file.get_slice(name)
            shape = rows.get_shape()
            if not shape or shape[0] <= sample:
                continue
            label = name.partition(f"batch/{micro}")[2].strip("/") or "batch"
            caption = f"{label}, sample {sample}: {rows.get_dtype()} {_shape(shape[1:])}".strip()
            try:
                values = np.asarray(rows[sample : sample + 1])[0]
            except Exception as fault:  # a dtype that numpy does not have
                yield {"kind": "text", "caption": caption, "text": f"not shown: {fault}"}
                continue
            picture = _as_picture(values)
            if picture is None:
                flat = values.reshape(-1)
                style = ".5g" if values.dtype.kind == "f" else ""
                text = ", ".join(f"{value:{style}}" for value in flat[:MOST_NUMBERS])
                if flat.size > MOST_NUMBERS:
                    text += f", … {flat.size - MOST_NUMBERS:,} more"
                yield {"kind": "numbers", "caption": caption, "text": text}
                continue
            height, width, channels = picture.shape
            size = {"width": width, "height": height, "channels": channels}
            pixels = base64.b64encode(picture.tobytes()).decode("ascii")
            yield {"kind": "image", "caption": caption, **size, "pixels": pixels}


def _as_picture(values: NDArray[Any]) -> NDArray[np.uint8] | None:
    """Height, width, 3 channels of bytes; None for a tensor that is not a picture."""
    if values.dtype.kind not in "fuib":
        return None
    layers = values.astype(np.float64)
    if layers.ndim == 2 and values.dtype.kind != "b":
        layers = layers[:, :, None]
    elif layers.ndim == 3 and layers.shape[0] in (1, 3):
        layers = np.moveaxis(layers, 0, 2)
    if layers.ndim != 3 or layers.shape[2] not in (1, 3) or min(layers.shape[:2]) < 8:
        return None
    # Pixels of a side; larger pictures are shown with every second, third, ... pixel.
    every = -(-max(layers.shape[:2]) // 512)
    layers = layers[::every, ::every]
    finite = np.isfinite(layers)
    low = layers.min(initial=np.inf, where=finite)
    span = layers.max(initial=-np.inf, where=finite) - low
    with np.errstate(invalid="ignore"):
        scaled = (layers - low) / (span if span > 0 else 1.0) * 255
    picture = np.repeat(
        np.where(finite, scaled, 0.0).astype(np.uint8), 3 // layers.shape[2], axis=2
    )
    picture[~finite.all(axis=2)] = NOT_FINITE
    return np.ascontiguousarray(picture)


def _texts(folder: Path, micro: int, sample: int) -> Iterator[Json]:
    path = folder / "capsule.json"
    if path.stat().st_size > LARGEST_FACTS:
        return
    batches = json.loads(path.read_bytes()).get("micro_batches") or []
    for name, items in _lists(batches[micro], "batch") if micro < len(batches) else ():
        item = items[sample] if sample < len(items) else None
        if isinstance(item, dict) and item.get("kind") == "str":
            caption = f"{name}, sample {sample}"
            yield {"kind": "text", "caption": caption, "text": clipped(str(item.get("value")))}


def _lists(structure: Any, name: str) -> Iterator[tuple[str, list[Any]]]:
    """Every list of the batch, with the name it has there."""
    if not isinstance(structure, dict):
        return
    for kind in ("list", "tuple"):
        items = structure.get(kind)
        if isinstance(items, list):
            yield name, items
            for place, item in enumerate(items):
                yield from _lists(item, f"{name}[{place}]")
    for kind in ("mapping", "fields", "named"):
        for key, item in structure.get(kind) or ():
            label = key.get("value") if isinstance(key, dict) else key
            yield from _lists(item, str(label))


class Folders:
    """What the folders of incidents hold for their cards, each read once."""

    def __init__(self) -> None:
        self._found: dict[Any, Json] = {}

    def of(self, incident: Incident, run_folder: Path) -> Json:
        """What the incident's folder has for its card: samples, gradients by module."""
        key = (run_folder, incident.rank, incident.id)
        if key not in self._found:
            heat = gradient_heat(incident, run_folder)
            self._found[key] = {"samples": samples_of(incident, run_folder), "heat": heat}
        return self._found[key]


# --- The words around the curves of a run's page: its state in a few numbers, ranks, settings.


WEIGHTS = {"running": "plain", "closed": "good", "signal": "note"}
"""How endings are coloured; the others are bad."""
MOST_POINTS = 60
"""Points of a small curve: of a table of looks the newest, of a loss spread over the run."""


def verdict(run: Run) -> Json:
    """State and incidents of the run: the worst of its optimizers, and the sum over them.

    `over`: no process trains any more, so the live page does not call the run live.
    """
    ending = worst_ending(run)
    text = STATES[ending]
    weight = WEIGHTS.get(ending, "bad")
    if ending == "signal":
        text = f"ended by {next(filter(None, (one.attempts[-1].signal for one in run.lanes)))}"
    acted = sum(one.done != "told" for lane in run.lanes for one in lane.incidents)
    if acted and weight != "bad":
        weight = "note"
    elif weight == "plain":
        weight = "good"
    words = "no incident"
    if acted:
        words = phrases.count(acted, "incident")
    return {"text": f"{text}, {words}", "weight": weight, "over": ending != "running"}


def tiles(summary: RunSummary) -> list[list[str]]:
    """The run in a few numbers; of several optimizers, one tile each."""
    rows = []
    for lane in summary.optimizers:
        words = [f"{lane.committed - lane.left:,} of {lane.steps:,} steps"]
        if lane.last_loss is not None:
            words.append(f"loss {phrases.number(lane.last_loss)}")
        words.append(STATES[lane.state])
        rows.append([lane.name, phrases.count(lane.incidents, "incident"), ", ".join(words)])
    if rows:
        return rows
    seen = f"of {summary.steps:,} seen"
    note = ""
    if summary.left:
        seen += f", {summary.left:,} no longer counted"
    if summary.calibrations:
        note = f"and {phrases.count(summary.calibrations, 'calibration')}"
    rows = [
        ["steps committed", f"{summary.committed - summary.left:,}", seen],
        ["updates dropped", f"{summary.skipped:,}", note],
        ["incidents", f"{summary.incidents:,}", ""],
    ]
    if summary.last_loss is not None:
        best = f"best {phrases.number(summary.best_loss)}"
        rows.append(["loss", phrases.number(summary.last_loss), best])
    if summary.seconds_per_step is not None:
        rows.append(["time a step", f"{phrases.number(summary.seconds_per_step)} s", "median"])
    if summary.went_back:
        rows.append(["went back", f"{summary.went_back:,}", "rewinds and restarts"])
    return rows


def _rank_lanes(run: Run) -> list[Json]:
    """One lane a rank: what it has seen, and where it was to blame."""
    lanes = []
    for rank in sorted({*run.by_rank, *range(min(run.world, 64))}):
        marks = []
        for told in run.incidents:
            origin = told.incident.origin
            at_fault = told.incident.reading.bad_ranks
            if origin is not None and origin.rank is not None:
                at_fault = (origin.rank,)
            if rank in told.ranks:
                words = "the origin is here" if rank in at_fault else "recorded here"
                mark = {"step": told.incident.step, "blamed": rank in at_fault, "text": words}
                marks.append(mark)
        steps = run.by_rank.get(rank, run.steps.step)
        if not len(steps):
            steps = run.steps.step
        first = last = 0
        if len(steps):
            first = int(steps.min())
            last = int(steps.max())
        text = f"{phrases.count(len(marks), 'incident')} recorded"
        lanes.append({"rank": rank, "first": first, "last": last, "marks": marks, "text": text})
    return lanes


def _checkpoints(run: Run) -> list[Json]:
    """Checkpoints that were written, refused, or gone back to."""
    shown = []
    for note in run.notes:
        state = "refused"
        step = note.fields.get("refused")
        if note.type == "checkpoint":
            # Kept: complete and finite, but not called good.
            state = "good" if note.fields.get("good", True) else "kept"
            step = note.step
        elif note.type == "rewind":
            state = "rewound to"
            step = note.fields.get("to")
        elif note.kind == "restored":
            state = "restored"
            step = note.step
        if isinstance(step, int):
            shown.append({"step": step, "state": state, "text": note.text or state})
    return shown


def _looks(run: Run) -> Json | None:
    """Tables of the newest health probe with their history."""
    if not run.looks:
        return None
    # The worst rows of each table
    tables = look_tables(run.looks[-MOST_POINTS:], 15)
    return {"line": headline(run.looks), "tables": tables, "remarks": remarks(run.looks[-1])}


def _fact_groups(run: Run) -> list[Json]:
    facts = list(map(list, heading(summarize(run))))
    groups = [{"title": "Run facts", "rows": facts, "open": True}]
    if len(run.attempts) > 1:
        rows = []
        for place, attempt in enumerate(run.attempts, start=1):
            words = [STATES[attempt.ending]]
            if attempt.signal:
                words = [f"ended by {attempt.signal}"]
            if attempt.time is not None:
                words.insert(0, f"started {phrases.moment(attempt.time)}")
            if attempt.restored is not None:
                words.append(f"from the checkpoint of step {attempt.restored}")
            if attempt.error:
                words.append(attempt.error)
            rows.append([f"attempt {place}", ", ".join(words)])
        groups.append({"title": "Attempts", "rows": rows, "open": False})
    config = run.header.get("config") or run.header.get("settings")
    if config:
        groups.append(
            {
                "title": "Configuration",
                "rows": [[name, str(value)] for name, value in flat(config)],
                "open": False,
            }
        )
    return groups


def overview(story: Story) -> Json:
    """One line of the list of runs."""
    run = story.latest
    summary = summarize(run)
    # step and loss of a few steps of the line that was kept, for a small curve
    series = run.steps.column("loss").where(run.steps.counts)
    rows = series.rows[series.finite]
    chosen = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), MOST_POINTS)).astype(int))
    steps = run.steps.step[rows[chosen]]
    losses = series.values[series.finite][chosen]
    return {
        "state": STATES[worst_ending(run)],
        "weight": verdict(run)["weight"],
        "steps": f"{summary.lanes[0].committed - summary.lanes[0].left:,}",
        "loss": phrases.number(summary.last_loss),
        "incidents": f"{summary.incidents:,}",
        "last": "-" if run.last_step is None else f"{run.last_step:,}",
        "began": run.began,
        "curve": [[float(step), float(loss)] for step, loss in zip(steps, losses, strict=True)],
    }


# --- The document.


FORMAT = 1
LEFT_WORDS = {
    "rewind": "rewound",
    "restart": "restarted",
    "restore": "restored",
    "repeat": "went back",
}


def story_document(story: Story, name: str, folders: Folders | None = None) -> Json:
    """The document of every run in a folder; the page shows the newest first."""
    runs = []
    for run in story.runs:
        for place, lane in enumerate(run.lanes):
            shown = run_document(lane, name, folders, run)
            label = f"{run.number} of {len(story.runs)} in this folder: {shown['line']}"
            runs.append({**shown, "label": label, "group": run.number, "lane": place})
    return {"format": FORMAT, "runs": runs, "live": None}


def run_document(run: Run, name: str, folders: Folders | None, whole: Run) -> Json:
    """One run, which may be one optimizer's lane of `whole`: facts that change rarely, and rows."""
    drawn = {column: packed(*values) for column, values in columns(run).items()}
    return {**run_facts(run, name, folders, whole), "columns": drawn, "parts": parts(run)}


def quick_facts(run: Run, whole: Run) -> Json:
    """What changes with every row, of one optimizer and of the whole run it is part of."""
    table = run.steps
    words = (
        f"{int(table.committed.sum()):,} made, {int(table.dropped.sum()):,} dropped, "
        f"{phrases.count(int(table.calibration.sum()), 'loss-scale calibration')}"
    )
    shown = clipped(tiles(summarize(whole)))
    return {"tiles": shown, "verdict": verdict(whole), "updateWords": words}


def run_facts(run: Run, name: str, folders: Folders | None, whole: Run) -> Json:
    """Everything but the rows: the live page takes it again when something else than rows came.

    Without `folders` the folders of incidents are not read.
    """
    cards = []
    for place, told in enumerate(run.incidents):
        card = incident_card(told)
        # Incidents with a whole card; of a run that fails all the time, later ones have a short one
        if folders is not None and place < 400:
            card |= folders.of(told.incident, run.path.parent)
        cards.append(card)
    weights = {"unhealthy": "bad", "attention": "note"}
    unread = ""
    if run.torn:
        lines = phrases.count(run.torn, "line")
        unread = f"not shown, because they cannot be read: {lines} of the journal"
    chain = []
    for event in timeline(run)[:1000]:
        # After a rewind the last step may be the lower one.
        first, last = sorted(
            (event.step, event.step if event.last_step is None else event.last_step)
        )
        link = {"steps": event.steps, "first": first, "last": last}
        chain.append({**link, "text": event.text, "weight": event.weight})
    line = []
    if run.began is not None:
        line.append(f"began {phrases.moment(run.began)}")
    if len(run.attempts) > 1:
        line.append(phrases.count(len(run.attempts), "attempt"))
    for package in ("stepguard", "torch"):
        if run.header.get(package):
            line.append(f"{package} {run.header[package]}")
    if run.world > 1:
        line.append(f"{run.world} ranks")
    facts = {
        "name": run.name if whole.further else name,
        "title": name,
        "number": run.number,
        "line": ", ".join([*line, str(run.path)]),
        "checkpoints": _checkpoints(run),
        "ranks": _rank_lanes(run),
        "chain": chain,
        "concerns": [[weights[one.weight], one.text] for one in concerns(run)],
        "looks": _looks(run),
        "groups": _fact_groups(run),
        "unread": unread,
        "version": version(run, len(whole.lanes)),
    }
    return {**clipped(facts), **quick_facts(run, whole), "incidents": cards}


def version(run: Run, lanes: int = 1) -> str:
    """Changes whenever something else than an ordinary row was written, or the process has gone."""
    counted = (len(run.incidents), len(run.notes), len(run.attempts), len(run.branches), run.torn)
    seen = (*counted, len(run.looks), len(run.steps.series), int(run.ended), lanes)
    return "-".join(map(str, seen))


def parts(run: Run) -> list[Json]:
    """Stretches of rows that were kept, or left, together."""
    table = run.steps
    changes = (np.diff(table.branch) != 0) | (np.diff(table.kept.astype(np.int8)) != 0)
    firsts = [0, *(np.flatnonzero(changes) + 1).tolist()] if len(table) else []
    found = []
    for first, last in zip(firsts, [*firsts[1:], len(table)], strict=False):
        steps = f"steps {table.step[first]} to {table.step[last - 1]}"
        attempt = f"attempt {int(table.attempt[first]) + 1}"
        part: Json = {"first": first, "last": last, "left": None, "joint": None}
        part["text"] = f"{attempt}, {steps}"
        found.append(part)
        if table.kept[first]:
            continue
        # the first going back after this row that took its step away
        later = (branch.left for branch in run.branches[int(table.branch[first]) :])
        left = next(left for left in later if left is not None and left.to <= table.step[first])
        words = f"{LEFT_WORDS[left.by]} to step {left.to}"
        part["left"] = {"kind": left.by, "text": f"{steps}, left: {words}"}
        part["text"] += f", left: {words}"
        if first and table.branch[first - 1] == table.branch[first]:
            part["joint"] = first - 1
    return found


def run_name(path: Path) -> str:
    """The folder of a run, by which people know it."""
    folder = path.resolve() if path.is_dir() else path.resolve().parent
    return folder.name or str(folder)


# --- The page: one HTML file with its style, its script and its data, and nothing else.


SCRIPTS = (
    "uPlot.min.js",
    "drawing.js",
    "data.js",
    "view.js",
    "charts.js",
    "lanes.js",
    "figures.js",
    "cards.js",
    "live.js",
    "looks.js",
    "main.js",
)
"""In the order in which they need each other."""
STYLES = ("uPlot.min.css", "page.css")
_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


@cache
def asset(name: str) -> str:
    """A file that is part of the page."""
    return (files("stepguard.report") / "page" / name).read_text(encoding="utf-8")


def policy(script: str, style: str, *, connects: bool = False) -> str:
    """What the browser may do with this page: run this script, use this style, nothing else."""
    digests = []
    for text in (script, style):
        digest = hashlib.sha256(text.encode("utf-8")).digest()
        digests.append(f"'sha256-{base64.b64encode(digest).decode('ascii')}'")
    allowed = (
        f"default-src 'none'; script-src {digests[0]}; style-src {digests[1]}; "
        f"base-uri 'none'; form-action 'none'"
    )
    return f"{allowed}; connect-src 'self'" if connects else allowed


def render_page(document: Json, *, home: str = "") -> str:
    """The whole page. `home` is the address of the list of runs, on a server that has several."""
    library, *scripts = map(asset, SCRIPTS)
    # Strict, and without names of our own in the window.
    script = "\n".join([library, "(() => {", "'use strict';", *scripts, "})();", ""])
    style = "\n".join(map(asset, STYLES))
    pieces = {
        "{policy}": policy(script, style, connects=document.get("live") is not None),
        "{style}": style,
        "{home}": f'<a class="plain" href="{home}">all runs</a>' if home else "",
        "{data}": embedded(document),
        "{script}": script,
    }
    rest = asset("page.html")
    text = []
    # In the template's order: what is put in is never searched for names to replace.
    for name, piece in pieces.items():
        before, _, rest = rest.partition(name)
        text += [before, piece]
    return "".join([*text, rest])


def embedded(document: Json) -> str:
    """JSON that ends no script element and holds no character that HTML gives a meaning."""
    text = json.dumps(document, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.translate(_ESCAPES)
