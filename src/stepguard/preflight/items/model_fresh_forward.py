"""`model.fresh_forward`: one step of the model as it is gives a finite loss and finite gradients."""

from __future__ import annotations

import math

from stepguard.preflight.answers import Seen, count, failed, passed, some, warned
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item


def _look(seen: Inspection) -> Seen:
    live = seen.live
    if live.fault:
        return failed(
            f"the step raised {live.fault}",
            fix="Run the step alone; the run dies at its first step.",
        )
    loss = "" if live.loss is None else f"loss {live.loss:.4g}"
    if live.loss is not None and not math.isfinite(live.loss):
        return failed(
            f"{loss} on one batch",
            fix="stepguard.Guard names the operation: guard.step(loss_fn, batch).",
        )
    if live.outputs_bad:
        return failed(
            f"outputs not finite: {some(live.outputs_bad)}",
            fix="Check the inputs and the initialisation.",
        )
    if live.grads_bad:
        return failed(
            f"{loss}, {count(len(live.grads_bad), 'parameter')} with bad gradients: "
            f"{some(live.grads_bad)}",
            fix="Look for sqrt, norm, log or a division at 0: finite values with infinite slopes.",
        )
    if live.grad_norm == 0:
        return warned(
            f"{loss}, all gradients are 0",
            fix="Nothing is learned: check masks, labels and detach.",
        )
    norm = "" if live.grad_norm is None else f"gradient norm {live.grad_norm:.4g}"
    return passed(
        f"one batch: {', '.join(part for part in (loss, norm) if part) or 'outputs finite'}"
    )


ITEM = Item(id="model.fresh_forward", title="one step of the model is finite", look=_look)
