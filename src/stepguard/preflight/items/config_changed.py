"""`config.changed`: the configuration against the one stored with the checkpoint."""

from __future__ import annotations

from typing import Any

from stepguard.preflight.answers import Pointless, Seen, passed, some, warned
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item
from stepguard.preflight.settings.keys import as_number, flat

OUTSIDE = (
    "output_dir",
    "run_dir",
    "logging_dir",
    "resume",
    "resume_from_checkpoint",
    "checkpoint",
    "run_name",
)
"""Keys that differ between any two starts of one run."""


def _look(seen: Inspection) -> Seen:
    now, stored = seen.needed_config(), seen.stored
    if not stored.config:
        raise Pointless(f"{stored.path.name} holds no configuration that can be read")
    new, old = ({leaf.key: leaf.value for leaf in flat(values)} for values in (now, stored.config))
    changed = [
        f"{key}: {old[key]!r} -> {new[key]!r}"
        for key in sorted(new.keys() & old.keys())
        if not _same(old[key], new[key]) and key.rpartition(".")[2] not in OUTSIDE
    ]
    gone = sorted(old.keys() - new.keys())
    added = sorted(new.keys() - old.keys())
    said = [f"changed: {some(changed, 8)}"] if changed else []
    said += [f"only in the checkpoint: {some(gone)}"] if gone else []
    said += [f"new: {some(added)}"] if added else []
    if not said:
        return passed(f"{len(new)} values equal those stored in {stored.path.name}")
    return warned(
        *said,
        fix="Make sure that each change is meant, and that loading the checkpoint does not undo "
        "it.",
    )


def _same(first: Any, second: Any) -> bool:
    if type(first) is not type(second) and as_number(first) is not None:
        return as_number(first) == as_number(second)
    return (
        list(first) == list(second)
        if isinstance(first, tuple | list) and isinstance(second, tuple | list)
        else (bool(first == second))
    )


ITEM = Item(id="config.changed", title="the configuration equals the checkpoint's", look=_look)
