"""Losses over masks, micro-batches and diffusion times: right where torch is, finite where not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import stepguard
from stepguard import numerics
from stepguard.numerics import Events

# --- losses over masks: equal to torch where torch is right, finite and counted where torch is not

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _tokens() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    targets = torch.randint(7, (2, 5), generator=generator)
    targets[0, 2:] = -100
    return logits, targets


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_equals_torch_on_a_partial_mask(smoothing: float) -> None:
    logits, targets = _tokens()
    wanted = F.cross_entropy(logits.reshape(-1, 7), targets.reshape(-1), label_smoothing=smoothing)
    found = numerics.masked_cross_entropy(logits, targets, label_smoothing=smoothing)
    assert found.item() == pytest.approx(float(wanted), rel=1e-6)


def test_cross_entropy_without_a_label_is_a_zero_with_a_graph_and_is_counted() -> None:
    counted = Events()
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = numerics.masked_cross_entropy(logits, torch.full((2, 3), -100), count=counted)
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(logits.grad, torch.zeros_like(logits))
    assert counted.counts() == {"masked_cross_entropy.empty": 1}


def test_an_infinite_logit_under_the_mask_changes_nothing() -> None:
    logits, targets = _tokens()
    dirty = logits.clone()
    dirty[0, 3] = torch.inf
    dirty[0, 4] = torch.nan
    dirty.requires_grad_()
    loss = numerics.masked_cross_entropy(dirty, targets)
    loss.backward()
    assert float(loss.detach()) == float(numerics.masked_cross_entropy(logits, targets))
    assert dirty.grad is not None
    assert torch.isfinite(dirty.grad).all()


def test_multiplying_by_the_mask_would_have_given_nan() -> None:
    values, mask = torch.tensor([1.0, torch.inf]), torch.tensor([1.0, 0.0])
    assert torch.isnan((values * mask).sum())
    assert float(numerics.masked_mean(values, mask)) == 1.0


def test_a_nan_that_counts_stays_visible() -> None:
    logits, targets = _tokens()
    logits[1, 0, 0] = torch.nan
    assert torch.isnan(numerics.masked_cross_entropy(logits, targets))


@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_entropy_is_computed_in_float32_whatever_the_logits_are(dtype: torch.dtype) -> None:
    logits, targets = _tokens()
    narrow = logits.to(dtype)
    found = numerics.masked_cross_entropy(narrow, targets)
    wanted = numerics.masked_cross_entropy(narrow.double(), targets)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(float(wanted), rel=1e-5)


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(stepguard.ConfigError, match=r"\(2, 3, 5\).*\(3, 2\)"):
        numerics.masked_cross_entropy(torch.zeros(2, 3, 5), torch.zeros(3, 2, dtype=torch.long))


def test_masked_mean_of_rows_counts_the_empty_ones() -> None:
    counted = Events()
    values = torch.arange(6.0).reshape(2, 3).requires_grad_()
    mask = torch.tensor([[True, True, False], [False, False, False]])
    found = numerics.masked_mean(values, mask, dim=1, count=counted)
    found.sum().backward()
    assert found.tolist() == [0.5, 0.0]
    assert counted.counts() == {"masked_mean.empty": 1}
    assert values.grad is not None
    assert values.grad.tolist() == [[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]


def test_masked_mean_of_half_precision_does_not_overflow_in_the_sum() -> None:
    values = torch.full((100,), 60000.0, dtype=torch.float16)
    assert float(numerics.masked_mean(values, torch.ones(100))) == pytest.approx(60000.0)


@pytest.mark.parametrize("normalize", [False, True])
def test_latent_error_passes_gradcheck(normalize: bool) -> None:
    a = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    b = torch.randn(3, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda v: numerics.latent_mse(v, b, normalize=normalize), (a,))


@pytest.mark.parametrize("dtype", DTYPES)
def test_normalised_error_of_a_zero_vector_is_finite_forward_and_backward(
    dtype: torch.dtype,
) -> None:
    a = torch.zeros(2, 4, dtype=dtype, requires_grad=True)
    loss = numerics.latent_mse(a, torch.ones(2, 4, dtype=dtype), normalize=True)
    loss.backward()
    assert torch.isfinite(loss)
    assert a.grad is not None
    assert torch.isfinite(a.grad).all()


def test_latent_error_takes_a_weight_for_each_sample_and_a_mask() -> None:
    a, b = torch.ones(2, 3, 4), torch.zeros(2, 3, 4)
    assert float(numerics.latent_mse(a, b, weight=torch.tensor([1.0, 3.0]))) == 2.0
    mask = torch.tensor([[True, True, True], [False, False, False]])
    assert float(numerics.latent_mse(a, b, weight=torch.tensor([1.0, 3.0]), mask=mask)) == 1.0


def test_a_soft_limit_changes_nothing_below_and_keeps_the_gradient_above() -> None:
    loss = torch.tensor([0.5, 10.0, 150.0, 1e30], requires_grad=True)
    limited = numerics.soft_limit(loss, 10.0)
    limited.sum().backward()
    assert limited[:2].tolist() == [0.5, 10.0]
    assert loss.grad is not None
    assert loss.grad[:2].tolist() == [1.0, 1.0]
    assert float(loss.grad[2]) == pytest.approx(10.0 / 150.0)
    assert bool((loss.grad > 0).all())
    clamped = torch.tensor(150.0, requires_grad=True)
    clamped.clamp(max=10.0).backward()
    assert clamped.grad is not None
    assert float(clamped.grad) == 0.0


def test_a_soft_limit_lets_nan_through() -> None:
    assert torch.isnan(numerics.soft_limit(torch.tensor(torch.nan), 1.0))


# --- micro-batches weighed by the labels they hold


def test_a_common_denominator_makes_two_micro_batches_equal_to_one_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    targets = torch.randint(7, (2, 5), generator=generator)
    targets[0, 2:] = -100
    whole = numerics.masked_cross_entropy(logits, targets)
    share = numerics.token_share([targets[:1], targets[1:]], numerics.count_labels)
    halves = [
        numerics.masked_cross_entropy(logits[i : i + 1], targets[i : i + 1], denominator=share)
        for i in (0, 1)
    ]
    assert float(sum(halves)) == pytest.approx(float(whole), rel=1e-6)
    means = [numerics.masked_cross_entropy(logits[i : i + 1], targets[i : i + 1]) for i in (0, 1)]
    assert float(sum(means) / 2) != pytest.approx(float(whole), rel=1e-3)


def test_labels_are_counted_without_those_ignored_or_masked() -> None:
    targets = torch.tensor([1, -100, 2, 3])
    assert int(numerics.count_labels(targets)) == 3
    mask = torch.tensor([True, True, False, True])
    assert int(numerics.count_labels(targets, mask=mask)) == 2


def test_no_micro_batch_is_refused_and_no_label_gives_one() -> None:
    with pytest.raises(stepguard.ConfigError, match="no micro-batch"):
        numerics.token_share([], numerics.count_labels)
    empty = torch.full((3,), -100)
    assert float(numerics.token_share([empty], numerics.count_labels)) == 1.0


# --- times, schedules and weights of diffusion losses are finite on the whole interval


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


# --- counters of what the functions left out or limited


def test_events_add_up_until_they_are_cleared() -> None:
    counted = Events()
    counted.add("a", torch.tensor([True, True, False]))
    counted.add("a", torch.tensor(3))
    counted.add("b", torch.tensor(False))
    assert counted.counts() == {"a": 5}
    counted.clear()
    assert counted.counts() == {}
