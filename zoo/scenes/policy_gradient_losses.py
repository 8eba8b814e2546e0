"""Reinforcement learning: squashed actions, ratios, illegal actions, leftover rollouts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

from zoo.case import Batch, Expected, Scene, incident
from zoo.scenes.parts import INF, randn, tokens


class Actor(nn.Module):
    """A squashed Gaussian; `rescaled` corrects the density with the action after scaling, which is
    wrong.
    """

    def __init__(self, *, rescaled: bool) -> None:
        super().__init__()
        self.mean, self.log_std = nn.Linear(4, 2), nn.Linear(4, 2)
        self.rescaled, self.limit = rescaled, 2.0
        nn.init.constant_(self.mean.weight, 0.05)
        nn.init.zeros_(self.mean.bias)
        nn.init.constant_(self.log_std.bias, -6.0)

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        policy = Normal(self.mean(seen), self.log_std(seen).clamp(-5, 2).exp())
        raw = policy.rsample()
        action = torch.tanh(raw) * self.limit
        squashed = action if self.rescaled else torch.tanh(raw)
        log_p = policy.log_prob(raw)  # type: ignore[no-untyped-call]
        return action, (log_p - torch.log(1 - squashed.pow(2) + 1e-6)).sum(-1)


class Agent(nn.Module):
    def __init__(self, *, rescaled: bool) -> None:
        super().__init__()
        self.actor = Actor(rescaled=rescaled)
        self.critic = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)).requires_grad_(
            False
        )

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        action, log_p = self.actor(seen)
        return self.critic(torch.cat([seen, action], -1)).squeeze(-1), log_p


@incident(
    "philtabor/Actor-Critic-Methods-Paper-To-Code#7",
    "cpnota/autonomous-learning-library#139",
    "philtabor/Youtube-Code-Repository#59",
    expected=Expected(
        step=3,
        phase="forward",
        module="actor",
        op="aten.log",
        event="nan",
        sample=1,
        grads_finite=True,
    ),
    accepted=("SG202",),
)
def sac_action_scale_inside_log(fixed: bool) -> Scene:
    """log(1 - a^2 + eps) takes the action scaled by 2, negative once the policy moves out."""
    torch.manual_seed(0)
    model = Agent(rescaled=not fixed)

    def batch(step: int) -> Batch:
        seen = randn(5, 4, seed=step)
        if step == 3:
            seen[1] = 30.0
        return {"seen": seen}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        value, log_p = model(b["seen"])
        return torch.mean(0.05 * log_p - value)

    optimizer = torch.optim.Adam(model.actor.parameters(), lr=1e-3)
    return Scene(model=model, batch=batch, loss=loss, optimizer=optimizer, steps=4)


class TextPolicy(nn.Module):
    """A recurrent language model."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.rnn = nn.Embedding(9, 8), nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 9)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.rnn(self.emb(ids))[0])
        return scores


@incident(
    "radixark/miles#1363",
    "MakazhanAlpamys/Soup#342",
    "OpenRLHF/OpenRLHF#1293",
    expected=Expected(
        step=2,
        phase="loss",
        op="aten.exp",
        event="inf",
        sample=2,
        proof={"then": ("aten.mul", None)},
    ),
    accepted=("SG203",),
)
def grpo_ratio_exp_overflow(fixed: bool) -> Scene:
    """One rollout token has an old log-probability of -150: exp overflows, and times advantage 0 it
    is NaN.
    """
    torch.manual_seed(0)
    model = TextPolicy()

    def batch(step: int) -> Batch:
        old = torch.full((4, 5), -2.2)
        if step == 2:
            old[2, 3] = -150.0
        ids = tokens(4, 6, seed=step, low=1, high=9)
        return {"ids": ids, "old": old, "advantage": torch.tensor([0.9, -0.4, 0.0, -0.5])}

    def loss(model: nn.Module, b: Batch) -> Tensor:
        log_p = (
            model(b["ids"][:, :-1]).log_softmax(-1).gather(-1, b["ids"][:, 1:, None]).squeeze(-1)
        )
        gap = log_p - b["old"]
        ratio, gain = torch.exp(gap.clamp(-20, 20) if fixed else gap), b["advantage"][:, None]
        return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean(1).mean()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Scene(model=model, batch=batch, loss=loss, optimizer=optimizer, steps=3, clip=1.0)


