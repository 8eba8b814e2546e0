"""What a run's page takes from the files beside the journal: samples, gradients, other runs."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepguard._errors import JournalError
from stepguard.records import Incident
from stepguard.records.codec import KINDS
from stepguard.report.page import Extras
from stepguard.report.story import Run, Story, read_story

# --- The heat map of an incident's card: gradient norms by module in the steps before it.


FILE = "gradients.json"
LARGEST = 1 << 21
"""Bytes of the file that are read."""
MOST_MODULES = 64
MOST_STEPS = 64

Heat = dict[str, Any]


def gradient_heat(incident: Incident, run_folder: Path) -> Heat | None:
    """Modules, steps, norms and the first that is not finite; None where nothing fits."""
    path = _file(incident, run_folder)
    if path is None:
        return None
    try:
        table = json.loads(path.read_bytes())
        return _checked(table, incident)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _file(incident: Incident, run_folder: Path) -> Path | None:
    """The file in the incident's folder; None where the id leads elsewhere."""
    name = incident.id if not incident.rank else f"{incident.id}-rank{incident.rank}"
    home = (run_folder / "incidents").resolve()
    try:
        path = (home / name / FILE).resolve()
        fits = path.is_relative_to(home) and path.is_file() and path.stat().st_size <= LARGEST
    except (OSError, ValueError):
        return None
    return path if fits else None


def _checked(table: Any, incident: Incident) -> Heat | None:
    modules = [str(name)[:200] for name in table["modules"]][:MOST_MODULES]
    steps = [int(step) for step in table["steps"]][-MOST_STEPS:]
    rows = []
    for row in table["norms"][: len(modules)]:
        rows.append([_value(value) for value in row[-len(steps) :]])
    if not modules or not steps or any(len(row) != len(steps) for row in rows):
        return None
    if len(rows) != len(modules):
        return None
    return {
        "modules": modules,
        "steps": steps,
        "values": rows,
        "first": _first(rows, modules, incident),
    }


def _value(value: Any) -> float | str | None:
    if isinstance(value, str):
        return value if value in KINDS else None
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None


def _first(rows: list[list[Any]], modules: list[str], incident: Incident) -> list[int] | None:
    """The first step with a bad norm; in it the module of the origin, or else the first bad one."""
    for step in range(len(rows[0])):
        bad = [place for place, row in enumerate(rows) if isinstance(row[step], str)]
        if bad:
            return [_origin_among(bad, modules, incident), step]
    return None


def _origin_among(bad: list[int], modules: list[str], incident: Incident) -> int:
    born = incident.origin.module if incident.origin is not None else None
    for place in bad:
        if born and (born == modules[place] or born.startswith(f"{modules[place]}.")):
            return place
    return bad[0]


# --- Show the guilty samples of an incident from its capsule: as a picture, as text or as
# numbers.


MOST_SAMPLES = 3
MOST_TENSORS = 8
MOST_NUMBERS = 48
MOST_SIDE = 512
"""Pixels of a side; larger pictures are shown with every second, third, ... pixel."""
LEAST_SIDE = 8
LARGEST_FACTS = 1 << 26
"""Bytes of a capsule's JSON that are read."""
LONGEST_TEXT = 2000
NOT_FINITE = (213, 94, 0)
"""The colour of pixels that are not finite."""

Shown = dict[str, Any]


def samples_of(incident: Incident, run_folder: Path) -> list[Shown]:
    """The tensors and texts of the samples an incident names; empty where they cannot be read."""
    folder = capsule_folder(incident, run_folder)
    if folder is None or incident.origin is None or not incident.origin.samples:
        return []
    micro = incident.origin.micro_batch or 0
    shown: list[Shown] = []
    for sample in incident.origin.samples[:MOST_SAMPLES]:
        try:
            shown += _texts(folder, micro, sample)
            shown += _tensors(folder, micro, sample)
        except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as fault:
            words = f"sample {sample} cannot be shown: {type(fault).__name__}"
            shown.append({"kind": "text", "caption": words, "text": ""})
    return shown


def capsule_folder(incident: Incident, run_folder: Path) -> Path | None:
    """The incident's capsule; None where there is none, or where its path leads out of the run."""
    if not incident.capsule:
        return None
    home = run_folder.resolve()
    try:
        folder = (home / incident.capsule).resolve()
    except (OSError, ValueError):
        return None
    if not folder.is_relative_to(home) or not folder.is_dir():
        return None
    return folder


