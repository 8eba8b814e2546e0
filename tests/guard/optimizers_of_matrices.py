"""Optimizers that treat a parameter as a matrix: orthogonal updates, preconditioners for each side,
low rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Params = Iterable[Tensor]


def orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration towards the nearest orthogonal matrix."""
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = matrix if matrix.size(0) <= matrix.size(1) else matrix.T
    x = wide / (wide.norm() + 1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x if matrix.size(0) <= matrix.size(1) else x.T


class Muon(Optimizer):
    """Fills missing gradients with zeros, so that hiding them does not stop the update."""

    def __init__(
        self, params: Params, lr: float = 0.02, momentum: float = 0.95, weight_decay: float = 0.01
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = evaluated(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                held = state["momentum_buffer"]
                held.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(held, group["momentum"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(orthogonal(update) if p.ndim == 2 else update, alpha=-group["lr"])
        return loss


class Insisting(Optimizer):
    """Asserts that every parameter has a gradient, as distributed forms of Muon do."""

    def __init__(self, params: Params, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})
        self.updates = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = evaluated(closure)
        for group in self.param_groups:
            for p in group["params"]:
                assert p.grad is not None, "every parameter must have a gradient"
                held = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                held.mul_(0.9).add_(p.grad)
                p.add_(held, alpha=-group["lr"])
        self.updates += 1
        return loss


class Shampoo(Optimizer):
    """Lists of tensors in the state: one preconditioner and its root for each dimension, refreshed
    now and then.
    """

    def __init__(self, params: Params, lr: float = 0.05, every: int = 2) -> None:
        super().__init__(params, {"lr": lr})
        self.every = every

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = evaluated(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["precond"] = [1e-4 * torch.eye(size) for size in p.shape]
                    state["root"] = [torch.eye(size) for size in p.shape]
                state["step"] += 1
                update = p.grad
                for dim in range(p.ndim):
                    flat = update.movedim(dim, 0).reshape(p.shape[dim], -1)
                    state["precond"][dim].add_(flat @ flat.T)
                    if state["step"] % self.every == 1:
                        values, vectors = torch.linalg.eigh(state["precond"][dim])
                        power = values.clamp(min=1e-6).pow(-1 / (2 * p.ndim))
                        state["root"][dim] = (vectors * power) @ vectors.T
                    shape = update.movedim(dim, 0).shape
                    update = (state["root"][dim] @ flat).reshape(shape).movedim(0, dim)
                p.add_(update, alpha=-group["lr"])
        return loss


class Projector:
    """An object of the user's own in the optimizer's state."""

    def __init__(self, rank: int, every: int) -> None:
        self.rank, self.every, self.seen = rank, every, 0
        self.basis: Tensor | None = None

    def project(self, gradient: Tensor) -> Tensor:
        if self.basis is None or self.seen % self.every == 0:
            self.basis = torch.linalg.svd(gradient, full_matrices=False)[0][
                :, : self.rank
            ].contiguous()
        self.seen += 1
        return self.basis.T @ gradient

    def back(self, update: Tensor) -> Tensor:
        assert self.basis is not None
        return self.basis @ update


class GaLore(Optimizer):
    """Moments in a low-rank space, found by a projector object that sits in the state."""

    def __init__(self, params: Params, lr: float = 1e-2, rank: int = 2, every: int = 3) -> None:
        super().__init__(params, {"lr": lr, "rank": rank, "every": every})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = evaluated(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, gradient = self.state[p], p.grad
                if p.ndim == 2:
                    gradient = state.setdefault(
                        "projector", Projector(group["rank"], group["every"])
                    ).project(gradient)
                if "exp_avg" not in state:
                    state["step"] = 0
                    state["exp_avg"], state["exp_avg_sq"] = (
                        torch.zeros_like(gradient),
                        torch.zeros_like(gradient),
                    )
                state["step"] += 1
                state["exp_avg"].lerp_(gradient, 0.1)
                state["exp_avg_sq"].mul_(0.99).addcmul_(gradient, gradient, value=0.01)
                update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8)
                p.add_(
                    state["projector"].back(update) if p.ndim == 2 else update, alpha=-group["lr"]
                )
        return loss


def evaluated(closure: Any) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
