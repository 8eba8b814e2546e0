"""Healthy runs: infinities that are replaced, batches of one, rates of zero, NaN in a log."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.case import Batch, Scene, control
from zoo.scenes.image_losses import SmallUNet
from zoo.scenes.parts import INF, NAN, chain, randn, tokens, uniform
from zoo.scenes.teachers_and_targets import follow


class MaskedValues(nn.Module):
    """A policy and values of actions on one body."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 16), nn.Tanh())
        self.policy, self.value = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, seen: Tensor, legal: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(seen)
        return self.policy(hidden).masked_fill(~legal, -INF), self.value(hidden)


@control("hill-a/stable-baselines#453")
def ok_masked_actions_neginf(fixed: bool) -> Scene:
    """Illegal actions are -inf for the policy and before the maximum of the next values; one is
    always legal.
    """
    torch.manual_seed(0)
    model = MaskedValues()

    def batch(step: int) -> Batch:
        legal, later = uniform(6, 4, seed=step) > 0.5, uniform(6, 4, seed=step + 99) > 0.6
        legal[:, 1], later[:, 2] = True, True
        seen = {"seen": randn(6, 5, seed=step), "next": randn(6, 5, seed=step + 1)}
        return {**seen, "legal": legal, "later": later, "reward": randn(6, seed=step)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        logits, values = model(b["seen"], b["legal"])
        log_p, value = logits.log_softmax(-1), values[:, 1]
        entropy = -(log_p.exp() * log_p.masked_fill(~b["legal"], 0.0)).sum(-1)
        with torch.no_grad():
            following = model(b["next"], b["later"])[1].masked_fill(~b["later"], -INF).amax(-1)
        target = b["reward"] + 0.9 * following
        followed: Tensor = (log_p[:, 1] * (target - value).detach()).mean()
        return F.smooth_l1_loss(value, target) - followed - 0.01 * torch.mean(entropy)

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return Scene(model=model, batch=batch, loss=loss, optimizer=optimizer, steps=8, clip=0.5)


class LightConvolution(nn.Module):
    """Two rounds of messages over a normalised graph; nodes without an edge get a factor of 0
    instead of inf.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        factor = edges.sum(-1).pow(-0.5)
        factor[torch.isinf(factor)] = 0.0
        normed = factor[:, :, None] * edges * factor[:, None, :]
        hidden = self.lin(x)
        for _ in range(2):
            hidden = hidden + normed @ hidden
        scores: Tensor = self.head(hidden.mean(1))
        return scores


@control("wujcan/SGL-TensorFlow#19", "RUCAIBox/RecBole-GNN#47")
def ok_degree_power_inf_replaced(fixed: bool) -> Scene:
    """Isolated nodes have degree 0 and 1 / sqrt(0) is infinite, but it is replaced before anything
    uses it.
    """
    torch.manual_seed(0)
    model = LightConvolution()

    def batch(step: int) -> Batch:
        edges = (uniform(3, 5, 5, seed=step) > 0.6).float()
        edges[:, 4], edges[:, :, 4] = 0, 0
        return {"x": randn(3, 5, 4, seed=step), "edges": edges, "y": torch.tensor([0, 1, 1])}

    return Scene(
        model=model,
        batch=batch,
        loss=lambda model, b: F.cross_entropy(model(b["x"], b["edges"]), b["y"]),
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        steps=6,
    )


@control("ClementPinard/FlowNetPytorch#23", "ClementPinard/FlowNetTorch#16")
def ok_sparse_flow_nan_invalid(fixed: bool) -> Scene:
    """Ground truth is NaN where nothing was measured, for one image everywhere; the error never
    sees it.
    """
    torch.manual_seed(0)
    model = chain(
        features=nn.Conv2d(2, 8, 3, padding=1), act=nn.ReLU(), flow=nn.Conv2d(8, 2, 3, padding=1)
    )

    def batch(step: int) -> Batch:
        flow = randn(3, 2, 8, 8, seed=step)
        flow[:, :, :3] = NAN
        if step == 2:
            flow[1] = NAN
        return {"frames": randn(3, 2, 8, 8, seed=step + 9), "flow": flow}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        measured = ~b["flow"].isnan().any(1, keepdim=True)
        gap = torch.where(measured, model(b["frames"]) - b["flow"].nan_to_num(), torch.zeros(()))
        length = torch.sqrt(gap.pow(2).sum(1, keepdim=True) + 1e-6)
        return (length * measured).sum() / measured.sum().clamp(min=1)

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Scene(model=model, batch=batch, loss=loss, optimizer=optimizer, steps=6)


@control("Novartis/torchsurv#35")
def ok_cox_last_batch_of_one(fixed: bool) -> Scene:
    """Every fourth batch is a single patient, who is compared with nobody: loss and gradients are
    exactly 0.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 1))

    def batch(step: int) -> Batch:
        count = 1 if step % 4 == 3 else 8
        return {
            "x": randn(count, 5, seed=step),
            "time": uniform(count, seed=step + 2),
            "event": torch.ones(count),
        }

    def loss(model: nn.Module, b: Batch) -> Tensor:
        longest_first = b["time"].argsort(descending=True)
        risk, event = model(b["x"])[:, 0][longest_first], b["event"][longest_first]
        log_likelihood: Tensor = ((risk - torch.logcumsumexp(risk, 0)) * event).sum()
        return -log_likelihood / event.sum().clamp(min=1)

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Scene(model=model, batch=batch, loss=loss, optimizer=optimizer, steps=9)


