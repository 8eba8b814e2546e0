"""`checklist.clip`: gradients are clipped, and by a threshold that has an effect."""

from __future__ import annotations

from stepguard.preflight.answers import Missing, Seen, passed, warned
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item

LIMIT = 0.5


def threshold(seen: Inspection) -> tuple[float | None, str]:
    """The clipping norm that will be used, and who says so."""
    guarded = getattr(seen.subject.guard, "clip_norm", None)
    if guarded is not None:
        return float(guarded), f"GuardConfig.clip_norm={guarded:g}"
    setting = seen.setting("clip")
    return seen.number("clip"), str(setting) if setting is not None else ""


def _look(seen: Inspection) -> Seen:
    value, said = threshold(seen)
    if value is None or value <= 0:
        if seen.subject.config is None and seen.subject.guard is None:
            raise Missing("give --config FILE, or return `guard`")
        return warned(
            "no clipping norm is configured",
            fix="GuardConfig(clip_norm=1.0), or clip_grad_norm_ in the loop.",
        )
    if value <= LIMIT:
        return passed(said)
    name = type(seen.subject.optimizer).__name__ if seen.subject.optimizer is not None else ""
    if "adam" in name.lower():
        return passed(
            f"{said}; above 0.5, but {name}'s update does not depend on the gradient's scale"
        )
    return warned(
        f"{said} with {name or 'an unknown optimizer'}",
        fix="0.5, or a threshold from the run's own norms.",
    )


ITEM = Item(id="checklist.clip", title="gradients are clipped (0.5 or lower)", look=_look)
