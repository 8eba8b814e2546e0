"""Public optimizers in short form, written from their published algorithms: what a guard meets
outside torch.optim.

Each keeps the trait that makes it hard to guard: gradients filled in where there are none, state
that belongs to no parameter, plain attributes, inner optimizers, objects in the state, a closure
that is called twice.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Params = Iterable[Tensor]


def evaluated(closure: Any) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class Lookahead(Optimizer):
    """Slow weights and a counter as plain attributes; the update is made by an optimizer inside."""

    def __init__(self, base: Optimizer, k: int = 3, alpha: float = 0.5) -> None:
        self.base, self.k, self.alpha, self.count = base, k, alpha, 0
        super().__init__(base.param_groups, dict(base.defaults))
        self.param_groups = base.param_groups
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)  # type: ignore[func-returns-value]
        self.count += 1
        if self.count % self.k == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for p, s in zip(group["params"], slow, strict=True):
                    s.add_(p - s, alpha=self.alpha)
                    p.copy_(s)
        return loss


class SAM(Optimizer):
    """Climbs to the worst point nearby and takes the gradient there: two evaluations a step."""

    def __init__(
        self, params: Params, base: Callable[..., Optimizer], rho: float = 0.05, **settings: Any
    ) -> None:
        super().__init__(params, {"rho": rho, **settings})
        self.base_optimizer = base(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        norm = torch.stack(
            [p.grad.norm() for g in self.param_groups for p in g["params"] if p.grad is not None]
        ).norm()
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old_p"] = p.data.clone()
                    p.add_(p.grad * scale)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, (
            "Sharpness Aware Minimization requires closure, but it was not provided"
        )
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()


class MADGRAD(Optimizer):
    """Counts its steps under `state["k"]`, which belongs to no parameter."""

    def __init__(
        self, params: Params, lr: float = 1e-2, momentum: float = 0.9, eps: float = 1e-6
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = evaluated(closure)
        if "k" not in self.state:
            self.state["k"] = torch.tensor([0], dtype=torch.long)
        k = self.state["k"].item()
        for group in self.param_groups:
            factor, share = group["lr"] * math.sqrt(k + 1), 1 - group["momentum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "s" not in state:
                    state["grad_sum_sq"], state["s"] = torch.zeros_like(p), torch.zeros_like(p)
                    state["x0"] = p.detach().clone()
                state["grad_sum_sq"].addcmul_(p.grad, p.grad, value=factor)
                state["s"].add_(p.grad, alpha=factor)
                z = state["x0"] - state["s"] / (state["grad_sum_sq"].pow(1 / 3) + group["eps"])
                p.mul_(1 - share).add_(z, alpha=share)
        self.state["k"] += 1
        return loss


class ScheduleFree(Optimizer):
    """No schedule: numbers in the groups move at every step."""

    def __init__(
        self, params: Params, lr: float = 0.05, momentum: float = 0.9, warmup: int = 4
    ) -> None:
        settings = {
            "lr": lr,
            "momentum": momentum,
            "warmup": warmup,
            "k": 0,
            "weight_sum": 0.0,
        }
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = evaluated(closure)
        for group in self.param_groups:
            lr = group["lr"] * min(1.0, (group["k"] + 1) / group["warmup"])
            group["weight_sum"] += lr**2
            share = lr**2 / group["weight_sum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(z, share).add_(p.grad, alpha=lr * (group["momentum"] * (1 - share) - 1))
                z.sub_(p.grad, alpha=lr)
            group["k"] += 1
        return loss


class Sophia(Optimizer):
    """Clips by a diagonal curvature refreshed every few steps; the counter is an attribute."""

    def __init__(self, params: Params, lr: float = 1e-2, rho: float = 0.04, every: int = 3) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})
        self.every, self.calls = every, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = evaluated(closure)
        refresh = self.calls % self.every == 0
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"], state["hessian"] = torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad, 0.04)
                if refresh:
                    state["hessian"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                ratio = (state["exp_avg"].abs() / (group["rho"] * state["hessian"] + 1e-15)).clamp(
                    max=1
                )
                p.addcmul_(state["exp_avg"].sign(), ratio, value=-group["lr"])
        return loss


class OwnStateDict(Optimizer):
    """Keeps everything in attributes and writes its own `state_dict`."""

    def __init__(self, params: Params, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.momenta = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]
        self.numbers = {"updates": 0, "scale": 1.0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = evaluated(closure)
        self.numbers["updates"] += 1
        self.numbers["scale"] *= 0.99
        for p, held in zip(
            (p for g in self.param_groups for p in g["params"]), self.momenta, strict=True
        ):
            if p.grad is not None:
                held.mul_(0.9).add_(p.grad)
                p.add_(held, alpha=-self.param_groups[0]["lr"] * self.numbers["scale"])
        return loss

    def state_dict(self) -> dict[str, Any]:
        held = {"momenta": [m.clone() for m in self.momenta], "numbers": dict(self.numbers)}
        return {**super().state_dict(), "own": held}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own = state_dict["own"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "own"})
        self.momenta, self.numbers = [m.clone() for m in own["momenta"]], dict(own["numbers"])


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


def _lookahead(params: Params) -> Lookahead:
    return Lookahead(torch.optim.Adam(params, lr=1e-2))


def _sam(params: Params) -> SAM:
    return SAM(params, torch.optim.SGD, lr=0.05, momentum=0.9)


def _adamw_8bit(params: Params) -> Optimizer:
    """The real one of bitsandbytes: moments are bytes with a scale for each block."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the import, about kernels that are not needed here
        from bitsandbytes.optim import AdamW8bit
    # small tensors would be kept in 32 bits
    optimizer: Optimizer = AdamW8bit(params, lr=0.01, min_8bit_size=1)
    return optimizer


OPTIMIZERS: dict[str, Callable[[Params], Optimizer]] = {
    "muon": Muon,
    "insisting": Insisting,
    "lookahead": _lookahead,
    "sam": _sam,
    "madgrad": MADGRAD,
    "schedule-free": ScheduleFree,
    "sophia": Sophia,
    "shampoo": Shampoo,
    "galore": GaLore,
    "own-state-dict": OwnStateDict,
    "adamw-8bit": _adamw_8bit,
}
"""Each takes parameters of one or two dimensions. `sam` calls its closure twice and cannot step
without one.
"""
