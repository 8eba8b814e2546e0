"""From the rows of a step's micro-batches to the samples of the data set: their indices, their ids, their batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from stepguard.engine.leave_out import samples_in
from stepguard.records import Origin
from stepguard.records.bad_samples import Identity
from stepguard.state.delivered import Delivered, Found
from stepguard.state.feed import Feed
from stepguard.state.rows import part_named
from stepguard.state.step import Step


@dataclass(frozen=True, slots=True)
class Part:
    """What is known about one micro-batch."""

    size: int | None = None
    """Samples in it."""
    indices: tuple[Identity, ...] | None = None
    """In the data set: one for each sample, or a single one where the data set delivers whole batches."""
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
    """One for each micro-batch; for each batch the loader delivered, where the step is not known by micro-batches."""
    delivered = feed.of_step(step.index) if feed is not None else []
    if not step.micro_batches:
        return [_whole(each) for each in delivered]
    sizes = [samples_in(batch) for batch in step.micro_batches]
    parts = [
        Part(size=size, ids=_ids(batch, id_key, size)) for size, batch in zip(sizes, step.micro_batches, strict=True)
    ]
    if feed is None:
        return parts
    found = [feed.find(batch) for batch in step.micro_batches]
    if all(found):
        return _known_again([each for each in found if each is not None], parts)
    return _by_order(delivered, parts)


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


def _by_order(delivered: list[Delivered], parts: list[Part]) -> list[Part]:
    """The loop has made new tensors of them (moved to a device): the order tells, where the numbers agree."""
    if len(delivered) == len(parts):
        pairs = zip(parts, delivered, strict=True)
        return [replace(part, indices=each.indices, place=(each.epoch, each.number)) for part, each in pairs]
    sizes, listed = [part.size for part in parts], [each.indices for each in delivered]
    if None in sizes or None in listed or len(delivered) != 1:
        return parts
    (each,), (indices,) = delivered, listed
    assert indices is not None
    if sum(size or 0 for size in sizes) != len(indices):
        return parts
    cut, start = [], 0
    for part in parts:
        end = start + (part.size or 0)
        cut.append(replace(part, indices=indices[start:end], place=(each.epoch, each.number)))
        start = end
    return cut


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
