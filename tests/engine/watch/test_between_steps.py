"""A model whose root is never called, only its methods or its children: it is protected as any
other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stepguard
from scenes import quiet


class Agent(nn.Module):
    """An actor and a critic that share a norm with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.actor = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.critic = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.value(x)

    def value(self, x: Tensor) -> Tensor:
        seen = self.norm(x)
        return self.actor(seen) + self.critic(seen)


def by_method(agent: Agent, x: Tensor) -> Tensor:
    return agent.value(x)


def by_children(agent: Agent, x: Tensor) -> Tensor:
    seen = agent.norm(x)
    return agent.actor(seen) + agent.critic(seen)


Way = Callable[[Agent, Tensor], Tensor]
WAYS: dict[str, Way] = {"call": Agent.__call__, "method": by_method, "children": by_children}


def train(way: Way, *, fused: bool) -> tuple[list[Any], dict[str, Any]]:
    """A weight is damaged after step 20; the schedule is part of the loop."""
    torch.manual_seed(0)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2, fused=fused)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    settings = quiet(snapshot_every=4, probation=6)
    with stepguard.watch(agent, optimizer, scheduler=schedule, config=settings) as guard:
        for step in range(30):
            x = torch.randn(16, 8)
            loss = (way(agent, x) - x[:, :1]).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if step == 20:
                with torch.no_grad():
                    agent.critic.weight[0, 0] = torch.nan
        taken = [
            {n: t.clone() for n, t in s.state.tensors.items()}
            for s in guard._rewinder.snapshots.ring.snapshots
        ]
        done = [
            (i.decision.action, i.decision.rewound_to)
            for i in guard.incidents
            if i.decision is not None
        ]
    return done, {"snapshots": taken, "end": agent.state_dict(), "lr": schedule.get_last_lr()}


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("way", ["method", "children"])
def test_damage_is_rewound_as_where_the_model_is_called(way: str, fused: bool) -> None:
    expected_done, expected = train(WAYS["call"], fused=fused)
    done, got = train(WAYS[way], fused=fused)
    assert done == expected_done
    assert done[0][0] == "rewind"
    assert got["lr"] == expected["lr"]
    for name, tensor in expected["end"].items():
        assert torch.equal(got["end"][name], tensor), name


def test_a_snapshot_before_the_update_holds_the_buffers_from_before_the_forward() -> None:
    _, expected = train(WAYS["call"], fused=False)
    _, got = train(WAYS["method"], fused=False)
    assert len(got["snapshots"]) == len(expected["snapshots"]) > 0
    for left, right in zip(got["snapshots"], expected["snapshots"], strict=True):
        for name in [name for name in right if "rng" not in name]:
            assert torch.equal(left[name], right[name]), name
