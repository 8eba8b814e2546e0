"""Leaving out what is proven: the rest of a micro-batch without its bad samples."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from stepguard.state.batch_rows import keep_rows, row_count


def samples_in(micro_batch: Any) -> int | None:
    """How many samples a micro-batch has; None where its parts do not agree on a number."""
    try:
        return row_count(micro_batch)
    except Exception:  # a container of the user's with ideas of its own
        return None


def without_samples(micro_batch: Any, rows: Collection[int]) -> Any | None:
    """The micro-batch without these samples, in new tensors; the given one stays as it is.

    None where it cannot be cut safely: its parts have no common first dimension (a graph, a packed
    sequence, a sparse tensor), a class whose parts nobody knows, a row it does not have, or nothing
    left.
    """
    count, bad = samples_in(micro_batch), set(rows)
    if count is None or not bad or min(bad) < 0 or max(bad) >= count or len(bad) == count:
        return None
    try:
        return keep_rows(micro_batch, [row for row in range(count) if row not in bad], count)
    except Exception:  # a container of the user's that cannot be copied, or refuses other sizes
        return None
