"""Attention, norms, activations and classification losses in a look."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from probes.looked import look_at


class Attention(nn.Module):
    """One head, with torch's fused attention or by hand."""

    def __init__(self, scale: float, *, fused: bool, causal: bool = False) -> None:
        super().__init__()
        self.query = nn.Linear(8, 8)
        self.scale = scale
        self.fused = fused
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x) * self.scale
        if self.fused:
            return nn.functional.scaled_dot_product_attention(query, x, x, is_causal=self.causal)
        logits = query @ x.transpose(-2, -1) / 8**0.5
        if self.causal:
            hidden = torch.ones(logits.shape[-2:]).tril() == 0
            logits = logits.masked_fill(hidden, -torch.inf)
        return logits.softmax(-1) @ x


@pytest.mark.parametrize("causal", [False, True])
def test_fused_attention_shows_what_the_same_by_hand_shows(causal: bool) -> None:
    seen = []
    for fused in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(Attention(1.0, fused=fused, causal=causal))
        batch = torch.randn(1, 2, 16, 8)
        look = look_at(model, lambda x, model=model: model(x).square().mean(), batch)
        (found,) = look.attention
        assert found.module == "0"
        seen.append((found.largest_logit, found.entropy, found.collapsed))
    assert seen[0] == pytest.approx(seen[1], rel=1e-4)
    assert 0.5 < seen[0][1] < 1.0


def test_collapsed_attention_has_no_entropy() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Attention(500.0, fused=True))
    (found,) = look_at(model, lambda x: model(x).sum(), torch.randn(1, 2, 16, 8)).attention
    assert found.collapsed > 0.8
    assert found.entropy < 0.2
    assert found.largest_logit > 100


def test_norm_shows_the_scale_of_its_input() -> None:
    model = nn.Sequential(nn.LayerNorm(16))
    batch = 50 * torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    (found,) = look_at(model, lambda x: model(x).square().sum(), batch).norms
    assert found.module == "0"
    assert found.scale == pytest.approx(50, rel=0.1)


def test_dead_and_saturated_units_are_counted() -> None:
    model = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Tanh())
    with torch.no_grad():
        model[0].bias[:3] = -100.0
        model[0].bias[3:5] = 100.0
    relu, tanh = look_at(model, lambda x: model(x).sum(), torch.randn(64, 4)).units
    assert (relu.module, relu.units, relu.positions) == ("1", 10, 64)
    assert relu.dead == pytest.approx(0.3)
    assert 0.2 <= tanh.saturated < 0.9


def test_softmax_before_a_cross_entropy_is_seen() -> None:
    model = nn.Linear(4, 3)
    target = torch.tensor([0, 1, -100, 2])
    loss = nn.functional.cross_entropy
    once = look_at(model, lambda x: loss(model(x), target), torch.randn(4, 4))
    twice = look_at(model, lambda x: loss(model(x).softmax(-1), target), torch.randn(4, 4))
    assert (once.facts.softmax_twice, twice.facts.softmax_twice) == (False, True)
    assert (once.facts.labels, once.facts.ignored) == (4, 1)
