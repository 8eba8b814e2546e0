"""Mixtures of experts whose routers collapse, or cannot tell their experts apart."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.silent.loops import WIDTH, Loop
from zoo.silent.plant import plant

EXPERTS = 8


class Mixture(nn.Module):
    """Each token goes to its best experts; what they say is added to it."""

    def __init__(self, chosen: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.dtype = torch.float32
        self.offset = 0.0
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weight, bias = self.gate.weight.to(self.dtype), self.gate.bias.to(self.dtype)
        scores = F.linear(self.norm(tokens).to(self.dtype), weight, bias) + self.offset
        shares = scores.float().softmax(-1)
        weights, chosen = shares.topk(self.chosen, -1)
        used = F.one_hot(chosen, EXPERTS).float().mean((0, 1))
        self.balance = EXPERTS * (shares.mean(0) * used).sum()
        made = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            made = made.index_add(0, rows, weights[rows, places, None] * expert(tokens[rows]))
        return x + made.reshape(x.shape)


class Fused(nn.Module):
    """Its experts are matrices of one tensor, and it takes one of them for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = True
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.Parameter(0.1 * torch.randn(EXPERTS, WIDTH, WIDTH))
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        seen = F.layer_norm(tokens, (WIDTH,)) if self.normed else tokens
        shares = self.router(seen).softmax(-1)
        weights, chosen = shares.max(-1)
        used = F.one_hot(chosen, EXPERTS).float().mean(0)
        self.balance = EXPERTS * (shares.mean(0) * used).sum()
        every = torch.einsum("tw,ewv->tev", tokens, self.experts)
        taken = every[torch.arange(len(tokens)), chosen]
        return x + (weights[:, None] * taken).reshape(x.shape)


def with_mixture(loop: Loop, mixture: nn.Module) -> None:
    """Put it before the head of the model, and train it as well."""
    loop.model.head = nn.Sequential(mixture, loop.model.head)
    loop.train_with(torch.optim.Adam(loop.model.parameters(), lr=3e-3))


def add_balance(loop: Loop, mixture: Mixture | Fused, weight: float) -> None:
    plain = loop.loss
    loop.loss = lambda outputs, targets: plain(outputs, targets) + weight * mixture.balance


# --- SG930: a router that uses few of its experts, or cannot tell them apart ----------------------


@plant("SG930", "classifier")
def balance_is_subtracted(loop: Loop, wrong: bool) -> None:
    """The wrong sign before the loss that balances the loads; the twin has the right one."""
    mixture = Mixture(1)
    with_mixture(loop, mixture)
    loop.train_with(torch.optim.Adam(loop.model.parameters(), lr=2e-2 if wrong else 3e-3))
    add_balance(loop, mixture, -1.0 if wrong else 0.1)


@plant("SG930", "transformer")
def gate_begins_far_from_zero(loop: Loop, wrong: bool) -> None:
    """A bias of the gate that is drawn far too large; the twin's is torch's."""
    mixture = Mixture(2)
    if wrong:
        nn.init.normal_(mixture.gate.bias, std=10.0)
    with_mixture(loop, mixture)
    add_balance(loop, mixture, 0.1)


@plant("SG930", "segmenter")
def matrices_that_nobody_takes(loop: Loop, wrong: bool) -> None:
    """Experts in one tensor, a gate that sees positive features, and a loss that would balance it
    which is never added; the twin adds it, and norms the features.
    """
    mixture = Fused()
    mixture.normed = not wrong
    wide = nn.Conv2d(16, WIDTH, 1)
    last = loop.model.head

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.mixture, self.last = (
                wide,
                mixture,
                nn.Conv2d(WIDTH, last.out_channels, 1),
            )

        def forward(self, x: Tensor) -> Tensor:
            seen = self.wide(x).relu().permute(0, 2, 3, 1)
            return self.last(self.mixture(seen).permute(0, 3, 1, 2))  # type: ignore[no-any-return]

    loop.model.head = Head()
    loop.train_with(torch.optim.Adam(loop.model.parameters(), lr=3e-3))
    if not wrong:
        add_balance(loop, mixture, 0.1)


@plant("SG930", "classifier")
def scores_too_large_for_bfloat16(loop: Loop, wrong: bool) -> None:
    """An offset of 100 before the softmax, which should not matter; the twin has none."""
    mixture = Mixture(2)
    mixture.dtype = torch.bfloat16
    mixture.offset = 100.0 if wrong else 0.0
    with_mixture(loop, mixture)
    add_balance(loop, mixture, 0.1)
