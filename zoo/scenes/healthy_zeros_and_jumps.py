"""Healthy runs: observers, margins that hold, restarts, first rewards, logged infinities."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Scene, control
from zoo.scenes.gradients import mse
from zoo.scenes.parts import INF, chain, randn, sgd, tokens, uniform
from zoo.scenes.preference_losses import Bigram, token_log_probs


class RangeObserver(nn.Module):
    """Rounds to 255 levels between the extremes seen so far."""

    lowest: Tensor
    highest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("lowest", torch.tensor(INF))
        self.register_buffer("highest", torch.tensor(-INF))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.lowest.copy_(torch.minimum(self.lowest, x.min()))
            self.highest.copy_(torch.maximum(self.highest, x.max()))
            level = (self.highest - self.lowest).clamp_min(1e-6) / 255
            rounded = (x / level).round() * level
        return x + (rounded - x).detach()


class Quantised(nn.Module):
    """A branch that never runs keeps its observer as it began."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.seen = nn.Linear(4, 8), RangeObserver()
        self.last, self.seen_last = nn.Linear(8, 2), RangeObserver()
        self.other, self.seen_other = nn.Linear(8, 2), RangeObserver()

    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        hidden = self.seen(self.first(x).relu())
        out: Tensor = (
            self.seen_other(self.other(hidden)) if other else self.seen_last(self.last(hidden))
        )
        return out


@control("pytorch/pytorch#43789", "pytorch/pytorch#87708")
def ok_observers_start_at_inf(fixed: bool) -> Scene:
    """Quantisation-aware training: extremes start at +inf and -inf, and one pair of them stays
    there.
    """
    torch.manual_seed(0)
    model = Quantised()

    def batch(step: int) -> Batch:
        x = randn(16, 4, seed=step)
        return {"x": x, "y": (x.sum(1) > 0).long()}

    return Scene(
        model=model,
        batch=batch,
        loss=lambda model, b: F.cross_entropy(model(b["x"]), b["y"]),
        optimizer=sgd(model, 0.3),
        steps=10,
    )


@control("KevinMusgrave/pytorch-metric-learning#268", "adambielski/siamese-triplet#9")
def ok_triplet_loss_zero_for_most_batches(fixed: bool) -> Scene:
    """Most batches keep the margin, so loss and gradients are exactly 0; now and then there is a
    hard one.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def batch(step: int) -> Batch:
        x = randn(6, 4, seed=step)
        easy = step % 4 != 3
        near = x + (1e-3 if easy else 1.0) * randn(6, 4, seed=step + 1)
        far = -3 * x.sign() * (x.abs() + 1) if easy else x + randn(6, 4, seed=step + 2)
        return {"x": x, "near": near, "far": far}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        anchor, near, far = model(b["x"]), model(b["near"]), model(b["far"])
        return F.relu((anchor - near).pow(2).sum(1) - (anchor - far).pow(2).sum(1) + 0.05).mean()

    optimizer = sgd(model, 0.01, momentum=0.9)
    return Scene(model=model, batch=batch, loss=loss, optimizer=optimizer, steps=12, clip=1.0)


@control("ivadomed/ivadomed#57", "pytorch/pytorch#23480")
def ok_cosine_warm_restarts(fixed: bool) -> Scene:
    """The rate falls to almost 0 and jumps back more than a hundredfold every five steps, as
    intended.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = sgd(model, 0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=5, eta_min=2e-5)
    truth = randn(6, 1, seed=12)

    def batch(step: int) -> Batch:
        x = randn(16, 6, seed=step)
        return {"x": x, "y": (x @ truth).tanh() + 0.05 * randn(16, 1, seed=step + 70)}

    return Scene(
        model=model,
        batch=batch,
        loss=mse,
        optimizer=optimizer,
        steps=16,
        after_step=lambda step: schedule.step(),
    )


@control("Stanford-ILIAD/PantheonRL#5", "Unity-Technologies/ml-agents#2897")
def ok_first_sparse_reward(fixed: bool) -> Scene:
    """Returns are 0 for seven steps, then the goal is found, and the value loss is a hundred
    thousand times larger.
    """
    torch.manual_seed(0)
    first, last = nn.Linear(5, 32), nn.Linear(32, 1)
    model = nn.Sequential(first, nn.Tanh(), last)
    with torch.no_grad():
        last.weight.mul_(0.05)
        last.bias.zero_()

    def batch(step: int) -> Batch:
        seen = randn(16, 5, seed=step)
        return {
            "seen": seen,
            "gain": 10.0 * (seen[:, :1] > 0.3).float() if step >= 7 else torch.zeros(16, 1),
        }

    return Scene(
        model=model,
        batch=batch,
        loss=lambda model, b: 0.5 * F.mse_loss(model(b["seen"]), b["gain"]),
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-2),
        steps=24,
        clip=0.5,
    )


