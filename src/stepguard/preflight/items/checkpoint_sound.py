"""`checkpoint.sound`: the checkpoint is whole and finite, found without running anything in it."""

from __future__ import annotations

from stepguard.preflight.answers import Seen, count, failed, passed, some, warned
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item
from stepguard.preflight.sizes import gigabytes


def _look(seen: Inspection) -> Seen:
    found, given = seen.verified, seen.subject.checkpoint
    said = f"{found.format}: {count(found.tensors, 'tensor')}, {gigabytes(found.bytes)}"
    if found.errors:
        return failed(
            f"{said}; {count(len(found.errors), 'problem')}: "
            f"{some([str(problem) for problem in found.errors], 2)}",
            fix=f"Do not resume from it; stepguard verify {given} lists everything.",
        )
    if found.warnings:
        listed = some([str(problem) for problem in found.warnings], 2)
        return warned(f"{said}; {listed}", fix=f"stepguard verify {given} lists everything.")
    return passed(f"{said}, whole and finite")


ITEM = Item(id="checkpoint.sound", title="the checkpoint is whole and finite", look=_look)
