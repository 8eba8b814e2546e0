"""Which samples of the data set a step held, and which of them were lost: names and ledger."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stepguard.engine.context import Context
from stepguard.engine.protect import borrowing
from stepguard.ledger import Ledger, read_ledger
from stepguard.ranks.agreement import ASKED
from stepguard.records import Incident, Origin, Reading
from stepguard.records.checks import BadSamples, Extent, Identity
from stepguard.records.codec import one_line
from stepguard.records.incident import place_and_phase
from stepguard.state.batch import Step, named_tensors, part_named, samples_in, tensor_label
from stepguard.state.loader import Delivered, FoundBatch, Place, RecentBatches, first_tensors

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
    """Return the origin with its samples named and the content of the first one."""
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
        bad = row.numel() - finite.numel()
        span = "nothing finite"
        if finite.numel():
            low, high = float(finite.min()), float(finite.max())
            span = f"{low:.4g} to {high:.4g}"
            if low == high:
                span = f"all {low:.4g}" if not bad else f"else {low:.4g}"
            if bad:
                span = f"{bad} of {row.numel()} NaN or Inf, {span}"
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


# --- Write what a bad step cost to the ledger of bad samples, and read it again after a restore.


def note_lost(context: Context, step: Step, incident: Incident) -> None:
    """Write what was lost to the ledger. Never raises: a fault costs the line, and is said once."""
    if context.config.run_dir is None or borrowing() or not _loses_samples(incident):
        return
    if context.data.ledger is None:
        context.data.ledger = Ledger(Path(context.config.run_dir), context.agreement.rank)
    try:
        for entry in _entries(context, step, incident):
            context.data.ledger.append(entry)
    except Exception as fault:
        if not context.data.ledger.failed:
            context.data.ledger.failed = True
            summary = (
                f"the ledger of bad samples misses step {incident.step}: "
                f"{type(fault).__name__}: {fault}"
            )
            context.outputs.note("ledger", summary, step=incident.step)


def with_sample_names(
    context: Context, find: Callable[[Step, Reading], Origin]
) -> Callable[[Step, Reading], Origin]:
    """Wrap a search for the origin: the samples it proves are named by their place in the data."""

    def found(step: Step, reading: Reading) -> Origin:
        origin = find(step, reading)
        try:
            origin = name_samples(origin, step, context.data.recent, context.config.id_key)
            if context.config.capsule == "full" and origin.samples:
                text = text_of(
                    step, origin.samples[0], origin.micro_batch or 0, context.data.tokenizer
                )
                origin = replace(origin, excerpt=text)
            return origin
        except Exception:
            # the names of the samples are not worth losing where the step broke
            return origin

    return found


def known_bad(run_dir: Path, rank: int = 0) -> list[BadSamples]:
    """The ledger of one rank, oldest first; empty where there is none that can be read."""
    try:
        return read_ledger(run_dir, rank)[0]
    except Exception:
        return []


def skip_lost_batches(context: Context) -> None:
    """After a restore: do not deliver again the batches that were lost because of their data."""
    feed = context.data.feed
    # Entries of this run and rank whose batch is known and would fail again.
    run_dir = context.config.run_dir
    rank = context.agreement.rank
    if context.data.feed is None or run_dir is None:
        lost_batches = []
    else:
        # every process has drawn a run id of its own: that of rank 0 is in the checkpoint
        run_id = context.run.id if rank == 0 else None
        lost_batches = [
            entry for entry in known_bad(Path(run_dir), rank) if _is_skipped(entry, run_id)
        ]
    entries = _agreed(context, lost_batches)
    if feed is None or not entries:
        return
    causes: dict[Place, str] = {}
    indices: dict[Place, list[Identity]] = {}
    for entry in entries:
        place = (entry.epoch or 0, entry.batch or 0)
        causes.setdefault(place, entry.cause)
        indices.setdefault(place, []).extend(entry.indices or ())
    if context.agreement.size > 1:
        feed.pass_over(causes, causes=causes, indices=None)
    else:
        feed.pass_over(causes, causes=causes, indices=indices)


def _is_skipped(entry: BadSamples, run_id: str | None) -> bool:
    ours = entry.run is None or not run_id or entry.run == run_id
    placed = entry.epoch is not None and entry.batch is not None
    return ours and placed and entry.left_out == "step" and entry.would_fail_again


def _agreed(context: Context, entries: list[BadSamples]) -> list[BadSamples]:
    """What every rank has on record, in the present pass: all must deliver as many batches."""
    if context.agreement.size == 1:
        return entries
    present = context.data.feed.epoch if context.data.feed is not None else -1
    own = [_moment(entry) for entry in entries if entry.epoch == present]
    told = context.agreement.together(lambda: {"lost": own}, "the lost samples", seconds=ASKED)
    common = set(map(tuple, own))
    for facts in told:
        common &= set(map(tuple, facts["lost"]))
    return [entry for entry in entries if tuple(_moment(entry)) in common]


def _moment(entry: BadSamples) -> list[int]:
    """Key of a lost batch, equal on all ranks."""
    return [entry.attempt, entry.step, entry.epoch or 0, entry.batch or 0]


def _loses_samples(incident: Incident) -> bool:
    """Have samples had no part in an update? A stop counts where the data brought it about."""
    action = incident.decision.action if incident.decision is not None else None
    if action == "stop":
        phase = "" if incident.origin is None else incident.origin.phase
        by_state = phase in ("state", "optimizer", "checkpoint")
        return not incident.reading.bad_state and not by_state
    return action in ("leave_out", "skip", "undo")


def _entries(context: Context, step: Step, incident: Incident) -> list[BadSamples]:
    """One entry for each micro-batch that was lost."""
    parts = parts_of(step, context.data.recent, context.config.id_key) or [BatchPart()]
    guilty = _guilty(incident, len(parts))
    shared = _shared_fields(context, parts, incident)
    origin = incident.origin
    # samples of this rank that were lost because of another rank's are innocent
    elsewhere = origin is not None and origin.rank not in (None, context.agreement.rank)
    found: list[BadSamples] = []
    for number, part in enumerate(parts):
        if number not in guilty and shared["left_out"] != "step":
            continue
        innocent = elsewhere or number not in guilty
        samples = () if innocent else _guilty_samples(origin, number)
        micro = number if len(parts) > 1 else None
        count = part.size or 0
        if shared["left_out"] == "sample":
            count = len(samples)
        epoch, batch = part.place or (None, None)
        found.append(
            BadSamples(
                **shared,
                micro_batch=micro,
                samples=samples,
                count=count,
                indices=part.indices_of(samples),
                ids=part.ids_of(samples),
                epoch=epoch,
                batch=batch,
                innocent=innocent,
            )
        )
    return found


def _guilty_samples(origin: Origin | None, number: int) -> tuple[int, ...]:
    if origin is None or number != (origin.micro_batch or 0):
        return ()
    return origin.samples


def _shared_fields(context: Context, parts: list[BatchPart], incident: Incident) -> dict[str, Any]:
    """What the entries of one step have in common."""
    known = [part.size for part in parts if part.size is not None]
    return {
        "step": incident.step,
        "run": context.run.id,
        "attempt": context.run.attempt,
        "rank": context.agreement.rank,
        "time": time.time(),
        "of": sum(known) if len(known) == len(parts) else 0,
        "left_out": _extent(incident),
        "cause": incident.findings[0].code if incident.findings else incident.verdict.kind,
        "place": _place(incident),
        "incident": incident.id,
    }


def _guilty(incident: Incident, count: int) -> set[int]:
    """Micro-batches that caused it; all of them where it is not known which."""
    if incident.decision is not None:
        dropped = set(incident.decision.dropped_micro_batches)
        if dropped:
            return dropped
    if incident.origin is not None and incident.origin.micro_batch is not None:
        return {incident.origin.micro_batch}
    return set(incident.reading.bad_micro_batches) or set(range(count))


def _extent(incident: Incident) -> Extent:
    decision = incident.decision
    if decision is None or decision.action != "leave_out":
        return "step"
    return "micro_batch" if decision.dropped_micro_batches else "sample"


def _place(incident: Incident) -> str:
    origin = incident.origin
    if origin is None:
        return incident.verdict.summary
    return place_and_phase(origin)
