"""`checklist.latents`: the target of a squared error is of order 1."""

from __future__ import annotations

from stepguard.preflight.answers import Pointless, Seen, passed, warned
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item

LEAST, MOST = 0.1, 10.0


def _look(seen: Inspection) -> Seen:
    latent = seen.live.latent
    if latent is None:
        raise Pointless("the step has no squared error")
    mean, deviation = latent
    said = f"target of the squared error: mean {mean:.3g}, standard deviation {deviation:.3g}"
    if LEAST <= deviation <= MOST and abs(mean) <= MOST:
        return passed(said)
    return warned(
        said,
        fix="Standardise the data once (subtract its mean, divide by its deviation); normalising "
        "each vector inside "
        "the loss loses the scale.",
    )


ITEM = Item(
    id="checklist.latents", title="latents are normalised before the squared error", look=_look
)
