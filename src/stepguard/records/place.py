"""The place where a bad value was born, in words: the same words in every output."""

from __future__ import annotations

from dataclasses import replace

from stepguard.records.origin import Origin


def place(origin: Origin, what: str = "") -> str:
    """`aten._softmax in layers.3.attn at model.py:88`, as far as it is known.

    `what` names the operation or tensor; by default the stored tensor, or else the operation.
    """
    if not what:
        return origin.place
    return replace(origin, tensor=what).place


def place_and_phase(origin: Origin) -> str:
    """`forward: aten._softmax in layers.3.attn at model.py:88`."""
    where = place(origin)
    return f"{origin.phase}: {where}" if where else origin.phase
