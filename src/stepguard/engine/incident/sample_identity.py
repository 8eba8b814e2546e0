"""Find which samples of the data set the rows of a step's micro-batches are: index, id, batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from stepguard.records import Origin
from stepguard.records.checks import Identity
from stepguard.records.codec import one_line
from stepguard.state.batch import Step, named_tensors, part_named, samples_in, tensor_label
from stepguard.state.loader import Delivered, FoundBatch, RecentBatches, first_tensors

MOST_SHOWN = 4
"""Tensors of a sample that are described."""
LONGEST_TEXT = 60
"""Characters of its text."""


@dataclass(frozen=True, slots=True)
class BatchPart:
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
        """Indices of these rows, in their order; of all where no rows are given."""
        if self.indices is None or not rows or len(self.indices) == 1:
            return self.indices
        if len(self.indices) != self.size:
            return None
        return _picked(self.indices, rows)

    def ids_of(self, rows: Sequence[int]) -> tuple[Identity, ...] | None:
        """Ids of these rows, in their order; of all where no rows are given."""
        if self.ids is None or not rows:
            return self.ids
        return _picked(self.ids, rows)


def parts_of(step: Step, recent: RecentBatches | None, id_key: str | None) -> list[BatchPart]:
    """One part for each micro-batch; for each delivered batch where micro-batches are not known.

    A micro-batch is known by its tensors, which are those that a loader delivered or views of them.
    Where the loop made new ones (moved to a device), delivered batches go by their order, unless
    their values say that the loop trains on something else. A framework fetches ahead and uses
    several loaders: there the values have to be seen to be the same.
    """
    if not step.micro_batches:
        if recent is None or recent.observed:
            return []
        parts = []
        for each in recent.of_step(step.index):
            indices = each.indices
            size = len(indices) if indices is not None and len(indices) > 1 else None
            parts.append(BatchPart(size=size, indices=indices, place=each.place))
        return parts
    parts = []
    for batch in step.micro_batches:
        size = samples_in(batch)
        parts.append(BatchPart(size=size, ids=_ids(batch, id_key, size)))
    if recent is None:
        return parts
    found: list[FoundBatch] = []
    for batch in step.micro_batches:
        known = recent.find(batch)
        if known is not None:
            found.append(known)
    if len(found) == len(parts):
        return _recognized(found, parts)
    return _by_order(_plausible(step, recent), parts, step.micro_batches)


def delivered_beside(step: Step, recent: RecentBatches | None) -> list[tuple[Delivered, int]]:
    """The delivered batches that the step's micro-batches are or hold parts of, each with its
    micro-batch: a model's call holds no target.
    """
    found: list[tuple[Delivered, int]] = []
    if recent is None:
        return found
    for micro, batch in enumerate(step.micro_batches):
        known = recent.find(batch)
        if known is not None and known.rows is None:
            found.append((known.delivered, micro))
    if not found:
        return [(each, micro) for micro, each in enumerate(_plausible(step, recent))]
    return found


def _plausible(step: Step, recent: RecentBatches) -> list[Delivered]:
    """Batches delivered for the step; of observed loaders those that share values with it."""
    delivered = recent.of_step(step.index)
    if not recent.observed:
        return delivered
    seen = []
    for each in delivered:
        if any(_holds_values_of(each, batch) for batch in step.micro_batches):
            seen.append(each)
    return seen


def _holds_values_of(delivered: Delivered, batch: Any, start: int = 0) -> bool | None:
    """Is a tensor of the batch equal to rows of the delivered one? None: none can be compared."""
    answer = None
    for tensor in first_tensors(batch):
        for whole in delivered.tensors:
            if not tensor.dim() or not whole.dim() or whole.dtype != tensor.dtype:
                continue
            rows = whole.detach()[start : start + len(tensor)]
            if rows.shape != tensor.shape:
                continue
            values = tensor.detach().to(rows.device)
            # NaN equals NaN here: it is often why the row is asked for
            if bool(((rows == values) | ((rows != rows) & (values != values))).all()):
                return True
            answer = False
    return answer


def name_samples(
    origin: Origin, step: Step, recent: RecentBatches | None, id_key: str | None
) -> Origin:
    """The same origin, with the names of its samples and what the first of them holds."""
    if not origin.samples:
        return origin
    origin = replace(origin, content=_content(origin.samples[0], origin.micro_batch or 0, step))
    if origin.rows or (recent is None and id_key is None):
        return origin
    parts = parts_of(step, recent, id_key)
    micro = origin.micro_batch or 0
    if micro >= len(parts):
        return origin
    count = len(origin.samples)
    indices = parts[micro].indices_of(origin.samples)
    ids = parts[micro].ids_of(origin.samples)
    if indices is not None and len(indices) != count:
        # a data set that delivers whole batches has one index for all of its rows
        indices = (indices[0],) * count
    names = tuple(_name(indices, ids, position) for position in range(count))
    return replace(origin, rows=names) if all(names) else origin


def text_of(step: Step, sample: int, micro: int, tokenizer: Any) -> str:
    """The beginning of the sample's text in one clean line; empty where it has none."""
    if micro >= len(step.micro_batches):
        return ""
    batch = step.micro_batches[micro]
    text = _string_of(batch, sample, samples_in(batch))
    if not text and tokenizer is not None:
        for name, tensor in named_tensors(batch):
            if name.endswith("input_ids") and tensor.dim() == 2 and sample < len(tensor):
                # padding and a model's own tokens say nothing about the sample
                text = str(tokenizer.decode(tensor[sample].tolist(), skip_special_tokens=True))
                break
    text = " ".join(one_line(text).split())
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 1]}\u2026"


