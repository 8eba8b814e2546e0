"""Which tokens the first batches teach: targets that are end tokens, or padding. Causal language
models with `input_ids` and `labels` in one batch, as transformers and TRL collate them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from stepguard.engine.context import Context
from stepguard.records.probes import TargetFacts

IGNORED = -100
BATCHES = 8
"""Batches that are counted."""
MOST_TOKENS = 1 << 20
"""A batch with more tokens is not counted."""
SETTLED = 16
"""Rows that are needed for a judgement."""


class TargetCounts:
    """Counts on the device of the batches; read once, when a health check is made anyway."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._counted: list[Tensor] = []
        self._ends: tuple[int, ...] | None = None
        self._pad: int | None = None
        self._facts: TargetFacts | None = None

    def add(self, batch: Any) -> None:
        """Count a batch; others than those of causal language models are left alone."""
        if len(self._counted) >= BATCHES or self._facts is not None:
            return
        for found in _batches(batch):
            ids, labels = found["input_ids"], found["labels"]
            mask = found.get("attention_mask")
            if not _fits(ids, labels) or (mask is not None and not _fits(ids, mask)):
                continue
            if self._ends is None:
                self._ends, self._pad = special_ids(self._context)
            if self._ends:
                self._counted.append(_count(ids, labels, mask, self._ends, self._pad))
            return

    def facts(self) -> TargetFacts | None:
        """The sum of all counts; None while there are too few rows."""
        if self._facts is None and len(self._counted) > 1:
            total = torch.stack(self._counted).sum(0).tolist()
            if total[0] < SETTLED:
                return None
            first, last = (torch.stack([c[i] for c in self._counted]) for i in (-2, -1))
            one_end = int(first.min()) == int(last.max())
            self._facts = TargetFacts(
                **dict(zip(COUNTS, total, strict=False)),
                same_last=one_end,
                end=self._ends[0] if self._ends else 0,
                pad=self._pad,
            )
            self._counted = []
        return self._facts


COUNTS = (
    "rows",
    "targets",
    "unlike",
    "ended",
    "ends",
    "padding",
    "padding_targets",
    "padded_rows",
    "prompted",
    "unended",
)


def _batches(batch: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(batch, Mapping):
        if "input_ids" in batch and "labels" in batch:
            yield batch
        return
    for part in batch if isinstance(batch, tuple | list) else ():
        yield from _batches(part)


def _fits(ids: Any, other: Any) -> bool:
    for one in (ids, other):
        if type(one) is not Tensor or one.dim() != 2 or one.is_floating_point():
            return False
    return bool(ids.shape == other.shape) and 0 < ids.numel() <= MOST_TOKENS


def special_ids(context: Context) -> tuple[tuple[int, ...], int | None]:
    """End tokens and the padding token, of the tokenizer and of the model's configuration."""
    processor = context.data.tokenizer
    owners = [getattr(processor, "tokenizer", processor)]
    for root in context.roots.values():
        inner = getattr(root, "module", root)
        owners += [getattr(inner, "config", None), getattr(inner, "generation_config", None)]
    ends: dict[int, None] = {}
    pad = None
    for owner in owners:
        given = getattr(owner, "eos_token_id", None)
        for one in given if isinstance(given, list | tuple) else (given,):
            if type(one) is int:
                ends[one] = None
        found = getattr(owner, "pad_token_id", None)
        if pad is None and type(found) is int:
            pad = found
    return tuple(ends), pad


@torch.no_grad()
def _count(
    ids: Tensor, labels: Tensor, mask: Tensor | None, ends: tuple[int, ...], pad: int | None
) -> Tensor:
    """One number for each of COUNTS, then the lowest and the highest last target of a row."""
    ids, labels = ids.long(), labels.long()
    kept = labels != IGNORED
    end = torch.zeros_like(kept)
    target_end = torch.zeros_like(kept)
    for one in ends:
        end |= ids == one
        target_end |= labels == one
    if mask is not None:
        real = mask != 0
    elif pad is not None and pad not in ends:
        real = ids != pad
    else:
        real = torch.ones_like(kept)  # what pads is not known: every row counts as full
    places = torch.arange(ids.shape[1], device=ids.device)
    last_real = torch.where(real, places, 0).amax(1, keepdim=True)
    first_real = torch.where(real, places, ids.shape[1] - 1).amin(1, keepdim=True)
    last_kept = torch.where(kept, places, 0).amax(1, keepdim=True)
    padded = ~real.all(1)
    # one end token before the padding says nothing of a row whose padding is not known
    known = padded if mask is None and (pad is None or pad in ends) else torch.ones_like(padded)
    ends_so = end.gather(1, last_real).squeeze(1) & known & kept.any(1)
    taught = labels.gather(1, last_kept)
    pads = ~real & kept
    if pad is not None:
        pads = pads & (labels == pad)
    values = [
        kept.any(1).sum(),
        kept.sum(),
        (kept & real & (labels != ids)).sum(),
        ends_so.sum(),
        target_end.sum(),
        (~real).sum(),
        pads.sum(),
        padded.sum(),
        (~kept.gather(1, first_real).squeeze(1) & kept.any(1)).sum(),
        # padding on the left says nothing of where a row ends: it may have been cut
        (~real[:, -1] & ~end.gather(1, last_real).squeeze(1) & kept.any(1)).sum(),
        taught.amin(),
        taught.amax(),
    ]
    return torch.stack(values)
