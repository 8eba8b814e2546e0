"""Targets from another network: replayed errors, simulators, teachers, underflowing sums."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.parts import NAN, randn, tokens, uniform


@torch.no_grad()
def follow(average: nn.Module, source: nn.Module, rate: float) -> None:
    """Move the average a little towards its source."""
    for slow, fast in zip(average.parameters(), source.parameters(), strict=True):
        slow.lerp_(fast, rate)


class Dueling(nn.Module):
    """Values of actions as a value of the state plus advantages."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.ReLU())
        self.value, self.advantage = nn.Linear(16, 1), nn.Linear(16, 3)

    def forward(self, state: Tensor) -> Tensor:
        hidden = self.body(state)
        advantage: Tensor = self.advantage(hidden)
        value: Tensor = self.value(hidden)
        return value + advantage - advantage.mean(-1, keepdim=True)


class DoubleQ(nn.Module):
    """A network that learns, and a slow copy that it learns from."""

    def __init__(self) -> None:
        super().__init__()
        self.online = Dueling()
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, state: Tensor) -> Tensor:
        values: Tensor = self.online(state)
        return values

    @torch.no_grad()
    def next_value(self, state: Tensor) -> Tensor:
        best = self.online(state).argmax(1, keepdim=True)
        value: Tensor = self.target(state).gather(1, best)
        return value.squeeze(1)


@incident(
    "Guillaume-Cr/lunar_lander_per#2",
    expected=Expected(step=3, phase="loss", op="aten.pow", event="inf", sample=4),
    accepted=("SG201",),
)
def per_weight_of_zero_priority(fixed: bool) -> Scene:
    """Prioritised replay drew a transition whose last error was exactly 0: its weight is 0 to a
    negative power.
    """
    torch.manual_seed(0)
    model = DoubleQ()

    def batch(step: int) -> Batch:
        priority = 0.1 + uniform(5, seed=step)
        if step == 3:
            priority[4] = 0
        return {
            "state": randn(5, 4, seed=step),
            "action": tokens(5, seed=step, high=3),
            "reward": randn(5, seed=step + 1),
            "next": randn(5, 4, seed=step + 2),
            "priority": priority,
        }

    def loss(_: nn.Module, b: Batch) -> Tensor:
        value = model(b["state"]).gather(1, b["action"][:, None]).squeeze(1)
        target = b["reward"] + 0.99 * model.next_value(b["next"])
        weight = (1000 * (b["priority"] + 1e-6 if fixed else b["priority"])) ** -0.4
        return (weight / weight.max() * F.smooth_l1_loss(value, target, reduction="none")).mean()

    return Scene(
        model=model,
        batch=batch,
        loss=loss,
        optimizer=torch.optim.Adam(model.online.parameters(), lr=1e-3),
        steps=4,
        after_step=lambda step: follow(model.target, model.online, 0.05),
    )


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(seen), self.critic(seen).squeeze(-1)


def generalised_advantage(reward: Tensor, value: Tensor, done: Tensor) -> Tensor:
    """Backwards through time; `value` has one entry more than `reward`."""
    advantages: list[Tensor] = []
    last = torch.zeros(len(reward))
    for t in reversed(range(reward.shape[1])):
        goes_on = 1 - done[:, t]
        surprise = reward[:, t] + 0.99 * value[:, t + 1] * goes_on - value[:, t]
        last = surprise + 0.99 * 0.95 * goes_on * last
        advantages.insert(0, last)
    return torch.stack(advantages, 1)


@incident(
    "google-deepmind/mujoco_playground#240",
    expected=Expected(step=2, phase="input", op="aten.add", event="batch:reward", sample=2),
    accepted=("SG101",),
)
def simulator_nan_reward_in_gae(fixed: bool) -> Scene:
    """The physics of one environment blew up; normalised advantages carry its NaN reward to all the
    others.
    """
    torch.manual_seed(0)
    model = ActorCritic()

    def batch(step: int) -> Batch:
        reward = randn(4, 5, seed=step)
        if step == 2:
            reward[2, 3] = 0.0 if fixed else NAN
        action = tokens(4, 5, seed=step, high=3)
        return {
            "seen": randn(4, 6, 4, seed=step),
            "action": action,
            "reward": reward,
            "done": torch.zeros(4, 5),
        }

    def loss(model: nn.Module, b: Batch) -> Tensor:
        logits, value = model(b["seen"])
        with torch.no_grad():
            advantage = generalised_advantage(b["reward"], value, b["done"])
            gained = advantage + value[:, :-1]
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy = Categorical(logits=logits[:, :-1], validate_args=False)
        log_p: Tensor = policy.log_prob(b["action"])  # type: ignore[no-untyped-call]
        return -(log_p * advantage).mean() + 0.5 * F.mse_loss(value[:, :-1], gained)

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    return Scene(model=model, batch=batch, loss=loss, optimizer=optimizer, steps=3, clip=0.5)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.proj = nn.Conv2d(1, 4, 3), nn.Linear(4, 6)

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.proj(self.conv(image).relu().mean((2, 3)))
        return out