def _string_of(batch: Any, sample: int, count: int | None) -> str:
    """The sample's entry in a list of strings that has one for each sample."""
    if isinstance(batch, Mapping):
        parts: Iterable[Any] = batch.values()
    elif isinstance(batch, list | tuple):
        if batch and len(batch) == count and all(isinstance(one, str) for one in batch):
            return str(batch[sample])
        parts = batch
    else:
        return ""
    return next(filter(None, (_string_of(part, sample, count) for part in parts)), "")


def _content(sample: int, micro: int, step: Step) -> str:
    """Dtype, shape and range of the sample's tensors, in words."""
    said: list[str] = []
    tensors = named_tensors(step.micro_batches[micro]) if micro < len(step.micro_batches) else ()
    for name, tensor in tensors:
        plain = tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_complex()
        if len(said) == MOST_SHOWN or not plain or not tensor.dim() or sample >= len(tensor):
            continue
        row = tensor[sample].detach().to(torch.float64)
        finite = row[torch.isfinite(row)]
        span = "nothing finite"
        if finite.numel():
            low, high = float(finite.min()), float(finite.max())
            span = f"all {low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
        dtype = str(tensor.dtype).removeprefix("torch.")
        said.append(f"{tensor_label(name)} {dtype} {list(row.shape)}, {span}")
    return "; ".join(said)


def _name(indices: Sequence[Identity] | None, ids: Sequence[Identity] | None, position: int) -> str:
    """`row 17 (id a3)`, or the one of the two that is known."""
    row = "" if indices is None else f"row {indices[position]}"
    own = "" if ids is None else f"id {ids[position]}"
    if row and own:
        return f"{row} ({own})"
    return row or own


def _picked(values: tuple[Identity, ...], rows: Sequence[int]) -> tuple[Identity, ...] | None:
    if max(rows) >= len(values):
        return None
    return tuple(values[row] for row in rows)


def _recognized(found: list[FoundBatch], parts: list[BatchPart]) -> list[BatchPart]:
    """Every micro-batch is one of those delivered, or a slice of one."""
    seen: dict[int, set[int]] = {}
    for each in found:
        seen.setdefault(id(each.delivered), set()).update(each.rows or ())
    known: list[BatchPart] = []
    for each, part in zip(found, parts, strict=True):
        complete = each.rows is None or len(seen[id(each.delivered)]) == each.of
        place = each.delivered.place if complete else None
        known.append(replace(part, indices=each.indices, place=place))
    return known


def _by_order(
    delivered: list[Delivered], parts: list[BatchPart], batches: Sequence[Any]
) -> list[BatchPart]:
    """One delivered batch for each micro-batch, or one that was cut into all of them."""
    known: list[BatchPart] = []
    if len(delivered) == len(parts):
        for each, part, batch in zip(delivered, parts, batches, strict=True):
            if _holds_values_of(each, batch) is False:
                return parts
            known.append(replace(part, indices=each.indices, place=each.place))
        return known
    sizes = [part.size for part in parts if part.size is not None]
    whole = delivered[0].indices if len(delivered) == 1 else None
    if whole is None or len(sizes) != len(parts) or sum(sizes) != len(whole):
        return parts
    start = 0
    for part, size, batch in zip(parts, sizes, batches, strict=True):
        if _holds_values_of(delivered[0], batch, start) is False:
            return parts
        rows = whole[start : start + size]
        known.append(replace(part, indices=rows, place=delivered[0].place))
        start += size
    return known


def _ids(batch: Any, key: str | None, size: int | None) -> tuple[Identity, ...] | None:
    """The field of the batch with one id for each sample."""
    if key is None:
        return None
    given = _as_list(part_named(batch, key))
    if not isinstance(given, list | tuple) or (size is not None and len(given) != size):
        return None
    return tuple(map(_plain_id, given))


def _plain_id(value: Any) -> Identity:
    value = _as_list(value)
    while isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if isinstance(value, int | str) and not isinstance(value, bool):
        return value
    return str(value)


def _as_list(value: Any) -> Any:
    """Tensors and arrays as lists or plain numbers; all else as it is."""
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    return value
