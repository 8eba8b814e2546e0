"""`config.types`: numbers and switches that the file's format reads as text."""

from __future__ import annotations

from stepguard.preflight.answers import Seen, failed, passed, some
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item
from stepguard.preflight.settings.keys import flat, spells_number

SWITCHES = ("true", "false")
"""Only these: a `no` in quotes is often the name of a strategy."""
TEXTS = (
    "mixed_precision",
    "precision",
    "save_strategy",
    "eval_strategy",
    "version",
    "id",
    "name",
    "seed_name",
    "tag",
)
"""Last parts of keys that are texts by right: `mixed_precision: "no"`, `precision: "16"`."""


def _look(seen: Inspection) -> Seen:
    leaves = list(flat(seen.needed_config()))
    texts = [
        leaf
        for leaf in leaves
        if isinstance(leaf.value, str) and leaf.key.rpartition(".")[2] not in TEXTS
    ]
    numbers = [leaf for leaf in texts if spells_number(leaf.value)]
    switches = [leaf for leaf in texts if leaf.value.strip().lower() in SWITCHES]
    if not numbers and not switches:
        return passed(f"{len(leaves)} values, none of them a number or switch in disguise")
    said = []
    if numbers:
        named = some([f"{leaf.key}: {leaf.value!r}" for leaf in numbers])
        said.append(f"read as text: {named} (YAML takes 1e-4 for a number only as 1.0e-4)")
    if switches:
        named = some([f"{leaf.key}: {leaf.value!r}" for leaf in switches])
        said.append(f"read as text, and every text is true: {named}")
    return failed(*said, fix="Write 1.0e-4 instead of 1e-4, and true or false without quotes.")


ITEM = Item(id="config.types", title="numbers are numbers", look=_look)
