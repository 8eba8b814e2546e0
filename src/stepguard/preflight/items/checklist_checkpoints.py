"""`checklist.checkpoints`: how much work a crash can cost."""

from __future__ import annotations

from stepguard.preflight.answers import Missing, Seen, passed, warned
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item

MOST = 1000


def interval(seen: Inspection) -> tuple[float | None, str]:
    """Steps between checkpoints, and who says so."""
    guarded = getattr(seen.subject.guard, "checkpoint_every", None)
    if guarded is not None:
        return float(guarded), f"GuardConfig.checkpoint_every={guarded}"
    return seen.number("save_every"), str(seen.setting("save_every") or "")


def _look(seen: Inspection) -> Seen:
    every, said = interval(seen)
    if every is None or every <= 0:
        if seen.subject.config is None and seen.subject.guard is None:
            raise Missing("give --config FILE, or return `guard`")
        return warned(
            "no interval between checkpoints is configured", fix=f"checkpoint_every={MOST} or less."
        )
    steps = seen.steps
    run = f" of {steps:,}" if steps else ""
    if every <= MOST and not (steps and every > steps):
        return passed(f"{said}: a crash costs at most {int(every):,} steps{run}")
    return warned(
        f"{said}: a crash costs up to {int(every):,} steps{run}",
        fix=f"checkpoint_every={MOST} or less.",
    )


ITEM = Item(
    id="checklist.checkpoints", title="checkpoints every 1000 steps or more often", look=_look
)
