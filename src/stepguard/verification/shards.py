"""Folders of the Hugging Face kind: weights in one or several shards with an index, and the
trainer's state beside.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepguard.verification import limits
from stepguard.verification.bounded_file import opened
from stepguard.verification.damage import Damaged, Notes, listed
from stepguard.verification.file_layout import Layout
from stepguard.verification.safetensors_format import parse_json

NUMBERED = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.(safetensors|bin)$")
JSON_FILES = ("config.json", "adapter_config.json", "generation_config.json", "trainer_state.json")
LOGGED = ("loss", "grad_norm", "eval_loss")


def check_sides(folder: Path, layouts: Mapping[str, Layout], notes: Notes) -> int | None:
    """Indices, shard numbers and JSON files of the folder; returns the step the trainer says it was
    at.
    """
    indices = sorted(folder.glob("*.index.json"))
    for index in indices:
        _check_index(index, layouts)(notes)
    if not indices:
        _check_numbers(layouts, notes)
    step = None
    for name in JSON_FILES:
        if (folder / name).exists():
            data = read_json(folder / name, notes)
            step = _trainer_state(data, notes) if name == "trainer_state.json" else step
    return step


def read_json(path: Path, notes: Notes) -> Any:
    """The content, or None and a note."""
    try:
        with opened(path) as window:
            if window.size > limits.LARGEST_JSON:
                raise Damaged("limit", f"{path.name} has {window.size:,} bytes, more than are read")
            return parse_json(window.read(window.size), path.name)
    except Damaged as damage:
        notes.damaged(damage)
        return None


class _check_index:  # noqa: N801 (used as a function)
    """One index against the shards that are there."""

    def __init__(self, index: Path, layouts: Mapping[str, Layout]) -> None:
        self.index, self.layouts = index, layouts

    def __call__(self, notes: Notes) -> None:
        data = read_json(self.index, notes)
        if data is None:
            return
        wanted = data.get("weight_map") if isinstance(data, dict) else None
        if not isinstance(wanted, dict) or not all(
            isinstance(shard, str) for shard in wanted.values()
        ):
            notes.add("malformed", f"{self.index.name} has no weight_map of names and shards")
            return
        shards = sorted(set(wanted.values()))
        there = [shard for shard in shards if self._is_there(shard, notes)]
        self._tensors(wanted, there, notes)
        self._strangers(shards, notes)
        self._total(data, there, shards, notes)

    def _is_there(self, shard: str, notes: Notes) -> bool:
        if Path(shard).name != shard or shard in ("", ".", ".."):
            notes.add(
                "hostile",
                f"{self.index.name} names {shard!r}, which lies outside the folder; it was not "
                f"opened",
            )
            return False
        if shard not in self.layouts:
            notes.add("missing", f"{self.index.name} names the shard {shard!r}, which is not there")
            return False
        return True

    def _tensors(self, wanted: Mapping[str, str], there: list[str], notes: Notes) -> None:
        homes: dict[str, list[str]] = {}
        for shard in there:
            for look in self.layouts[shard].looks:
                homes.setdefault(look.name, []).append(shard)
        for name, shards in homes.items():
            if len(shards) > 1:
                notes.add("duplicate", f"is in {listed(shards)}", tensor=name)
            elif name not in wanted:
                notes.add(
                    "index",
                    f"is in {shards[0]} but not in {self.index.name}",
                    tensor=name,
                    severity="warning",
                )
        for name, shard in wanted.items():
            if shard in there and self.layouts[shard].whole and shard not in homes.get(name, ()):
                other = homes.get(name)
                where = f"; it is in {other[0]}" if other else ""
                notes.add(
                    "index",
                    f"should be in {shard} by {self.index.name}, but is not{where}",
                    tensor=name,
                )

    def _strangers(self, shards: list[str], notes: Notes) -> None:
        """Shards of the same family that no index names: what an earlier save left behind."""
        families = {match["stem"] for shard in shards if (match := NUMBERED.match(shard))}
        for name in self.layouts:
            match = NUMBERED.match(name)
            if (
                match
                and match["stem"] in families
                and name not in shards
                and Path(shards[0]).suffix == Path(name).suffix
            ):
                notes.add(
                    "index",
                    f"{name} is a shard that {self.index.name} does not name",
                    severity="warning",
                )

    def _total(
        self, data: dict[str, Any], there: list[str], shards: list[str], notes: Notes
    ) -> None:
        meta = data.get("metadata")
        total = meta.get("total_size") if isinstance(meta, dict) else None
        if not isinstance(total, int | float) or len(there) < len(shards):
            return
        if any(not self.layouts[shard].whole for shard in there):
            return
        size = sum(self.layouts[shard].size for shard in there)
        if total > size:
            detail = (
                f"{self.index.name} says {int(total):,} bytes of tensors, all shards together "
                f"have {size:,}"
            )
            notes.add("index", detail, severity="warning")


def _check_numbers(layouts: Mapping[str, Layout], notes: Notes) -> None:
    """`model-00002-of-00003` without an index: all three must be there."""
    families: dict[tuple[str, int], set[int]] = {}
    for name in layouts:
        if match := NUMBERED.match(name):
            families.setdefault((match["stem"], int(match["total"])), set()).add(
                int(match["number"])
            )
    for (stem, total), numbers in families.items():
        first = min(numbers | {1})
        gone = [str(n) for n in range(first, min(total, 10_000) + first) if n not in numbers]
        if gone:
            notes.add(
                "missing", f"of the {total} shards of {stem}, number {listed(gone)} is not there"
            )


def _trainer_state(data: Any, notes: Notes) -> int | None:
    if not isinstance(data, dict):
        return None
    history = data.get("log_history")
    for entry in history if isinstance(history, list) else []:
        bad = [key for key in LOGGED if isinstance(entry, dict) and _strange(entry.get(key))]
        if bad:
            detail = f"trainer_state.json: {listed(bad)} not finite at step {entry.get('step')}"
            notes.add("loss", detail, severity="warning")
            break  # once it is NaN it stays so; the first step says when
    step = data.get("global_step")
    return step if type(step) is int else None


def _strange(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
