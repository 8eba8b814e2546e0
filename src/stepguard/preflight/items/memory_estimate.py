"""`memory.estimate`: weights, gradients, optimizer state and a snapshot fit into the device's
memory.
"""

from __future__ import annotations

from stepguard.preflight.answers import Missing, Seen, failed, passed, warned
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item
from stepguard.preflight.sizes import (
    available_memory,
    gigabytes,
    gradient_bytes,
    model_bytes,
    optimizer_bytes,
)

TIGHT = 0.7


def _look(seen: Inspection) -> Seen:
    weights, grads = model_bytes(seen.model), gradient_bytes(seen.model)
    state, how = optimizer_bytes(seen.model, seen.subject.optimizer)
    snapshot = weights + state
    needed = weights + grads + state
    free = available_memory(seen.device)
    if free is None:
        raise Missing(f"the free memory of {seen.device.type} is not known to torch")
    said = (
        f"{gigabytes(needed)} = weights {gigabytes(weights)}, gradients {gigabytes(grads)}, "
        f"optimizer "
        f"{gigabytes(state)} ({how}); a snapshot takes {gigabytes(snapshot)} more of the host's "
        f"memory; activations "
        "come on top",
        f"{gigabytes(free)} free on {seen.device.type}",
    )
    fix = (
        "A smaller model or optimizer state (8-bit, Adafactor), sharding (FSDP), or a larger "
        "device."
    )
    if needed > free:
        return failed(*said, fix=fix)
    return warned(*said, fix=fix) if needed > TIGHT * free else passed(*said)


ITEM = Item(id="memory.estimate", title="the step fits into memory", look=_look)
