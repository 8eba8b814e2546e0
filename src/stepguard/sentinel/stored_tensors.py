"""Parameters, buffers and optimizer state: a cheap finite test on the device, and a scan that names
the bad ones.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from stepguard.tensors.names import named_buffers, parameter_names
from stepguard.tensors.torch_private import foreach_max
from stepguard.tensors.values import dense_real, elements, is_finite

CHEAP_LOOK = 2**20
"""Elements that are looked at after every update, whatever it costs: about a quarter of a
millisecond.
"""
TURNS = 32
"""Updates after which every parameter of a larger model has been looked at."""


@torch.no_grad()
def largest(tensors: Iterable[Tensor]) -> Tensor | None:
    """One number that is NaN or Inf when a tensor holds NaN or +Inf; None for no tensors.

    A maximum is the cheapest pass that carries NaN. A lone -Inf passes it and is caught by the loss
    or gradient it ruins one step later; half-precision groups, where updates overflow in earnest,
    get the exact test instead.
    """
    plain = [t for t in map(dense_real, tensors) if t.numel() and t.is_floating_point()]
    if not plain:
        return None
    if len({(t.device, t.dtype) for t in plain}) == 1:
        return torch.stack(list(foreach_max(plain))).float().max()
    device = plain[0].device
    return torch.stack([t.max().to(device=device, dtype=torch.float32) for t in plain]).max()


class InTurn:
    """Hands out large lists of tensors a share at a time, so that a look at all of them costs
    little a step.

    A parameter that a step turns non-finite shows at once in the next loss or gradient if the model
    uses it; the look is for the others, and may take a few dozen steps to come round.
    """

    def __init__(self) -> None:
        self._tensors: Sequence[Tensor] = ()
        self._shares: list[list[_Part]] = []
        self._next = 0

    def share(self, tensors: Sequence[Tensor], ignored: Container[int] = ()) -> list[Tensor]:
        """The next share, but for tensors whose id is ignored; all of them where that is cheap."""
        if tensors is not self._tensors:
            self._tensors, self._shares, self._next = tensors, _shares(tensors), 0
        if not self._shares:
            return []
        self._next = (self._next + 1) % len(self._shares)
        return [part.now() for part in self._shares[self._next] if id(part.tensor) not in ignored]


@dataclass(frozen=True, slots=True)
class _Part:
    """A stretch of a tensor's elements. Cut out when it is looked at: the tensor's memory may be
    another by then.
    """

    tensor: Tensor
    count: int
    """Elements of the tensor when it was cut."""
    start: int
    end: int

    def now(self) -> Tensor:
        if is_lazy(self.tensor):
            return self.tensor
        live = self.tensor.detach()
        if (
            self.end - self.start == self.count
            or live.numel() != self.count
            or not live.is_contiguous()
        ):
            return live
        return live.view(-1)[self.start : self.end]


def _shares(tensors: Sequence[Tensor]) -> list[list[_Part]]:
    most = max(CHEAP_LOOK, math.ceil(sum(map(elements, tensors)) / TURNS))
    shares: list[list[_Part]] = []
    filled = most
    for part in (part for tensor in tensors for part in _parts(tensor, most)):
        if filled >= most:
            shares.append([])
            filled = 0
        shares[-1].append(part)
        filled += part.end - part.start
    return shares


def _parts(tensor: Tensor, most: int) -> list[_Part]:
    """The whole tensor, or stretches of at most so many elements where it can be cut without a
    copy.
    """
    count = elements(tensor)
    plain = (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
    )
    if not plain or count <= most:
        return [_Part(tensor, count, 0, count)]
    return [
        _Part(tensor, count, start, min(start + most, count)) for start in range(0, count, most)
    ]


def bad_parameters(
    roots: Mapping[str, nn.Module], optimizer: Optimizer, elsewhere: Container[int] = ()
) -> list[str]:
    """`param:NAME` for every parameter with a non-finite element, but for those whose id is
    `elsewhere`.
    """
    names = parameter_names(roots, optimizer)
    return [
        f"param:{name}"
        for tensor, name in names
        if id(tensor) not in elsewhere and not is_finite(tensor)
    ]


def bad_buffers(roots: Mapping[str, nn.Module]) -> list[str]:
    """`buffer:NAME` for every non-finite buffer."""
    return [f"buffer:{name}" for name, buffer in named_buffers(roots) if not is_finite(buffer)]


@torch.no_grad()
def extremes(tensor: Tensor) -> Tensor | None:
    """Smallest and largest element, still on the device: both are finite when all are."""
    plain = dense_real(tensor)
    if not plain.is_floating_point() or plain.numel() == 0:
        return None
    return torch.stack(torch.aminmax(plain))


def bad_slots(optimizer: Optimizer) -> list[str]:
    """`opt:SLOT` for every optimizer slot with a non-finite element."""
    slots = {
        slot: None
        for state in optimizer.state.values()
        for slot, value in _tensors(state)
        if not is_finite(value)
    }
    return [f"opt:{slot}" for slot in slots]


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Every tensor the optimizer keeps."""
    return [value for state in optimizer.state.values() for _, value in _tensors(state)]


def norm_statistics(roots: Mapping[str, nn.Module]) -> list[Tensor]:
    """Floating-point running statistics of norm layers: these must always be finite."""
    return [
        buffer
        for root in roots.values()
        for module in root.modules()
        if getattr(module, "track_running_stats", False)
        for buffer in module.buffers(recurse=False)
        if buffer.is_floating_point()
    ]


def _tensors(state: Any) -> Iterator[tuple[str, Tensor]]:
    """Tensors of one parameter's state, lists of tensors (LBFGS) included."""
    for slot, value in state.items() if isinstance(state, Mapping) else ():
        if isinstance(value, Tensor):
            yield slot, value
        elif isinstance(value, list | tuple):
            yield from ((slot, item) for item in value if isinstance(item, Tensor))
