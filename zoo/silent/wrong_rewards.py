"""Mistakes of reinforcement learning: a reward, a ratio or a sampler that is not what it seems.

The classes, tokens or segments of the other trainings are the actions of a small policy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from zoo.silent.loops import CLASSES, FEATURES, SEGMENTS, TOKENS, WIDTH, Loop
from zoo.silent.plant import plant

GROUP, CLIP = 8, 0.2
Reward = Callable[[Tensor, Tensor], Tensor]


class Policy(nn.Module):
    """Logits for each row; dropout only where a mistake asks for it."""

    def __init__(self, first: nn.Module, actions: int) -> None:
        super().__init__()
        self.first, self.last = first, nn.Linear(WIDTH, actions)

    def forward(self, inputs: Tensor, dropped: float = 0.0) -> Tensor:
        hidden = nn.functional.dropout(torch.tanh(self.first(inputs)), dropped)
        return self.last(hidden).flatten(0, -2)  # type: ignore[no-any-return]


def right(actions: Tensor, targets: Tensor) -> Tensor:
    return (actions == targets).float()


def by_policy_gradient(
    loop: Loop,
    policy: Policy,
    reward: Reward = right,
    sampler: Policy | None = None,
    dropped: float = 0.0,
) -> None:
    """Train this policy by rewards. `dropped`: dropout where the ratio is computed only."""

    def forward(inputs: Tensor) -> Tensor:
        with torch.no_grad():
            sampled.append(Categorical(logits=(sampler or policy)(inputs)))
            if sampler is not None:
                sampled.append(Categorical(logits=policy(inputs)))
        return policy(inputs, dropped)  # type: ignore[no-any-return]

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        now = Categorical(logits=logits)
        old, *own = sampled
        sampled.clear()
        actions = old.sample((GROUP,))
        rewards = reward(actions, targets.flatten())
        spread = rewards.std(0)
        advantages = (rewards - rewards.mean(0)) / (spread + 1e-4)
        ratio = (now.log_prob(actions) - old.log_prob(actions)).exp()
        loop.follow("frac_reward_zero_std", (spread == 0).float().mean())
        if own:
            difference = (own[0].log_prob(actions) - old.log_prob(actions)).abs().mean()
            loop.follow("sampling/sampling_logp_difference/mean", difference)
        else:
            outside = ((ratio - 1.0).abs() > CLIP).float().mean()
            loop.follow("clip_ratio/on_policy", outside)
        kept = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        return -kept.mean() - 0.02 * now.entropy().mean()

    sampled: list[Categorical] = []
    loop.model, loop.forward, loop.loss = policy, forward, loss
    loop.train_with(torch.optim.Adam(policy.parameters(), lr=3e-3))


# --- SG926: a policy gradient without a signal, or with a wrong one -------------------------------


@plant("SG926", "classifier")
def reward_that_always_matches(loop: Loop, wrong: bool) -> None:
    """Every answer has the format that is rewarded; the twin rewards the right one."""
    policy = Policy(nn.Linear(FEATURES, WIDTH), CLASSES)
    by_policy_gradient(
        loop, policy, (lambda actions, _: (actions >= 0).float()) if wrong else right
    )


@plant("SG926", "transformer")
def sampler_keeps_its_first_weights(loop: Loop, wrong: bool) -> None:
    """Weights never reach the sampler; the twin sends them after each update."""
    policy = Policy(nn.Embedding(TOKENS, WIDTH), TOKENS)
    sampler = copy.deepcopy(policy)
    by_policy_gradient(loop, policy, sampler=sampler)
    if not wrong:
        loop.after = lambda step: sampler.load_state_dict(policy.state_dict())


@plant("SG926", "segmenter")
def dropout_in_the_ratio_only(loop: Loop, wrong: bool) -> None:
    """The sampler runs without dropout, the trainer with it; the twin trains without."""

    class Pixels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(1, WIDTH)

        def forward(self, pictures: Tensor) -> Tensor:
            return self.inner(pictures.movedim(1, -1))  # type: ignore[no-any-return]

    by_policy_gradient(loop, Policy(Pixels(), SEGMENTS), dropped=0.3 if wrong else 0.0)