# --- tensors


def _tensors(folder: Path, micro: int, sample: int) -> Iterator[Shown]:
    from safetensors import safe_open

    with safe_open(folder / "tensors.safetensors", framework="np") as file:
        names = [name for name in file.keys() if name.startswith(f"batch/{micro}")]  # noqa: SIM118
        for name in sorted(names)[:MOST_TENSORS]:
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
            yield _drawn(values, caption)


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _drawn(values: NDArray[Any], caption: str) -> Shown:
    picture = _as_picture(values)
    if picture is None:
        return {"kind": "numbers", "caption": caption, "text": _numbers(values)}
    height, width, channels = picture.shape
    return {
        "kind": "image",
        "caption": caption,
        "width": width,
        "height": height,
        "channels": channels,
        "pixels": base64.b64encode(picture.tobytes()).decode("ascii"),
    }


def _as_picture(values: NDArray[Any]) -> NDArray[np.uint8] | None:
    """Height, width, 3 channels of bytes; None for what is no picture."""
    if values.dtype.kind not in "fuib":
        return None
    layers = _layers(values)
    if layers is None or min(layers.shape[:2]) < LEAST_SIDE:
        return None
    every = -(-max(layers.shape[:2]) // MOST_SIDE)
    layers = layers[::every, ::every]
    finite = np.isfinite(layers)
    low = layers[finite].min() if finite.any() else 0.0
    high = layers[finite].max() if finite.any() else 0.0
    span = (high - low) or 1.0
    scaled = np.where(finite, (layers - low) / span * 255, 0.0).astype(np.uint8)
    picture = np.repeat(scaled, 3, axis=2) if scaled.shape[2] == 1 else scaled
    picture[~finite.all(axis=2)] = NOT_FINITE
    return np.ascontiguousarray(picture)


def _layers(values: NDArray[Any]) -> NDArray[np.float64] | None:
    """Height, width, channels of 1 or 3, however the tensor has them."""
    wide = values.astype(np.float64)
    if wide.ndim == 2 and values.dtype.kind != "b":
        return wide[:, :, None]
    if wide.ndim != 3:
        return None
    if wide.shape[0] in (1, 3):
        return np.moveaxis(wide, 0, 2)
    return wide if wide.shape[2] in (1, 3) else None


def _numbers(values: NDArray[Any]) -> str:
    flat = values.reshape(-1)
    words = [
        f"{value:.5g}" if values.dtype.kind == "f" else str(value) for value in flat[:MOST_NUMBERS]
    ]
    text = ", ".join(words)
    if flat.size > MOST_NUMBERS:
        text += f", … {flat.size - MOST_NUMBERS:,} more"
    return text


# --- texts


def _texts(folder: Path, micro: int, sample: int) -> Iterator[Shown]:
    path = folder / "capsule.json"
    if path.stat().st_size > LARGEST_FACTS:
        return
    batches = json.loads(path.read_bytes()).get("micro_batches") or []
    if micro >= len(batches):
        return
    for name, items in _lists(batches[micro], "batch"):
        item = items[sample] if sample < len(items) else None
        if isinstance(item, dict) and item.get("kind") == "str":
            text = str(item.get("value"))
            if len(text) > LONGEST_TEXT:
                text = f"{text[:LONGEST_TEXT]} … ({len(text) - LONGEST_TEXT:,} more characters)"
            yield {"kind": "text", "caption": f"{name}, sample {sample}", "text": text}


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
        for pair in structure.get(kind) or ():
            key, item = pair
            label = key.get("value") if isinstance(key, dict) else key
            yield from _lists(item, str(label))


# --- What is different from the last run that went well: settings, versions, optimizer.


ALWAYS_DIFFERENT = (
    *("v", "type", "time", "run", "attempt", "rank", "config.run_dir"),
    *("process.pid", "process.started", "process.place"),
)
NOT_THERE = "-"


def last_good(run: Run, others: Iterable[Run]) -> Run | None:
    """The newest of the others that was closed without an incident, and began before this one."""
    good = []
    for other in others:
        if other is not run and _went_well(other) and (other.began or 0) <= (run.began or 0):
            good.append(other)
    return max(good, key=lambda other: other.began or 0, default=None)


def _went_well(run: Run) -> bool:
    if not run.attempts or run.attempts[-1].ending != "closed":
        return False
    return not run.incidents and bool(len(run.steps))


def differences(good: Run, run: Run) -> list[list[str]]:
    """Name, value in the good run, value now; only what differs. The first row names the runs."""
    before = dict(_flat(good.header))
    now = dict(_flat(run.header))
    rows = []
    for name in {**before, **now}:
        first = before.get(name, NOT_THERE)
        second = now.get(name, NOT_THERE)
        if name not in ALWAYS_DIFFERENT and first != second:
            rows.append([name, first, second])
    if not rows:
        return []
    return [["", _folder(good), "this run"], *rows]


def _folder(run: Run) -> str:
    """The folder of a run, and which of several in it."""
    return f"{run.path.parent.name} (run {run.number})"


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


# --- What a run's page takes from the files beside the journal: samples, gradients, other runs.


MOST_NEIGHBOURS = 12
"""Runs in the folders beside this one that are looked at for the last good one."""
LARGEST_NEIGHBOUR = 1 << 25
"""Bytes of a journal that is read only to find the last good run."""

Known = Callable[[Incident, dict[str, Any], Path], bool]
"""Fills in a card from what was read before; False where it was not."""


def page_extras(story: Story, folder: Path, known: Known | None = None) -> Extras:
    """Samples and gradients of the incidents, and the difference to the last good run."""

    def enrich(incident: Incident, card: dict[str, Any], own: Path) -> None:
        if known is None or not known(incident, card, own):
            card["samples"] = samples_of(incident, own)
            card["heat"] = gradient_heat(incident, own)

    good = last_good(story.latest, [*story.runs, *_neighbours(folder)])
    rows = None if good is None else differences(good, story.latest)
    return Extras(enrich=enrich, difference=rows)


def _neighbours(folder: Path) -> Iterator[Run]:
    """Runs in the folders beside this one, the newest first."""
    for path in _journals_beside(folder.resolve())[:MOST_NEIGHBOURS]:
        try:
            yield from read_story(path.parent).runs
        except (JournalError, OSError, ValueError):
            continue


def _journals_beside(folder: Path) -> list[Path]:
    dated = []
    for path in folder.parent.glob("*/journal.jsonl"):
        try:
            facts = path.stat()
        except OSError:
            continue
        if path.parent != folder and facts.st_size <= LARGEST_NEIGHBOUR:
            dated.append((facts.st_mtime, path))
    return [path for _, path in sorted(dated, reverse=True)]


# --- Write a run's page: one HTML file with its style, its script and its data, and nothing else.


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


@cache
def _joined(names: tuple[str, ...]) -> str:
    return "\n".join(asset(name) for name in names)


def script_text() -> str:
    """All scripts in one, strict and without names of their own in the window."""
    own = _joined(SCRIPTS[1:])
    return f"{asset(SCRIPTS[0])}\n(() => {{\n'use strict';\n{own}\n}})();\n"


def policy(script: str, style: str, *, connects: bool = False) -> str:
    """What the browser may do with this page: run this script, use this style, nothing else."""
    allowed = [
        "default-src 'none'",
        f"script-src '{_digest(script)}'",
        f"style-src '{_digest(style)}'",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    if connects:
        allowed.append("connect-src 'self'")
    return "; ".join(allowed)


def _digest(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
    return f"sha256-{digest}"


def render_page(document: dict[str, Any], *, home: str = "") -> str:
    """The whole page. `home` is the address of the list of runs, on a server that has several."""
    script = script_text()
    style = _joined(STYLES)
    link = f'<a class="plain" href="{home}">all runs</a>' if home else ""
    pieces = {
        "{policy}": policy(script, style, connects=document.get("live") is not None),
        "{style}": style,
        "{home}": link,
        "{data}": embedded(document),
        "{script}": script,
    }
    rest = asset("page.html")
    text = []
    # In the template's order: what is put in is never looked at again for names to replace.
    for name, piece in pieces.items():
        before, _, rest = rest.partition(name)
        text += [before, piece]
    return "".join([*text, rest])


def embedded(document: dict[str, Any]) -> str:
    """JSON that ends no script element and holds no character that HTML gives a meaning."""
    text = json.dumps(document, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.translate(_ESCAPES)