class SelfDistilled(nn.Module):
    """A student learns what its own average says about another crop."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.student = Tower()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("center", torch.zeros(6))

    def forward(self, first: Tensor, second: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        said = [self.student(first), self.student(second)]
        with torch.no_grad():
            taught = [
                ((self.teacher(crop) - self.center) / 0.1).softmax(-1) for crop in (first, second)
            ]
        return said, taught


@incident(
    "discovery-unicamp/Minerva#111",
    "prs-eth/Marigold#111",
    expected=Expected(
        step=3,
        phase="input",
        module="student.conv",
        op="aten.convolution",
        event="batch:first",
        sample=1,
    ),
    accepted=("SG101",),
)
def dino_nan_crop(fixed: bool) -> Scene:
    """A NaN pixel in one crop of one image: student, teacher and everything the average holds are
    lost.
    """
    torch.manual_seed(0)
    model = SelfDistilled()

    def batch(step: int) -> Batch:
        first = randn(4, 1, 6, 6, seed=step)
        if step == 3 and not fixed:
            first[1, 0, 2, 2] = NAN
        return {"first": first, "second": randn(4, 1, 6, 6, seed=step + 40)}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        said, taught = model(b["first"], b["second"])
        crossed = [
            (taught[i] * (said[1 - i] / 0.2).log_softmax(-1)).sum(-1).mean() for i in range(2)
        ]
        return -0.5 * torch.stack(crossed).sum()

    return Scene(
        model=model,
        batch=batch,
        loss=loss,
        optimizer=torch.optim.AdamW(model.student.parameters(), lr=1e-3),
        steps=5,
        after_step=lambda step: follow(model.teacher, model.student, 0.1),
    )


class SupervisedContrast(nn.Module):
    """Classes attract, everything else repels; `unit` puts the features on the sphere first."""

    def __init__(self, *, unit: bool) -> None:
        super().__init__()
        self.unit = unit

    def forward(self, features: Tensor, label: Tensor) -> Tensor:
        if self.unit:
            features = F.normalize(features, dim=1)
        scores = features @ features.T / 0.2
        scores = scores - scores.max(1, keepdim=True).values.detach()
        others = 1 - torch.eye(len(features))
        same = (label[:, None] == label[None]).float() * others
        log_p = scores - torch.log((scores.exp() * others).sum(1, keepdim=True))
        return -((same * log_p).sum(1) / same.sum(1)).mean()


class SeriesEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(2, 8, 5, padding=2), nn.ReLU(), nn.AdaptiveAvgPool1d(2))
        self.proj = nn.Linear(16, 6)

    def forward(self, series: Tensor) -> Tensor:
        out: Tensor = self.proj(self.conv(series).flatten(1))
        return out


@incident(
    "emadeldeen24/TS-TCC#25",
    expected=Expected(
        step=2, phase="loss", module="criterion", op="aten.log", event="inf", sample=4
    ),
    accepted=("SG202",),
)
def supcon_denominator_underflow(fixed: bool) -> Scene:
    """A sensor in another unit is so like itself that, next to that, no other series counts:
    log(0).
    """
    torch.manual_seed(0)
    model, criterion = SeriesEncoder(), SupervisedContrast(unit=fixed)

    def batch(step: int) -> Batch:
        series = randn(6, 2, 16, seed=step)
        if step == 2:
            series[4] *= 60
        return {"series": series, "label": torch.tensor([0, 0, 0, 1, 1, 1])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        total: Tensor = criterion(model(b["series"]), b["label"])
        return total

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Scene(
        model=model, criterion=criterion, batch=batch, loss=loss, optimizer=optimizer, steps=3
    )
