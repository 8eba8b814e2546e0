"""Gradients of single parameters far above all they have been, before they enter the optimizer's
moments. Opt-in.

Each tensor is compared with its own history: the logarithm of its norm over the last committed
steps. The norms travel in the step's one packet, so nothing waits for the device once more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stepguard.tensors.names import parameter_names
from stepguard.tensors.torch_private import foreach_norm
from stepguard.tensors.values import HALVES, dense_values

Mode = Literal["note", "clip", "skip"]
FEWEST = 32
"""Committed steps with a gradient before anything is said of a tensor."""
WINDOW = 128
SIGMAS = 10.0
"""Robust deviations of the logarithm above its median."""
TIMES = 10.0
"""And times the largest norm of the window."""
GROWTH = 2.0
"""What is clipped or skipped counts as so many times the largest: a level that stays is let through
after a while.
"""
LEAST_SIGMA = 0.02
MAD_TO_SIGMA = 1.4826
MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class Outlier:
    """One tensor of one step."""

    step: int
    name: str
    norm: float
    usual: float
    """The largest norm of the window."""


class Outliers:
    """The history of one guard's gradients, tensor by tensor."""

    def __init__(self, mode: Mode, roots: Mapping[str, nn.Module], optimizer: Optimizer) -> None:
        self._mode, self._roots, self._optimizer = mode, roots, optimizer
        self._rows: dict[int, deque[float]] = {}
        """By identity of the parameter: logarithms of the norms of its committed gradients."""
        self._largest: dict[int, float] = {}
        self._measured: list[Tensor] = []
        self._present: list[tuple[Tensor, float]] = []
        self._found: dict[int, Outlier] = {}
        self.committed_one: Outlier | None = None
        """The last outlier that went into the moments as it was."""

    def measure(self, parameters: list[Tensor]) -> list[Tensor]:
        """The norm of each gradient, on the device; read back by `read`."""
        self._measured = [p for p in parameters if p.grad is not None]
        if not self._measured:
            return []
        return _norms([dense_values(p.grad) for p in self._measured if p.grad is not None])

    def read(self, step: int, norms: list[float], scale: float) -> None:
        """The numbers of this step; `scale` is what the gradients still carry."""
        self._found = {}
        self._present = [(p, norm / scale) for p, norm in zip(self._measured, norms, strict=False)]
        for parameter, norm in self._present:
            usual = self._exceeds(id(parameter), norm)
            if usual is not None:
                self._found[id(parameter)] = Outlier(step, "", norm, usual)
        if self._found:
            names = {id(p): name for p, name in parameter_names(self._roots, self._optimizer)}
            self._found = {
                k: Outlier(o.step, names.get(k, "?"), o.norm, o.usual)
                for k, o in self._found.items()
            }

    def _exceeds(self, key: int, norm: float) -> float | None:
        """The usual largest norm, where this one is far outside."""
        row = self._rows.get(key)
        if row is None or len(row) < FEWEST or not math.isfinite(norm):
            return None
        largest = self._largest[key]
        if norm <= TIMES * math.exp(largest):
            return None
        values = torch.tensor(list(row), dtype=torch.float64)
        middle = values.median()
        sigma = max(float((values - middle).abs().median()) * MAD_TO_SIGMA, LEAST_SIGMA)
        return math.exp(largest) if math.log(norm) - float(middle) > SIGMAS * sigma else None

    def act(self) -> Callable[[], None] | None:
        """Keep the outliers out of this update; gives the call that puts skipped gradients back,
        None if none are.
        """
        if not self._found or self._mode == "note":
            return None
        ours = [p for p, _ in self._present if id(p) in self._found]
        kept = [(p, p.grad) for p in ours]
        for parameter, gradient in kept:
            outlier = self._found[id(parameter)]
            if self._mode == "skip":
                parameter.grad = None
            elif gradient is not None:
                gradient.mul_(outlier.usual / outlier.norm)
        return (lambda: _give_back(kept)) if self._mode == "skip" else (lambda: None)

    def words(self) -> str:
        """What was found in this step; empty where nothing was."""
        if not self._found:
            return ""
        done = {
            "note": "told, nothing done",
            "clip": "clipped to that",
            "skip": "left out of this update",
        }
        named = [
            f"{o.name} {o.norm:.4g} (usually up to {o.usual:.4g})"
            for o in list(self._found.values())[:MOST_NAMED]
        ]
        more = f" and {len(self._found) - MOST_NAMED} more" if len(self._found) > MOST_NAMED else ""
        return f"gradient far above all before it: {', '.join(named)}{more}; {done[self._mode]}"

    def committed(self) -> None:
        """The update went through: what went into it is history."""
        for parameter, norm in self._present:
            if not (math.isfinite(norm) and norm > 0.0):
                continue
            outlier = self._found.get(id(parameter))
            if outlier is not None and self._mode != "note":
                norm = min(norm, GROWTH * outlier.usual)
            self._remember(id(parameter), math.log(norm))
        if self._found and self._mode == "note":
            self.committed_one = max(self._found.values(), key=lambda o: o.norm / o.usual)
        self._present, self._found = [], {}

    def _remember(self, key: int, value: float) -> None:
        row = self._rows.setdefault(key, deque(maxlen=WINDOW))
        leaves = row[0] if len(row) == WINDOW else -math.inf
        row.append(value)
        before = self._largest.get(key, -math.inf)
        self._largest[key] = max(row) if leaves >= before > -math.inf else max(before, value)


def _norms(gradients: list[Tensor]) -> list[Tensor]:
    """One foreach pass for each device and dtype, in the order of the gradients; half precision
    adds up in fp32.
    """
    norms: list[Tensor | None] = [None] * len(gradients)
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, gradient in enumerate(gradients):
        groups.setdefault((gradient.device, gradient.dtype), []).append(index)
    for (_, dtype), members in groups.items():
        chosen = [gradients[index].detach() for index in members]
        found = (
            foreach_norm(chosen, 2, dtype=torch.float32)
            if dtype in HALVES
            else foreach_norm(chosen)
        )
        for index, norm in zip(members, found, strict=True):
            norms[index] = norm
    return [norm for norm in norms if norm is not None]


def _give_back(kept: list[tuple[Tensor, Tensor | None]]) -> None:
    for parameter, gradient in kept:
        parameter.grad = gradient
