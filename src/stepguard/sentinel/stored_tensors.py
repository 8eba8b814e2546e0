"""Test parameters, buffers and optimizer state on the device; name the non-finite ones."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stepguard.sentinel.gradients import gradient_norm
from stepguard.tensors.names import Roots, named_buffers, named_modules, parameter_names
from stepguard.tensors.torch_private import foreach_max
from stepguard.tensors.values import PLAIN, dense_real, elements, is_finite, is_lazy

SCANNED_EACH_STEP = 2**20
"""Elements that are tested after every update: about a quarter of a millisecond."""
STEPS_A_ROUND = 32
"""Updates after which every parameter of a larger model was tested once."""


@torch.no_grad()
def largest(tensors: Iterable[Tensor]) -> Tensor | None:
    """Return one number that is NaN or Inf if a tensor holds NaN or +Inf; None for no tensors.

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


@torch.no_grad()
def root_mean_square(tensors: Iterable[Tensor]) -> Tensor | None:
    """The size of these tensors, on their device: nobody waits for it."""
    plain = [t for t in map(dense_real, tensors) if t.numel() and t.is_floating_point()]
    norm = gradient_norm([t.detach() for t in plain])
    if norm is None:
        return None
    return norm.total / math.sqrt(sum(t.numel() for t in plain))


class RotatingScan:
    """Hands out a long list of tensors one share a step, so that testing all costs little a step.

    A parameter that a step turns non-finite shows at once in the next loss or gradient if the model
    uses it; the scan is for the others, and a round may take a few dozen steps.
    """

    def __init__(self) -> None:
        self._tensors: Sequence[Tensor] = ()
        self._shares: list[list[_Part]] = []
        self._next = 0

    def share(self, tensors: Sequence[Tensor], ignored: Container[int] = ()) -> list[Tensor]:
        """Return the next share without tensors whose id is ignored; all if that is cheap."""
        if tensors is not self._tensors:
            self._tensors = tensors
            self._shares = _shares(tensors)
            self._next = 0
        if not self._shares:
            return []
        self._next = (self._next + 1) % len(self._shares)
        return [part.now() for part in self._shares[self._next] if id(part.tensor) not in ignored]


@dataclass(frozen=True, slots=True)
class _Part:
    """A stretch of a tensor's elements, cut out late: the tensor's memory may be replaced."""

    tensor: Tensor
    count: int
    """Elements of the tensor when it was cut."""
    start: int
    end: int

    def now(self) -> Tensor:
        if is_lazy(self.tensor):
            return self.tensor
        live = self.tensor.detach()
        is_whole = self.end - self.start == self.count
        if is_whole or live.numel() != self.count or not live.is_contiguous():
            return live
        return live.view(-1)[self.start : self.end]


def _shares(tensors: Sequence[Tensor]) -> list[list[_Part]]:
    count = sum(map(elements, tensors))
    most = max(SCANNED_EACH_STEP, math.ceil(count / STEPS_A_ROUND))
    shares: list[list[_Part]] = []
    filled = most
    for tensor in tensors:
        for part in _parts(tensor, most):
            if filled >= most:
                shares.append([])
                filled = 0
            shares[-1].append(part)
            filled += part.end - part.start
    return shares


def _parts(tensor: Tensor, most: int) -> list[_Part]:
    """Cut a tensor into stretches of at most `most` elements, if that takes no copy."""
    count = elements(tensor)
    is_dense = type(tensor) in PLAIN and tensor.layout is torch.strided
    if count <= most or not is_dense or not tensor.is_contiguous():
        return [_Part(tensor, count, 0, count)]
    starts = range(0, count, most)
    return [_Part(tensor, count, start, min(start + most, count)) for start in starts]


def bad_parameters(roots: Roots, optimizer: Optimizer, elsewhere: Container[int] = ()) -> list[str]:
    """Return `param:NAME` of every non-finite parameter whose id is not in `elsewhere`."""
    bad: list[str] = []
    for tensor, name in parameter_names(roots, optimizer):
        if id(tensor) not in elsewhere and not is_finite(tensor):
            bad.append(f"param:{name}")
    return bad


def bad_buffers(roots: Roots) -> list[str]:
    """Return `buffer:NAME` of every non-finite buffer."""
    return [f"buffer:{name}" for name, buffer in named_buffers(roots) if not is_finite(buffer)]


@torch.no_grad()
def extremes(tensor: Tensor) -> Tensor | None:
    """Return smallest and largest element, on the device: both are finite if all elements are."""
    plain = dense_real(tensor)
    if not plain.is_floating_point() or plain.numel() == 0:
        return None
    return torch.stack(torch.aminmax(plain))


def bad_slots(roots: Roots, optimizer: Optimizer) -> list[str]:
    """Return `opt:PARAMETER/SLOT` of every optimizer slot with a non-finite element."""
    names = {id(tensor): name for tensor, name in parameter_names(roots, optimizer)}
    bad: dict[str, None] = {}
    # torch declares tensors as keys; some optimizers use others.
    state: Mapping[Any, Any] = optimizer.state
    for key, slots in state.items():
        for slot, value in _tensors(slots):
            if not is_finite(value):
                bad[f"opt:{names.get(id(key), key)}/{slot}"] = None
    return list(bad)


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """List every tensor that the optimizer keeps."""
    return [value for state in optimizer.state.values() for _, value in _tensors(state)]


def norm_statistics(roots: Roots) -> list[Tensor]:
    """List the running means and variances of norm layers, which must always be finite."""
    found: list[Tensor] = []
    for _, module in named_modules(roots):
        if getattr(module, "track_running_stats", False):
            buffers = module.buffers(recurse=False)
            found += [buffer for buffer in buffers if buffer.is_floating_point()]
    return found


def _tensors(state: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of one parameter's state, also from the lists that LBFGS keeps."""
    if not isinstance(state, Mapping):
        return
    for slot, value in state.items():
        items = value if isinstance(value, list | tuple) else [value]
        for item in items:
            if isinstance(item, Tensor):
                yield slot, item