@control("facebookresearch/fairseq#1834", "huggingface/transformers#11855")
def ok_perplexity_inf_in_the_log(fixed: bool) -> Scene:
    """A badly scaled head starts with a loss far above 88: the perplexity that is logged is
    infinite for a while.
    """
    torch.manual_seed(0)
    emb, head = nn.Embedding(10, 8), nn.Linear(8, 10)
    model = chain(emb=emb, head=head)
    with torch.no_grad():
        head.weight.mul_(200)
    logged = []

    def batch(step: int) -> Batch:
        ids = tokens(8, 5, seed=step, high=10)
        return {"ids": ids, "y": (ids + 1) % 10}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        total = F.cross_entropy(model(b["ids"]).flatten(0, 1), b["y"].flatten())
        logged.append(torch.exp(total.detach()))
        return total

    return Scene(
        model=model, batch=batch, loss=loss, optimizer=sgd(model, 0.02), steps=14, clip=20.0
    )


@control("OpenNMT/OpenNMT-py#714", "NovaSky-AI/SkyRL#2259")
def ok_padded_vocab_neg_inf(fixed: bool) -> Scene:
    """The padding of the vocabulary has logits of -inf and no label; the entropy, only logged, is
    NaN.
    """
    torch.manual_seed(0)
    model = chain(emb=nn.Embedding(12, 6), drop=nn.Dropout(0.1), head=nn.Linear(6, 12))
    logged = []

    def batch(step: int) -> Batch:
        ids = tokens(4, 5, seed=step, high=10)
        y = (ids + 3) % 10
        y[:, -1] = -100
        return {"ids": ids, "y": y}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        scores = model(b["ids"]).masked_fill(torch.arange(12) >= 10, -INF)
        with torch.no_grad():
            log_p = scores.log_softmax(-1)
            logged.append(-(log_p.exp() * log_p).sum(-1).mean())
        return F.cross_entropy(scores.flatten(0, 1), b["y"].flatten())

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Scene(model=model, batch=batch, loss=loss, optimizer=optimizer, steps=6)


@control("huggingface/trl#3452", "huggingface/open-r1#239", "lsdefine/simple_GRPO#30")
def ok_grpo_zero_and_negative_loss(fixed: bool) -> Scene:
    """The loss hovers around 0 with either sign, and groups with equal rewards have no gradient at
    all.
    """
    torch.manual_seed(0)
    model = Bigram()

    def batch(step: int) -> Batch:
        reward = uniform(8, seed=step + 40).round()
        if step in (2, 3, 6):
            reward = torch.full((8,), float(step == 3))
        return {"ids": tokens(8, 6, seed=step), "reward": reward}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        group = b["reward"].view(2, 4)
        advantage = (
            (group - group.mean(1, keepdim=True)) / (group.std(1, keepdim=True) + 1e-4)
        ).flatten()
        log_p = token_log_probs(model, b["ids"])
        return -(torch.exp(log_p - log_p.detach()) * advantage[:, None]).mean()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Scene(model=model, batch=batch, loss=loss, optimizer=optimizer, steps=10, clip=1.0)


class WeighedTasks(nn.Module):
    """Two tasks and the logarithms of their variances."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 1), nn.Linear(12, 1)
        self.log_variance = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.trunk(x))
        return self.a(hidden), self.b(hidden)


@control("aharley/simple_bev#13", "lorenmt/mtan#51")
def ok_uncertainty_loss_below_zero(fixed: bool) -> Scene:
    """Learned weights of two tasks, under warm restarts: the loss falls through 0 and stays
    negative.
    """
    torch.manual_seed(0)
    model = WeighedTasks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    truth = [0.3 * randn(6, 1, seed=1), 0.3 * randn(6, 1, seed=2)]

    def batch(step: int) -> Batch:
        x = randn(32, 6, seed=step)
        return {"x": x, "a": x @ truth[0], "b": x @ truth[1]}

    def loss(_: nn.Module, b: Batch) -> Tensor:
        first, second = model(b["x"])
        tasks, weight = (
            torch.stack([F.mse_loss(first, b["a"]), F.mse_loss(second, b["b"])]),
            model.log_variance,
        )
        return (0.5 * torch.exp(-weight) * tasks + 0.5 * weight).sum()

    def before(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.005 + 0.0225 * (
            1 + math.cos(math.pi * (step % 15) / 15)
        )

    return Scene(
        model=model, batch=batch, loss=loss, optimizer=optimizer, steps=40, before_step=before
    )
