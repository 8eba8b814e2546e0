"""`data.finite`: no NaN and no Inf among the inputs."""

from __future__ import annotations

from stepguard.preflight.answers import Seen, count, failed, passed, some
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item


def _look(seen: Inspection) -> Seen:
    data = seen.data
    if not data.nonfinite.number:
        return passed(f"no NaN and no Inf in {data.scope}", *data.remarks)
    return failed(
        f"{count(data.nonfinite.number, 'place')} in {data.scope}: {some(data.nonfinite.names)}",
        fix="Repair or leave out these examples; clean before the model, never after (0 * NaN is "
        "NaN).",
    )


ITEM = Item(id="data.finite", title="inputs are finite", look=_look)
