"""Does a checkpointed block compute the same when its forward is run again in the backward?

Activation checkpointing throws results away and computes them anew. Where the second run differs
(dropout with other random numbers, a counter, a function that is not deterministic), the gradient
belongs to another forward than the loss. Every operation of the first forward is remembered by a
few elements of what went in and came out; one that is given the same in the second forward must
give the same.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stepguard.locate.operands import UNINITIALISED, Operator, numeric, plain
from stepguard.locate.source import backward_caller
from stepguard.probes.statistics import Numbers, Rows, sampled
from stepguard.tensors.torch_private import current_autograd_node

ELEMENTS = 256
"""Elements of each tensor that are compared."""
MOST_ALIKE = 128
"""Calls of one operation with the same shapes; of more nothing is said."""
MOST_CALLS = 20_000
ROUNDING = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
ROUNDING_IN_FLOAT = 1e-3
DIFFERENT = 0.01
"""Share of elements that differ by more than rounding."""


@dataclass(slots=True)
class _Seen:
    """A few elements of what one operation was given and gave."""

    module: str
    given: list[Tensor]
    result: Tensor


class Recomputed:
    """Compares the second forward of checkpointed blocks with the first, on the device."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers
        self._first: dict[Any, list[_Seen]] = defaultdict(list)
        self._count = 0
        self._given: list[Tensor] = []
        self._second = False
        """The operation that runs belongs to a second forward."""

    def before(self, operator: Operator, args: Any, kwargs: Any) -> None:
        """Keep elements of what goes in, before an operation in place overwrites it."""
        self._given = []
        in_backward = current_autograd_node() is not None
        self._second = in_backward and backward_caller()[1]
        if in_backward and not self._second:
            return
        for name, value in operator.entries(args, kwargs):
            if isinstance(value, Tensor) and numeric(value) and operator.reads(name):
                self._given.append(_elements(value))

    def after(self, operator: Operator, results: list[Tensor], module: str) -> None:
        """Remember a call of the first forward, or compare one of the second."""
        numbers = [one for one in results if numeric(one) and one.numel()]
        if not numbers or operator.name in UNINITIALISED:
            return
        first = numbers[0]
        if not self._second and current_autograd_node() is not None:
            return
        seen = _Seen(module, self._given, _elements(first))
        sizes = tuple((len(one), one.dtype) for one in seen.given)
        key = (operator.name, tuple(first.shape), first.dtype, first.device, sizes)
        if self._second:
            self._compare(key, seen)
            return
        self._count += 1
        if self._count <= MOST_CALLS:
            self._first[key].append(seen)

    def _compare(self, key: Any, seen: _Seen) -> None:
        """Compare with all calls that look alike: one must have given the same for the same."""
        earlier = self._first.get(key, ())
        if not 0 < len(earlier) <= MOST_ALIKE:
            return
        outputs = _shares([one.result for one in earlier], seen.result)
        inputs = torch.zeros_like(outputs)
        for position, part in enumerate(seen.given):
            share = _shares([one.given[position] for one in earlier], part)
            inputs = torch.maximum(inputs, share.to(inputs.device))
        known = {"op": key[0], "modules": [one.module for one in earlier]}
        self._numbers.add("recomputed", known, inputs=inputs, outputs=outputs)

    @staticmethod
    def facts(values: Rows) -> dict[str, Any]:
        """The first operation that differs, and how many were compared."""
        rows = values["recomputed"]
        for row in rows:
            parts = [row[name] for name in ("inputs", "outputs")]
            inputs, outputs = (one if isinstance(one, list) else [one] for one in parts)
            alike = []
            for before, after, module in zip(inputs, outputs, row["modules"], strict=True):
                if before <= DIFFERENT:
                    alike.append((after, module))
            share = min((after for after, _ in alike), default=0.0)
            if share > DIFFERENT:
                modules = {module for _, module in alike}
                return {
                    "recomputed": len(rows),
                    "recomputed_otherwise": (modules.pop() if len(modules) == 1 else "", row["op"]),
                    "recomputed_share": share,
                }
        return {"recomputed": len(rows)}


def _elements(tensor: Tensor) -> Tensor:
    return sampled(plain(tensor), ELEMENTS).clone()


def _shares(earlier: list[Tensor], now: Tensor) -> Tensor:
    """For each, the share of elements that differ from those of now by more than rounding."""
    one, other = torch.stack(earlier).float(), now.float()
    allowed = ROUNDING.get(now.dtype, ROUNDING_IN_FLOAT)
    # what is not finite in both is no difference: a mask is infinite both times
    apart = (one - other).abs() > allowed * (other.abs() + other.abs().nan_to_num(0, 0, 0).mean())
    return apart.float().mean(1) if now.numel() else apart.float().sum(1)
