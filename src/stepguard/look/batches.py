"""Is this the batch of that step? By a digest of its numbers, and by the tensors themselves."""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from stepguard.locate.finite import plain
from stepguard.look.statistics import sampled
from stepguard.records.look import NextBatch
from stepguard.tensors.torch_private import tree_flatten

DIGEST_SAMPLE = 4096


class SeenBatch:
    """What one step was given, in one or several calls. It keeps no tensor alive."""

    def __init__(self) -> None:
        self.digest = ""
        """Empty where nothing was seen that could differ between two batches."""
        self._tensors: list[weakref.ref[Tensor]] = []
        self._rows: Counter[int] = Counter()
        self._computed = False
        """A part of it has a gradient: coordinates of a physical model, which stay."""

    @property
    def samples(self) -> int:
        """The most common first dimension of its tensors; 0: there is none."""
        return self._rows.most_common(1)[0][0] if self._rows else 0

    def add(self, batch: Any) -> None:
        """The step's data, or a part of it."""
        self.digest = digest_of(batch, self.digest)
        for leaf in tree_flatten(batch)[0]:
            if isinstance(leaf, Tensor):
                self._computed |= leaf.requires_grad
                # the memory behind a view, which may be made anew in every step
                owner = leaf if leaf._base is None else leaf._base
                self._tensors.append(weakref.ref(owner))
                if leaf.dim():
                    self._rows[leaf.shape[0]] += 1

    def compared(self, later: SeenBatch) -> NextBatch:
        """What the step after this one was given."""
        if not self.digest or not later.digest or self._computed:
            return "unknown"
        if self.digest != later.digest:
            return "other"
        mine = [reference() for reference in self._tensors]
        theirs = [reference() for reference in later._tensors]
        if len(mine) == len(theirs) and all(map(_is_same, mine, theirs)):
            return "same"
        return "equal"


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and one is other


def digest_of(batch: Any, before: str = "") -> str:
    """A short digest of a sample of every tensor in the batch; a constant one tells nothing."""
    digest = hashlib.blake2b(before.encode(), digest_size=8)
    found = bool(before)
    for leaf in tree_flatten(batch)[0]:
        if isinstance(leaf, Tensor) and leaf.numel() and leaf.layout is torch.strided:
            part = sampled(plain(leaf), DIGEST_SAMPLE).cpu().contiguous()
            if bool((part == part[0]).all()):
                continue
            found = True
            digest.update(part.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest() if found else ""
