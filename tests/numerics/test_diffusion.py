"""Times, schedules and weights of diffusion losses are finite on the whole interval."""

from __future__ import annotations

import pytest
import torch

from stepguard import numerics
from stepguard.numerics import Events


def test_the_same_schedule_in_bfloat16_is_infinite_at_one() -> None:
    t = torch.tensor(0.999, dtype=torch.bfloat16)
    assert float(t) == 1.0
    assert torch.isinf(-torch.log1p(-(1 - 1e-4) * t))


def test_times_are_never_zero_and_follow_their_generator() -> None:
    first = numerics.sample_times(10000, generator=torch.Generator().manual_seed(3))
    again = numerics.sample_times(10000, generator=torch.Generator().manual_seed(3))
    assert torch.equal(first, again)
    assert float(first.min()) >= 1e-4
    assert float(first.max()) <= 1.0


@pytest.mark.parametrize("predicts", ["noise", "data", "velocity"])
def test_snr_weights_are_bounded_at_both_ends(predicts: str) -> None:
    alphas = torch.tensor([0.0, 1e-30, 0.5, 1.0 - 1e-7, 1.0])
    weights = numerics.min_snr_weight(alphas, predicts=predicts, gamma=5.0)
    assert torch.isfinite(weights).all()
    assert float(weights.max()) <= 5.0
    assert float(weights.min()) >= 0.0


def test_snr_weights_equal_their_definition_in_the_middle() -> None:
    alphas = torch.tensor([0.3, 0.9, 0.99], dtype=torch.float64)
    snr = alphas / (1 - alphas)
    capped = snr.clamp(max=5.0)
    for predicts, wanted in {
        "data": capped,
        "noise": capped / snr,
        "velocity": capped / (snr + 1),
    }.items():
        assert torch.allclose(
            numerics.min_snr_weight(alphas, predicts=predicts).double(), wanted, rtol=1e-6
        ), predicts


@pytest.mark.parametrize("kind", ["exponential", "root"])
def test_decoupled_weights_are_finite_at_both_ends(kind: str) -> None:
    for weight in numerics.ddm_weights(torch.tensor([0.0, 0.5, 1.0]), kind=kind, limit=50.0):
        assert torch.isfinite(weight).all()
        assert float(weight.max()) <= 50.0


def test_a_limit_of_the_decoupled_weights_that_acts_is_counted() -> None:
    counted = Events()
    numerics.ddm_weights(
        torch.tensor([0.0, 0.5, 1.0]), kind="exponential", limit=100.0, count=counted
    )
    assert counted.counts() == {}
    numerics.ddm_weights(torch.tensor([0.0, 0.5, 1.0]), kind="root", limit=100.0, count=counted)
    assert counted.counts() == {"ddm_weights.limited": 2}
