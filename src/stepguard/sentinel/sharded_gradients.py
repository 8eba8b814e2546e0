"""The norm of gradients that are spread over ranks, and clipping by it, as torch does it.

Every rank has to take part: the norm is a collective of the parameters' own process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from stepguard.sentinel.gradients import GradientNorm, gradient_norm
from stepguard.tensors.sharding import is_distributed, wrapped_by_fsdp1
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
