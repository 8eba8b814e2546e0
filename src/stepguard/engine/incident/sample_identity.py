"""From the rows of a step's micro-batches to the samples of the data set: their indices, their ids,
their batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stepguard.engine.recover.partial_step import samples_in
from stepguard.records import Origin
from stepguard.records.bad_samples import Identity
from stepguard.state.batch_rows import part_named
from stepguard.state.delivered_batches import Delivered, Found, first_tensors
from stepguard.state.resumable_loader import Feed
from stepguard.state.step import Step


@dataclass(frozen=True, slots=True)
class Part:
    """What is known about one micro-batch."""

    size: int | None = None
    """Samples in it."""
    indices: tuple[Identity, ...] | None = None
    """In the data set: one for each sample, or a single one where the data set delivers whole
    batches.
    """
    ids: tuple[Identity, ...] | None = None
    place: tuple[int, int] | None = None
    """Pass over the data and number in it of the batch, where all of that batch is in this step."""

    def indices_of(self, rows: Sequence[int]) -> tuple[Identity, ...] | None:
        """Of these rows, in their order; of all where there are none."""
        if self.indices is None or not rows or len(self.indices) == 1:
            return self.indices
        return _picked(self.indices, rows) if len(self.indices) == self.size else None

    def ids_of(self, rows: Sequence[int]) -> tuple[Identity, ...] | None:
        return _picked(self.ids, rows) if self.ids is not None and rows else self.ids


def parts_of(step: Step, feed: Feed | None, id_key: str | None) -> list[Part]:
    """One for each micro-batch; for each batch the loader delivered, where the step is not known by
    micro-batches.
    """
    delivered = feed.of_step(step.index) if feed is not None else []
    if not step.micro_batches:
        return [_whole(each) for each in delivered]
    sizes = [samples_in(batch) for batch in step.micro_batches]
    parts = [
        Part(size=size, ids=_ids(batch, id_key, size))
        for size, batch in zip(sizes, step.micro_batches, strict=True)
    ]
    if feed is None:
        return parts
    found = [feed.find(batch) for batch in step.micro_batches]
    if all(found):
        return _known_again([each for each in found if each is not None], parts)
    return _by_order(delivered, parts, step.micro_batches)


def name_samples(origin: Origin, step: Step, feed: Feed | None, id_key: str | None) -> Origin:
    """The same origin, with who its samples are."""
    if not origin.samples or (feed is None and id_key is None):
        return origin
    parts, micro = parts_of(step, feed, id_key), origin.micro_batch or 0
    if micro >= len(parts):
        return origin
    indices, ids = parts[micro].indices_of(origin.samples), parts[micro].ids_of(origin.samples)
    if indices is not None and len(indices) != len(origin.samples):
        indices = (indices[0],) * len(origin.samples)
    names = tuple(_name(indices, ids, position) for position in range(len(origin.samples)))
    return replace(origin, rows=names) if all(names) else origin


def _name(indices: Sequence[Identity] | None, ids: Sequence[Identity] | None, position: int) -> str:
    row = f"row {indices[position]}" if indices is not None else ""
    own = f"id {ids[position]}" if ids is not None else ""
    return f"{row} ({own})" if row and own else row or own


def _picked(values: tuple[Identity, ...], rows: Sequence[int]) -> tuple[Identity, ...] | None:
    return tuple(values[row] for row in rows) if max(rows) < len(values) else None


def _whole(each: Delivered) -> Part:
    indices = each.indices
    size = len(indices) if indices is not None and len(indices) > 1 else None
    return Part(size=size, indices=indices, place=(each.epoch, each.number))


def _known_again(found: list[Found], parts: list[Part]) -> list[Part]:
    """Every micro-batch is one of those delivered, or a slice of one."""
    seen: dict[int, set[int]] = {}
    for each in found:
        seen.setdefault(id(each.delivered), set()).update(each.rows or ())
    known = []
    for each, part in zip(found, parts, strict=True):
        complete = each.rows is None or len(seen[id(each.delivered)]) == each.of
        place = (each.delivered.epoch, each.delivered.number) if complete else None
        known.append(replace(part, indices=each.indices, place=place))
    return known


def _by_order(delivered: list[Delivered], parts: list[Part], batches: Sequence[Any]) -> list[Part]:
    """The loop has made new tensors of them (moved to a device): the order tells, where numbers and
    values agree.
    """
    if len(delivered) == len(parts):
        if any(_contradicts(each, batch) for each, batch in zip(delivered, batches, strict=True)):
            return parts
        pairs = zip(parts, delivered, strict=True)
        return [
            replace(part, indices=each.indices, place=(each.epoch, each.number))
            for part, each in pairs
        ]
    if len(delivered) != 1 or any(part.size is None for part in parts):
        return parts
    (whole,), indices = delivered, delivered[0].indices
    if indices is None or sum(part.size or 0 for part in parts) != len(indices):
        return parts
    cut, start = [], 0
    for part, batch in zip(parts, batches, strict=True):
        if _contradicts(whole, batch, start):
            return parts
        end = start + (part.size or 0)
        cut.append(replace(part, indices=indices[start:end], place=(whole.epoch, whole.number)))
        start = end
    return cut


def _contradicts(delivered: Delivered, batch: Any, start: int = 0) -> bool:
    """Are there tensors that could be the same, and is none of them? Then the loop trains on
    something else.
    """
    looks_alike = [
        (whole[start : start + len(tensor)], tensor)
        for whole in delivered.tensors
        for tensor in first_tensors(batch)
        if tensor.dim()
        and whole.dim()
        and (tensor.dtype, tensor.shape[1:]) == (whole.dtype, whole.shape[1:])
    ]
    return bool(looks_alike) and not any(_equal(whole, tensor) for whole, tensor in looks_alike)


def _equal(one: Tensor, other: Tensor) -> bool:
    other = other.detach().to(one.device)
    if one.shape != other.shape:
        return False
    if one.is_floating_point() or one.is_complex():
        return torch.allclose(one.detach(), other, rtol=0.0, atol=0.0, equal_nan=True)
    return torch.equal(one, other)


def _ids(batch: Any, key: str | None, size: int | None) -> tuple[Identity, ...] | None:
    """The field of the batch with one id for each sample."""
    if key is None:
        return None
    given: Any = part_named(batch, key)
    if callable(getattr(given, "tolist", None)):
        given = given.tolist()
    if not isinstance(given, list | tuple) or (size is not None and len(given) != size):
        return None
    return tuple(_plain_id(value) for value in given)


def _plain_id(value: Any) -> Identity:
    if callable(getattr(value, "tolist", None)):
        value = value.tolist()
    while isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, int | str) and not isinstance(value, bool) else str(value)
