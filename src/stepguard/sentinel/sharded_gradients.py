"""The norm of gradients that are spread over ranks.

To clip by, it is taken as torch takes it: a collective of the parameters' own process group, in
which every rank has to take part. To read only, each rank measures its own part, and the squares
are added by the one reduction that the ranks of a guard have anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from stepguard.sentinel.gradients import GradientNorm, gradient_norm
from stepguard.tensors.sharding import fsdp1_parts, is_distributed, parts_of, wrapped_by_fsdp1
from stepguard.tensors.values import at_least_float32


@torch.no_grad()
def norm_over_ranks(
    root: nn.Module, params: Sequence[Tensor], max_norm: float, *, each: bool = False
) -> GradientNorm | None:
    """Return the norm of all gradients of all ranks; None if there are none.

    FSDP1 has no call that only takes the norm: there the gradients are clipped as well.
    `each`: the smallest norm of one parameter's shard as well.
    """
    if wrapped_by_fsdp1(root):
        # A rank may hold no gradient at all, and has to take part.
        total = _clip_fsdp1(root, max_norm)
        return GradientNorm(at_least_float32(total), total, clipped=True)
    grads = [p.grad for p in params if p.grad is not None]
    if not grads:
        return None
    least: Tensor | None = None
    if each:
        local = gradient_norm(grads, each=True)
        least = local.least if local is not None else None
    total = whole(get_total_norm(grads)) if _alike(grads) else _of_several_meshes(grads)
    return GradientNorm(at_least_float32(total), total, least, shards=True)


def whole(norm: Any) -> Tensor:
    """Return a norm as a plain tensor. Of a DTensor every rank has a part: then a collective."""
    full: Tensor = norm.full_tensor() if is_distributed(norm) else norm
    return full


def _clip_fsdp1(root: Any, max_norm: float) -> Tensor:
    total: Tensor = root.clip_grad_norm_(max_norm)
    return total


def _mesh(tensor: Any) -> Any:
    return tensor.device_mesh if is_distributed(tensor) else None


def _alike(grads: Sequence[Tensor]) -> bool:
    first = _mesh(grads[0])
    return all(_mesh(grad) == first for grad in grads)


def _of_several_meshes(grads: Sequence[Tensor]) -> Tensor:
    """torch's own clipping refuses to mix meshes, or plain tensors and DTensors."""
    groups: list[tuple[Any, list[Tensor]]] = []
    for grad in grads:
        mesh = _mesh(grad)
        for known, members in groups:
            if known == mesh:
                members.append(grad)
                break
        else:
            groups.append((mesh, [grad]))
    norms = [at_least_float32(whole(get_total_norm(members))) for _, members in groups]
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0]) for norm in norms]))
    return total


def _least(norms: Sequence[GradientNorm]) -> Tensor | None:
    leasts = [norm.least for norm in norms if norm.least is not None]
    return torch.stack(leasts).min() if leasts else None


class Shares:
    """Which share of the square of its own part of a gradient a rank adds to that of all ranks.

    A part that several ranks hold, as copies, is added by all of them.
    """

    def __init__(self, roots: Iterable[nn.Module], ranks: int) -> None:
        self._ranks = ranks
        self._fsdp1 = fsdp1_parts(roots)
        self._params: Sequence[Tensor] = ()
        self._known: dict[int, float] | None = {}

    @torch.no_grad()
    def norm(self, params: Sequence[Tensor], *, each: bool = False) -> GradientNorm | None:
        """Measure this rank's part of the gradients; None if it has none."""
        shares = self._of(params)
        found: list[tuple[float, GradientNorm]] = []
        for share, gradients in self._grouped(params, shares).items():
            norm = gradient_norm(gradients, each=each)
            if norm is not None:
                found.append((share, norm))
        if not found:
            return None
        first = found[0][1].total
        totals = torch.stack([norm.total.to(first) for _, norm in found])
        total = first if len(found) == 1 else torch.linalg.vector_norm(totals)
        least = _least([norm for _, norm in found])
        if shares is None:
            return GradientNorm(total, total, least)
        weights = totals.new_tensor([share for share, _ in found])
        return GradientNorm(total, total, least, squares=self._squares(totals, weights))

    def _grouped(
        self, params: Sequence[Tensor], shares: dict[int, float] | None
    ) -> dict[float, list[Tensor]]:
        """Gradients by the share of their squares; a parameter that came later is a copy."""
        groups: dict[float, list[Tensor]] = {}
        for parameter in params:
            if parameter.grad is None:
                continue
            share = 0.0
            if shares is not None:
                share = shares.get(id(parameter), 1.0 / self._ranks)
            groups.setdefault(share, []).append(parameter.grad)
        return groups

    def heard(self, norm: Any) -> GradientNorm:
        """The norm that the loop's own clipping took, of which this rank has a part."""
        own = norm.to_local() if is_distributed(norm) else norm
        parts = parts_of(norm, partial=True) if is_distributed(norm) else None
        if parts is None:
            return GradientNorm(own, own)
        share = own.new_tensor(parts / self._ranks)
        return GradientNorm(own, own, squares=self._squares(own, share))

    @staticmethod
    def _squares(norms: Tensor, shares: Tensor) -> Tensor:
        # A norm that float32 can hold may have a square that it cannot.
        return (norms.double().square() * shares).sum()

    def _of(self, params: Sequence[Tensor]) -> dict[int, float] | None:
        """Shares by the id of the parameter; None where a part is not one of the gradient's own."""
        if params is self._params:
            return self._known
        self._params = params
        self._known = {}
        for parameter in params:
            gradient = parameter.grad
            parts: int | None = self._fsdp1.get(id(parameter), 1)
            if is_distributed(parameter):
                parts = parts_of(parameter if gradient is None else gradient)
            if parts is None:
                self._known = None
                break
            self._known[id(parameter)] = parts / self._ranks
        return self._known
