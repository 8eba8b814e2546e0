"""Norm of the gradients, and through it an exact finite test, in one foreach pass.

A finite norm proves that every element is finite. Only a non-finite norm needs the slow exact test,
because finite elements can overflow it. The norm is taken in fp32 for half-precision gradients; the
norm that clips is rounded the way `torch.nn.utils.clip_grad_norm_` rounds it, so that a guarded run
clips bit for bit as a bare one does.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from stepguard.tensors.torch_private import foreach_mul_, foreach_norm
from stepguard.tensors.values import HALVES, dense_values, local_part


@dataclass(frozen=True, slots=True)
class GradientNorm:
    """0-dim tensors, still on the device."""

    total: Tensor
    """fp32 (fp64 for fp64 gradients): what is read and judged."""
    clip: Tensor
    """What torch's own clipping would have used."""
    least: Tensor | None = None
    """The smallest norm of one parameter's gradient, where it was asked for."""
    single: Tensor | None = None
    """The norm of each gradient, where the total was made of them."""
    clipped: bool = False
    """The gradients were clipped when the norm was taken."""
    shards: bool = False
    """The norm of all ranks, of gradients of which each rank holds a part."""
    squares: Tensor | None = None
    """Of sharded gradients that were measured on this rank only: what it adds to the square of the
    norm of all ranks."""


@torch.no_grad()
def gradient_norm(
    grads: Sequence[Tensor], *, each: bool = False, wide: bool = False
) -> GradientNorm | None:
    """Return the norm of all gradients; None if there are none.

    `each`: the smallest norm of one parameter as well, where all are of one kind. `wide`: in
    float64 where the device has it, for gradients that carry a loss scale.
    """
    dense = [dense_values(g) for g in grads]
    if not dense:
        return None
    if any(g.dtype in HALVES for g in dense):
        return _half_precision_norm(dense)
    if _of_one_kind(dense, plain=not each):
        # As get_total_norm does it, so the total is the same bit for bit.
        dtype = torch.float64 if wide and dense[0].device.type != "mps" else None
        every = torch.stack(list(foreach_norm(dense, 2, dtype=dtype)))
        total = torch.linalg.vector_norm(every)
        return GradientNorm(total, total, every.min() if each else None, single=every)
    total = get_total_norm(dense)
    return GradientNorm(total, total)


def _of_one_kind(dense: Sequence[Tensor], *, plain: bool) -> bool:
    """One device, one dtype; with `plain` no subclass, which torch measures one by one."""
    if len({(g.device, g.dtype) for g in dense}) > 1:
        return False
    return not plain or all(type(g) is Tensor for g in dense)


def _half_precision_norm(dense: Sequence[Tensor]) -> GradientNorm:
    device = dense[0].device
    wide: list[Tensor] = []
    rounded: list[Tensor] = []
    for group in _by_device_and_dtype(dense):
        dtype = group[0].dtype
        # CPU and CUDA kernels accumulate half precision in fp32 and round at the end, so this is
        # torch's own number.
        accumulate = torch.float32 if dtype in HALVES else None
        norms = foreach_norm(group, 2, dtype=accumulate)
        wide += [n.to(device) for n in norms]
        rounded += [n.to(device=device, dtype=dtype) for n in norms]
    total = torch.linalg.vector_norm(torch.stack(wide))
    if len({n.dtype for n in rounded}) > 1:
        # torch adds mixed dtypes in an order of its own.
        return GradientNorm(total, get_total_norm(dense))
    return GradientNorm(total, torch.linalg.vector_norm(torch.stack(rounded)))


@torch.no_grad()
def clip(
    params: Iterable[Tensor], max_norm: float, norm: GradientNorm, *, known: float | None = None
) -> None:
    """Clip as torch does. With the norm known on the host, a factor of 1 costs nothing."""
    if norm.clipped or (known is not None and _clearly_below(known, max_norm)):
        return
    if norm.clip is norm.total and not norm.shards:
        clip_grads_with_norm_(params, max_norm, norm.total)
        return
    wide = _factor(max_norm, norm.total)
    rounded = _factor(max_norm, norm.clip).to(wide.dtype)
    # Where the half-precision norm overflows, the fp32 one does not. Chosen on the device, so that
    # the host does not wait.
    factor = torch.where(torch.isfinite(norm.clip), rounded, wide)
    for group in _by_device_and_dtype(_local_gradients(params)):
        foreach_mul_(group, factor.to(group[0].device))


@torch.no_grad()
def scale_gradients(params: Iterable[Tensor], factor: float) -> None:
    """Multiply every gradient in place."""
    for group in _by_device_and_dtype(_local_gradients(params)):
        foreach_mul_(group, factor)


def _local_gradients(params: Iterable[Tensor]) -> list[Tensor]:
    """The gradients, of a DTensor the part on this rank: no foreach kernel mixes both."""
    found: list[Tensor] = []
    for parameter in params:
        if parameter.grad is not None:
            found.append(local_part(parameter.grad))
    return found


def _clearly_below(norm: float, max_norm: float) -> bool:
    """True where torch would multiply by exactly 1, even after half-precision rounding."""
    return math.isfinite(norm) and max_norm / (norm * (1 + 1e-2) + 1e-6) > 1.0


def _factor(max_norm: float, norm: Tensor) -> Tensor:
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


class GradientMark:
    """Tells whether the gradients of a moment are still there. Holds none of them alive."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._parameter: Tensor | None = None
        # One parameter stands for all: loops drop, clip or replace gradients together.
        for parameter in params:
            if parameter.grad is not None:
                self._parameter = parameter
                self._gradient = weakref.ref(parameter.grad)
                self._version = parameter.grad._version
                break

    def gone(self) -> bool:
        """True if the gradients were dropped, replaced or written to since."""
        if self._parameter is None:
            return False
        now = self._parameter.grad
        return now is None or now is not self._gradient() or now._version != self._version


def _by_device_and_dtype(tensors: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups.values()
