"""Find gradients of single parameters far above all they have been, before the update. Opt-in.

Each tensor is compared with its own history: the logarithm of its norm over the last committed
steps. The norms travel in the step's one packet, so nothing waits for the device once more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stepguard.tensors.names import parameter_names
from stepguard.tensors.torch_private import foreach_norm
from stepguard.tensors.values import HALVES, dense_values

FEWEST = 32
"""Committed steps with a gradient before anything is said of a tensor."""
WINDOW = 128
SIGMAS = 10.0
"""Robust deviations of the logarithm above its median."""
TIMES = 10.0
"""An outlier must also be this many times the largest norm of the window."""
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

    def __init__(self, roots: Mapping[str, nn.Module], optimizer: Optimizer) -> None:
        self._roots = roots
        self._optimizer = optimizer
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
        self._measured = []
        gradients: list[Tensor] = []
        for parameter in parameters:
            if parameter.grad is not None:
                self._measured.append(parameter)
                gradients.append(dense_values(parameter.grad))
        # One foreach pass for each device and dtype; the norms in the order of the gradients.
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, gradient in enumerate(gradients):
            groups.setdefault((gradient.device, gradient.dtype), []).append(index)
        norms: dict[int, Tensor] = {}
        for (_, dtype), indices in groups.items():
            chosen = [gradients[index].detach() for index in indices]
            # squares of half precision overflow early, so they are added up in fp32
            accumulate = torch.float32 if dtype in HALVES else None
            found = foreach_norm(chosen, 2, dtype=accumulate)
            norms.update(zip(indices, found, strict=True))
        return [norms[index] for index in range(len(gradients))]

    def read(self, step: int, norms: list[float], scale: float) -> None:
        """Take the numbers of this step; `scale` is what the gradients still carry."""
        self._found = {}
        self._present = []
        for parameter, scaled in zip(self._measured, norms, strict=False):
            norm = scaled / scale
            self._present.append((parameter, norm))
            # The usual largest norm, where this one is far outside.
            key = id(parameter)
            row = self._rows.get(key)
            if row is None or len(row) < FEWEST or not math.isfinite(norm):
                usual = None
            else:
                largest = self._largest[key]
                if norm <= TIMES * math.exp(largest):
                    usual = None
                else:
                    values = torch.tensor(list(row), dtype=torch.float64)
                    middle = values.median()
                    sigma = max(float((values - middle).abs().median()) * MAD_TO_SIGMA, LEAST_SIGMA)
                    if math.log(norm) - float(middle) <= SIGMAS * sigma:
                        usual = None
                    else:
                        usual = math.exp(largest)
            if usual is not None:
                self._found[id(parameter)] = Outlier(step, "?", norm, usual)
        if self._found:
            self._name_found()

    def _name_found(self) -> None:
        # names cost a walk over the model, so only where something was found
        for parameter, name in parameter_names(self._roots, self._optimizer):
            if id(parameter) in self._found:
                self._found[id(parameter)] = replace(self._found[id(parameter)], name=name)

    def words(self) -> str:
        """What was found in this step; empty where nothing was."""
        if not self._found:
            return ""
        named: list[str] = []
        for outlier in list(self._found.values())[:MOST_NAMED]:
            usual = f"usually up to {outlier.usual:.4g}"
            named.append(f"{outlier.name} {outlier.norm:.4g} ({usual})")
        said = ", ".join(named)
        if len(self._found) > MOST_NAMED:
            said += f" and {len(self._found) - MOST_NAMED} more"
        return f"gradient far above every earlier one: {said}; reported, no action taken"

    def committed(self) -> None:
        """Remember what went into an update that went through."""
        for parameter, norm in self._present:
            if not (math.isfinite(norm) and norm > 0.0):
                continue
            key = id(parameter)
            value = math.log(norm)
            row = self._rows.setdefault(key, deque(maxlen=WINDOW))
            largest = self._largest.get(key, -math.inf)
            # only where the largest falls out of the window does the whole row have to be read
            drops_largest = len(row) == WINDOW and row[0] >= largest
            row.append(value)
            self._largest[key] = max(row) if drops_largest else max(largest, value)
        if self._found:
            self.committed_one = max(self._found.values(), key=lambda o: o.norm / o.usual)
        self._present = []
        self._found = {}
