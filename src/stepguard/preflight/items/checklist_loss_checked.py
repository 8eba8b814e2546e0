"""`checklist.loss_checked`: something looks at the loss before it moves the weights."""

from __future__ import annotations

from stepguard.preflight.answers import Missing, Seen, passed, warned
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item

GUARDS = ("Guard", "watch", "GuardCallback", "guard")
TESTS = ("isfinite", "isnan", "isinf")


def guarded_at(seen: Inspection) -> str:
    """Where the program starts a guard of ours; empty when it does not."""
    if seen.subject.guard is not None:
        return "the returned `guard`"
    if seen.subject.model is None and seen.subject.config is None:
        raise Missing("give TARGET as module:function, or a configuration in the project's folder")
    if not seen.project.files:
        raise Missing("start the check in the project's folder: there is no source below this one")
    calls = seen.project.calls
    if "stepguard" not in seen.project.mentions:
        return ""
    return next((calls[name] for name in GUARDS if name in calls), "")


def _look(seen: Inspection) -> Seen:
    place = guarded_at(seen)
    if place:
        return passed(f"stepguard reads the loss and every gradient of each step ({place})")
    found = [(name, seen.project.calls[name]) for name in TESTS if name in seen.project.calls]
    if found and found[0][0] == "isfinite":
        return passed(f"isfinite at {found[0][1]}")
    said = [f"{name} at {place}" for name, place in found]
    why = (
        f"only {', '.join(said)}: an infinite loss passes isnan"
        if said
        else "nothing tests the loss"
    )
    files = f"{seen.project.files} source files"
    return warned(
        f"{why} in {files}",
        fix="guard = stepguard.watch(model, optimizer), one line before the loop.",
    )


ITEM = Item(
    id="checklist.loss_checked", title="the loss is validated before the update", look=_look
)
