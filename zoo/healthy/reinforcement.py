"""Reinforcement learning: losses without a level, data that the model makes itself, targets that
move.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.healthy.data import Chain, copied, follow, mlp
from zoo.healthy.training import Learner, Training, Update, family, register

GROUP = "reinforcement"
PLACES, LENGTH = 10, 5


class Choice:
    """A categorical distribution without the cost of torch's checks."""

    def __init__(self, logits: Tensor) -> None:
        self.logs = torch.log_softmax(logits, -1)

    def log_prob(self, actions: Tensor) -> Tensor:
        return self.logs.gather(1, actions[:, None])[:, 0]

    def entropy(self) -> Tensor:
        return -(self.logs.exp() * self.logs).sum(-1)


def returns(rewards: list[Tensor], discount: float = 0.95) -> Tensor:
    found, coming = [], torch.zeros_like(rewards[0])
    for reward in reversed(rewards):
        coming = reward + discount * coming
        found.append(coming)
    return torch.stack(found[::-1])


@torch.no_grad()
def walk(chain: Chain, policy: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Places, actions and returns of one stretch of every walker."""
    seen, acted, rewards = [], [], []
    for _ in range(LENGTH):
        places = chain.observe()
        actions = torch.multinomial(torch.softmax(policy(places)[:, :2], -1), 1)[:, 0]
        reward, _ = chain.act(actions)
        seen.append(places)
        acted.append(actions)
        rewards.append(reward)
    return torch.cat(seen), torch.cat(acted), returns(rewards).flatten()


def reinforce(entropy: float, baseline: bool, seed: int) -> Training:
    chain, policy = Chain(seed), mlp(PLACES, 16, 2)

    def loss(batch: Any) -> Tensor:
        places, actions, value = batch
        chosen = Choice(policy(places))
        weight = value - value.mean() if baseline else value
        return -(chosen.log_prob(actions) * weight).mean() - entropy * chosen.entropy().mean()

    def updates(step: int) -> Iterator[Update]:
        yield "policy", (walk(chain, policy),)

    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    return Training(
        learners={"policy": Learner(model=policy, optimizer=optimizer, loss=loss)}, updates=updates
    )


register("reinforce", GROUP, "step", partial(reinforce, 0.0, False))
register("reinforce", GROUP, "watch", partial(reinforce, 0.0, False))
register("reinforce_entropy", GROUP, "step", partial(reinforce, 0.1, False))
register("reinforce_baseline", GROUP, "step", partial(reinforce, 0.01, True))


def dqn(told_of_target: bool, hard: bool, seed: int) -> Training:
    """A replay buffer and a target network, copied every 50 steps or followed slowly."""
    chain, net = Chain(seed), mlp(PLACES, 16, 2)
    target = copied(net, partial(mlp, PLACES, 16, 2))
    memory: list[tuple[Tensor, ...]] = []

    def loss(batch: Any) -> Tensor:
        before, actions, reward, after, done = batch
        with torch.no_grad():
            wanted = reward + 0.95 * target(after).amax(-1) * ~done
        return F.smooth_l1_loss(net(before).gather(1, actions[:, None])[:, 0], wanted)

    def updates(step: int) -> Iterator[Update]:
        before = chain.observe()
        with torch.no_grad():
            greedy = net(before).argmax(-1)
        explore = torch.rand(chain.walkers) < max(0.05, 1 - step / 150)
        actions = torch.where(explore, torch.randint(2, (chain.walkers,)), greedy)
        reward, done = chain.act(actions)
        memory.append((before, actions, reward, chain.observe(), done))
        picked = torch.randint(len(memory), (4,)).tolist()
        yield (
            "net",
            (tuple(torch.cat(parts) for parts in zip(*(memory[i] for i in picked), strict=True)),),
        )
        if not hard:
            follow(target, net, 0.05)
        elif step % 50 == 49:
            target.load_state_dict(net.state_dict())

    modules: dict[str, nn.Module] | None = {"target": target} if told_of_target else None
    learner = Learner(
        model=net, optimizer=torch.optim.Adam(net.parameters(), lr=3e-3), loss=loss, modules=modules
    )
    return Training(learners={"net": learner}, updates=updates, world=target.state_dict)


register("dqn", GROUP, "step", partial(dqn, False, True))
register("dqn_target_as_module", GROUP, "step", partial(dqn, True, True))
register("dqn_soft_target", GROUP, "watch", partial(dqn, True, False))


@family(GROUP, "step")
def actor_critic(seed: int) -> Training:
    """One network with three outputs: two actions and a value."""
    chain, net = Chain(seed), mlp(PLACES, 16, 3)

    def loss(batch: Any) -> dict[str, Tensor]:
        places, actions, value = batch
        out = net(places)
        chosen = Choice(out[:, :2])
        advantage = value - out[:, 2]
        return {
            "policy": -(chosen.log_prob(actions) * advantage.detach()).mean(),
            "value": 0.5 * advantage.square().mean(),
            "entropy": -0.01 * chosen.entropy().mean(),
        }

    def updates(step: int) -> Iterator[Update]:
        yield "net", (walk(chain, net),)

    learner = Learner(
        model=net, optimizer=torch.optim.RMSprop(net.parameters(), lr=3e-3), loss=loss, clip=0.5
    )
    return Training(learners={"net": learner}, updates=updates)


@family(GROUP, "watch")
def ppo(seed: int) -> Training:
    """Four passes over each stretch, ratios clipped at 0.2."""
    chain, net = Chain(seed), mlp(PLACES, 16, 3)
    held: list[tuple[Tensor, ...]] = []

    def loss(batch: Any) -> Tensor:
        places, actions, value, before = batch
        out = net(places)
        chosen = Choice(out[:, :2])
        ratio = (chosen.log_prob(actions) - before).exp()
        gain = value - value.mean()
        policy = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        return 0.5 * F.mse_loss(out[:, 2], value) - policy - 0.01 * chosen.entropy().mean()

    def updates(step: int) -> Iterator[Update]:
        if step % 4 == 0:
            places, actions, value = walk(chain, net)
            with torch.no_grad():
                before = Choice(net(places)[:, :2]).log_prob(actions)
            held[:] = [(places, actions, value, before)]
        yield "net", (held[0],)

    learner = Learner(
        model=net, optimizer=torch.optim.Adam(net.parameters(), lr=3e-3), loss=loss, clip=0.5
    )
    return Training(learners={"net": learner}, updates=updates)


@family(GROUP, "step")
def sac(seed: int) -> Training:
    """Critic, actor and temperature: three optimizers, a target network, a loss that pushes the
    others about.
    """
    generator = torch.Generator().manual_seed(seed)
    critic, actor = mlp(3, 16, 1), mlp(2, 16, 2)
    target = copied(critic, partial(mlp, 3, 16, 1))
    heat = nn.ParameterDict({"log": nn.Parameter(torch.zeros(()))})

    def drawn(places: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = actor(places).chunk(2, -1)
        spread = spread.clamp(-4, 1)
        raw = mean + spread.exp() * noise
        action = torch.tanh(raw)
        density = -0.5 * noise.square() - spread - torch.log1p(-action.square() + 1e-6)
        return action, density

    def critic_loss(batch: Any) -> Tensor:
        places, actions, reward, after, noise = batch
        with torch.no_grad():
            coming, density = drawn(after, noise)
            worth = target(torch.cat([after, coming], -1)) - heat["log"].exp() * density
        return F.mse_loss(critic(torch.cat([places, actions], -1)), reward + 0.9 * worth)

    def actor_loss(batch: Any) -> Tensor:
        action, density = drawn(batch[0], batch[4])
        worth = critic(torch.cat([batch[0], action], -1))
        return (heat["log"].exp().detach() * density - worth).mean()

    def heat_loss(batch: Any) -> Tensor:
        with torch.no_grad():
            _, density = drawn(batch[0], batch[4])
        return -(heat["log"] * (density - 1.0)).mean()

    def updates(step: int) -> Iterator[Update]:
        places = torch.randn(16, 2, generator=generator)
        noise = torch.randn(16, 1, generator=generator)
        with torch.no_grad():
            actions, _ = drawn(places, noise)
        reward = -(places.sum(-1, keepdim=True) - actions).square()
        after = 0.9 * places + 0.1 * actions
        batch = (places, actions, reward, after, torch.randn(16, 1, generator=generator))
        yield "critic", (batch,)
        yield "actor", (batch,)
        yield "heat", (batch,)
        follow(target, critic, 0.02)

    learners = {
        "critic": Learner(
            model=critic, optimizer=torch.optim.Adam(critic.parameters(), lr=3e-3), loss=critic_loss
        ),
        "actor": Learner(
            model=actor, optimizer=torch.optim.Adam(actor.parameters(), lr=1e-3), loss=actor_loss
        ),
        "heat": Learner(
            model=heat, optimizer=torch.optim.Adam(heat.parameters(), lr=1e-2), loss=heat_loss
        ),
    }
    return Training(learners=learners, updates=updates, world=target.state_dict)


@family(GROUP, "watch")
def bandit(seed: int) -> Training:
    """Ten arms with heavy tails, two of which change places half-way."""
    generator = torch.Generator().manual_seed(seed)
    policy = nn.Linear(1, 10, bias=False)
    worth = torch.randn(10, generator=generator) * 3

    def loss(batch: Any) -> Tensor:
        arms, reward = batch
        logits = policy(torch.ones(1, 1)).expand(len(arms), 10)
        return -(torch.log_softmax(logits, -1).gather(1, arms[:, None])[:, 0] * reward).mean()

    def updates(step: int) -> Iterator[Update]:
        if step == 150:
            worth.copy_(worth.flip(0).clone())
        with torch.no_grad():
            chances = torch.softmax(policy(torch.ones(1, 1)), -1)[0]
        arms = torch.multinomial(chances, 8, replacement=True, generator=generator)
        tail = torch.empty(8).cauchy_(generator=generator).clamp(-50, 50)
        yield "policy", ((arms, worth[arms] + tail),)

    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-2)
    return Training(
        learners={"policy": Learner(model=policy, optimizer=optimizer, loss=loss)}, updates=updates
    )
