"""`precision.configured`: configuration, launcher and framework object ask for the same precision."""

from __future__ import annotations

from stepguard.preflight.answers import Missing, Seen, failed, passed
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item
from stepguard.preflight.settings.precision import contradiction, wanted


def asked(seen: Inspection) -> dict[str, str | None]:
    """Every place that asks for a precision, in words -> dtype (None: mixed precision without a
    dtype).
    """
    found: dict[str, str | None] = {}
    from_config = wanted(seen.config)
    if from_config is not None:
        found[f"the configuration ({from_config.said})"] = from_config.dtype
    if "mixed_precision" in seen.launcher.values:
        found[f"the launcher ({seen.launcher.said('mixed_precision')})"] = seen.launcher.dtype
    if seen.around.dtype is not None:
        found[f"the code ({seen.around.said})"] = seen.around.dtype
    return found


def _look(seen: Inspection) -> Seen:
    inside = contradiction(seen.config)
    places = asked(seen)
    if inside:
        return failed(inside, fix="Keep one of the two settings.")
    if not places:
        raise Missing("give --config FILE or --launcher FILE that names a precision")
    said = tuple(
        f"{place} asks for {dtype or 'mixed precision without a dtype'}"
        for place, dtype in places.items()
    )
    named = {dtype for dtype in places.values() if dtype is not None}
    if len(named) > 1 or seen.launcher.conflicts:
        winner = (
            "the code, which wins over the launcher silently"
            if seen.around.dtype
            else "one of them, silently"
        )
        return failed(
            *said,
            *seen.launcher.conflicts,
            fix=f"Name one precision in one place and leave it out elsewhere; at present {winner} "
            f"decides.",
        )
    return passed(*said)


ITEM = Item(id="precision.configured", title="every place asks for the same precision", look=_look)
