"""The size of the last update beside the weights: as it really was, and silent where nobody can
know.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from scenes import batches, plain_net, quiet
from stepguard import Guard, GuardConfig
from stepguard.engine.incident.run_facts import lost_squares, update_ratio

DATA = batches(8)


def stepped(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int) -> float:
    """The true ratio of the last of some steps."""
    ratio = 0.0
    for batch in DATA[:steps]:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        optimizer.step()
        after = torch.cat([p.detach().flatten() for p in model.parameters()])
        ratio = float((after - before).norm() / after.norm())
    return ratio


@pytest.mark.parametrize("steps", [1, 8])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.AdamW, {"weight_decay": 0.0}),
        (torch.optim.Adam, {"fused": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
    ],
)
def test_ratio_is_that_of_the_update_that_was_made(
    kind: Any, settings: dict[str, Any], steps: int
) -> None:
    model = plain_net()
    optimizer = kind(model.parameters(), lr=0.02, **settings)
    true = stepped(optimizer, model, steps)
    assert update_ratio(optimizer, [0.02]) == pytest.approx(true, rel=1e-3)


def test_nothing_is_said_where_nothing_is_remembered() -> None:
    model = plain_net()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    stepped(plain, model, 1)
    assert update_ratio(plain, [0.1]) is None
    fresh = torch.optim.AdamW(model.parameters())
    assert update_ratio(fresh, [0.1]) is None


def test_ratio_over_poisoned_moments_is_not_claimed() -> None:
    model = plain_net()
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(optimizer, model, 1)
    next(iter(optimizer.state.values()))["exp_avg"].fill_(torch.nan)
    assert update_ratio(optimizer, [1e-3]) is None


def test_a_jump_of_the_rate_is_explained_with_the_size_of_the_update() -> None:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Guard(model, optimizer, config=quiet(locate=True)) as guard:
        for index in range(60):
            if index == 40:
                optimizer.param_groups[0]["lr"] = 30.0
            guard.step(lambda batch: (model(batch[0]) - 1.0).square().mean(), DATA[index % 8])
        finding = guard.incidents[0].findings[0]
    assert finding.code == "SG504"
    assert any(
        "the last update changed the weights by 1.31 of" in said for said in finding.evidence
    ), finding.evidence


@pytest.mark.parametrize(
    "kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam]
)
def test_no_training_leaves_a_mean_without_its_square(kind: Any) -> None:
    model = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(12, 3))
    optimizer = kind(model.parameters(), lr=1e-3)
    for step in range(4):
        ids = torch.randint(0, 50, (5, 3), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(ids).pow(2).mean().mul(1e-15).backward()  # squares down to the end of float32
        optimizer.step()
    assert lost_squares(optimizer) == 0


def test_squares_that_went_through_half_precision_are_counted() -> None:
    model = plain_net()
    optimizer = torch.optim.Adam(model.parameters())
    stepped(optimizer, model, 2)
    assert lost_squares(optimizer) == 0
    states = list(optimizer.state.values())
    for state in states:
        state["exp_avg_sq"].copy_((state["exp_avg_sq"] * 1e-6).half())
    expected = sum(int(((s["exp_avg_sq"] == 0) & (s["exp_avg"] != 0)).sum()) for s in states)
    assert lost_squares(optimizer) == expected > 0


def test_a_precision_that_the_launcher_did_not_ask_for_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return (-model(batch).abs() - 1.0).float().log().mean()

    with Guard(model, optimizer, config=GuardConfig(terminal="quiet")) as guard:
        incident = guard.step(loss_fn, torch.ones(2, 4)).incident
    assert incident is not None
    said = {finding.code: finding.evidence for finding in incident.findings}
    assert "bfloat16 is configured, but inside the step autocast gives float16" in said["SG801"]