def warmed_then_restarted(step: int) -> float:
    """Share of the peak rate: up from 0, down to 0 again, then at once to the peak."""
    if step < 3:
        return step / 3
    if step < 9:
        return 0.5 * (1 + math.cos(math.pi * (step - 3) / 5))
    return 0.5 * (1 + math.cos(math.pi * (step - 9) / 9))


@control("mosaicml/composer#1384", "YehLi/xmodaler#15")
def ok_warmup_from_zero_and_restart(fixed: bool) -> Scene:
    """The rate is exactly 0 in the first step and again before a restart, from which it jumps to
    its peak.
    """
    torch.manual_seed(0)
    model = chain(
        stem=nn.Linear(6, 16), norm=nn.LayerNorm(16), act=nn.GELU(), head=nn.Linear(16, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmed_then_restarted)
    truth = randn(6, 3, seed=77)

    def batch(step: int) -> Batch:
        x = randn(16, 6, seed=step)
        return {"x": x, "y": (x @ truth).argmax(-1)}

    return Scene(
        model=model,
        batch=batch,
        loss=lambda model, b: F.cross_entropy(model(b["x"]), b["y"]),
        optimizer=optimizer,
        steps=16,
        after_step=lambda step: schedule.step(),
    )


class Averaged(nn.Module):
    """A segmentation network with a running average of itself inside."""

    def __init__(self) -> None:
        super().__init__()
        self.net = SmallUNet(classes=3)
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, image: Tensor) -> Tensor:
        scores: Tensor = self.net(image)
        return scores


def maps_of(label: Tensor) -> Tensor:
    return F.one_hot(label, 3).movedim(-1, 1).float()


def class_scores(predicted: Tensor, truth: Tensor, *, smooth: float) -> Tensor:
    """Dice of every class of every image; NaN for absent classes where nothing smooths it."""
    return (2 * (predicted * truth).sum((2, 3)) + smooth) / (
        (predicted + truth).sum((2, 3)) + smooth
    )


@control("Project-MONAI/MONAI#7504", "wandb/senpai#23")
def ok_nan_metric_of_absent_class(fixed: bool) -> Scene:
    """The logged score of a class that an image does not have is NaN on purpose; the loss is
    smoothed.
    """
    torch.manual_seed(0)
    model = Averaged()
    logged = []

    def batch(step: int) -> Batch:
        return {
            "image": randn(3, 1, 8, 8, seed=step),
            "mask": tokens(3, 8, 8, seed=step, high=2 if step % 2 else 3),
        }

    def loss(model: nn.Module, b: Batch) -> Tensor:
        scores, truth = model(b["image"]), maps_of(b["mask"])
        share = scores.softmax(1)
        with torch.no_grad():
            decided = maps_of(share.argmax(1)) * truth.amax((2, 3), keepdim=True)
            logged.append(class_scores(decided, truth, smooth=0.0).nanmean().item())
        return (
            F.cross_entropy(scores, b["mask"]) + (1 - class_scores(share, truth, smooth=1.0)).mean()
        )

    return Scene(
        model=model,
        batch=batch,
        loss=loss,
        optimizer=torch.optim.Adam(model.net.parameters(), lr=2e-3),
        steps=7,
        after_step=lambda step: follow(model.average, model.net, 0.1),
    )