class MaskedCategorical(nn.Module):
    """Illegal actions get -inf; `idle` keeps action 0 legal where no other is."""

    def __init__(self, *, idle: bool) -> None:
        super().__init__()
        self.logits, self.idle = nn.Linear(8, 5), idle

    def forward(self, hidden: Tensor, legal: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        if self.idle:
            legal = legal | ((~legal).all(-1, keepdim=True) & (torch.arange(5) == 0))
        policy = Categorical(
            logits=self.logits(hidden).masked_fill(~legal, -INF), validate_args=False
        )
        return policy.log_prob(action), policy.entropy()  # type: ignore[no-untyped-call]


class MaskedAgent(nn.Module):
    def __init__(self, *, idle: bool) -> None:
        super().__init__()
        self.body, self.policy = (
            nn.Sequential(nn.Linear(3, 8), nn.Tanh()),
            MaskedCategorical(idle=idle),
        )

    def forward(self, seen: Tensor, legal: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        log_p, entropy = self.policy(self.body(seen), legal, action)
        return log_p, entropy


@incident(
    "entity-neural-network/incubator#186",
    expected=Expected(
        step=2,
        phase="forward",
        module="policy",
        op="aten.sub",
        event="nan",
        sample=3,
        grads_finite=True,
    ),
    accepted=("SG204",),
)
def policy_with_no_legal_action(fixed: bool) -> Scene:
    """One environment offers no legal action: all its logits are -inf, the categorical NaN."""
    torch.manual_seed(0)
    model = MaskedAgent(idle=fixed)

    def batch(step: int) -> Batch:
        legal = torch.ones(4, 5, dtype=torch.bool)
        legal[:, 3] = False
        if step == 2:
            legal[3] = False
        return {
            "seen": randn(4, 3, seed=step),
            "legal": legal,
            "action": torch.tensor([0, 1, 2, 0]),
            "advantage": randn(4, seed=step + 1),
        }

    def loss(model: nn.Module, b: Batch) -> Tensor:
        log_p, entropy = model(b["seen"], b["legal"], b["action"])
        return -torch.mean(log_p * b["advantage"]) - 0.01 * torch.mean(entropy)

    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    return Scene(model=model, batch=batch, loss=loss, optimizer=optimizer, steps=3)


class DiscretePolicy(nn.Module):
    """Gives a distribution rather than a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 3)

    def forward(self, seen: Tensor) -> Categorical:
        return Categorical(logits=self.head(self.body(seen)))


@incident(
    "DLR-RM/stable-baselines3#325",
    "jolibrain/wheatley#93",
    "Tencent-Hunyuan/UniRL#341",
    expected=Expected(step=1, phase="loss", op="aten.std", event="nan", micro=2),
    accepted=("SG205",),
)
def advantage_std_of_a_leftover_rollout(fixed: bool) -> Scene:
    """Advantages are normalised per micro-batch, and the last one of the rollout has a single
    sample.
    """
    torch.manual_seed(0)
    model = DiscretePolicy()

    def micro(seed: int, count: int) -> Batch:
        action = tokens(count, seed=seed, high=3)
        return {
            "seen": randn(count, 4, seed=seed),
            "action": action,
            "gain": randn(count, seed=90 + seed),
        }

    def batch(step: int) -> list[Batch]:
        return [micro(10 * step + k, 1 if step == 1 and k == 2 else 4) for k in range(3)]

    def loss(model: nn.Module, b: Batch) -> Tensor:
        gain = b["gain"]
        advantage = (gain - gain.mean()) / (gain.std(unbiased=not fixed) + 1e-8)
        return -torch.mean(model(b["seen"]).log_prob(b["action"]) * advantage) / 3

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Scene(model=model, batch=batch, loss=loss, optimizer=optimizer, clip=1.0)
