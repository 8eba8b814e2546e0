"""Show the guilty samples of an incident from its capsule: as a picture, as text or as numbers."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepguard.records import Incident

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
