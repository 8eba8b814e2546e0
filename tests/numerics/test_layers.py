"""Sinkhorn, hyper-connections, RMSNorm, diffusion schedules and CTC."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import stepguard
from stepguard import numerics
from stepguard.numerics import Events

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("size", [1.0, 100.0, 1e4])
def test_sinkhorn_is_finite_forward_and_backward_for_scores_of_any_size(size: float) -> None:
    scores = (torch.randn(3, 4, 4) * size).requires_grad_()
    found = numerics.sinkhorn(scores)
    (found.matrix * torch.randn(3, 4, 4)).sum().backward()
    assert torch.isfinite(found.matrix).all()
    assert scores.grad is not None
    assert torch.isfinite(scores.grad).all()
    assert torch.allclose(found.matrix.sum(-1), torch.ones(3, 4), atol=1e-5)


def test_sinkhorn_by_exp_overflows_where_ours_does_not() -> None:
    plain = torch.full((4, 4), 89.0).exp()
    assert torch.isinf(plain).all()
    assert torch.allclose(
        numerics.sinkhorn(torch.full((4, 4), 89.0)).matrix, torch.full((4, 4), 0.25)
    )


def test_sinkhorn_tells_how_far_it_is_from_doubly_stochastic() -> None:
    scores = torch.randn(5, 4, 4, dtype=torch.float64) * 3
    few, many = numerics.sinkhorn(scores, iterations=1), numerics.sinkhorn(scores, iterations=200)
    assert float(few.residual) == pytest.approx(float((few.matrix.sum(-2) - 1).abs().max()))
    assert float(many.residual) < 1e-3 < float(few.residual)


def test_sinkhorn_passes_gradcheck() -> None:
    scores = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: numerics.sinkhorn(s, iterations=5).matrix, (scores,))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinkhorn_keeps_the_dtype_and_computes_wide(dtype: torch.dtype) -> None:
    scores = torch.full((2, 2), 60.0, dtype=dtype)
    found = numerics.sinkhorn(scores).matrix
    assert found.dtype == dtype
    assert torch.allclose(found.float(), torch.full((2, 2), 0.5))


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_sinkhorn_refuses_what_is_not_square(shape: tuple[int, ...]) -> None:
    with pytest.raises(stepguard.ConfigError, match="square"):
        numerics.sinkhorn(torch.zeros(shape))


def test_mixing_uses_the_whole_matrix_and_not_its_diagonal() -> None:
    streams = torch.randn(2, 3, 4, 5, 5)
    matrix = torch.softmax(torch.randn(2, 3, 3), dim=-1).requires_grad_()
    mixed = numerics.mix_streams(streams, matrix)
    wanted = torch.stack(
        [sum(matrix[b, n, m] * streams[b, m] for m in range(3)) for b in range(2) for n in range(3)]
    )
    assert torch.allclose(mixed, wanted.reshape(mixed.shape), atol=1e-6)
    (mixed * torch.randn_like(mixed)).sum().backward()
    assert matrix.grad is not None
    assert bool((matrix.grad != 0).all())
    diagonal = torch.einsum("bnn,bnchw->bnchw", matrix, streams)
    assert not torch.allclose(mixed, diagonal)


def test_reading_and_writing_streams_are_the_sums_they_say() -> None:
    streams, weights, output = torch.randn(2, 3, 4), torch.rand(2, 3), torch.randn(2, 4)
    assert torch.allclose(
        numerics.read_out(streams, weights), (streams * weights[..., None]).sum(1), atol=1e-6
    )
    wanted = streams + weights[..., None] * output[:, None]
    assert torch.allclose(numerics.write_in(streams, output, weights), wanted, atol=1e-6)


def test_weights_that_do_not_fit_the_streams_are_named() -> None:
    with pytest.raises(stepguard.ConfigError, match=r"mix_streams.*\(2, 4, 4\).*\(2, 3, 5\)"):
        numerics.mix_streams(torch.zeros(2, 3, 5), torch.zeros(2, 4, 4))


def test_rms_norm_equals_torch_and_passes_gradcheck() -> None:
    x = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(6, dtype=torch.float64, requires_grad=True)
    assert torch.allclose(
        numerics.rms_norm(x, weight, eps=1e-6), F.rms_norm(x, (6,), weight, eps=1e-6)
    )
    assert torch.autograd.gradcheck(lambda a, w: numerics.rms_norm(a, w), (x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chain_of_rms_norms_at_zero_keeps_a_finite_gradient(dtype: torch.dtype) -> None:
    x = torch.zeros(1, 8, dtype=dtype, requires_grad=True)
    numerics.RMSNorm(8)(x).sum().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


def test_rms_norm_of_large_half_precision_numbers_does_not_overflow() -> None:
    x = torch.full((1, 8), 3000.0, dtype=torch.float16)
    assert torch.allclose(numerics.rms_norm(x).float(), torch.ones(1, 8), atol=1e-3)


def test_an_eps_that_amplifies_without_limit_is_refused() -> None:
    with pytest.raises(stepguard.ConfigError, match="1e-20"):
        numerics.RMSNorm(8, eps=1e-20)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_the_masking_schedule_is_finite_on_the_whole_interval(dtype: torch.dtype) -> None:
    t = torch.linspace(0, 1, 1001, dtype=torch.float64).to(dtype)
    sigma, rate = numerics.masking_schedule(t)
    assert sigma.dtype == torch.float32
    assert torch.isfinite(sigma).all()
    assert torch.isfinite(rate).all()
    assert float(sigma[-1]) == pytest.approx(-math.log(1e-4), rel=1e-5)


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


def test_cosine_alphas_fall_and_stay_positive() -> None:
    alphas = numerics.cosine_alphas(1000)
    assert bool((alphas[1:] < alphas[:-1]).all())
    assert float(alphas.min()) > 0


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


def test_time_features_of_zero_are_finite_where_a_plain_logarithm_is_not() -> None:
    t, frequencies = torch.tensor([0.0, 0.5]), torch.randn(4) * 16
    assert torch.isfinite(numerics.time_features(t, frequencies)).all()
    assert torch.isnan(torch.sin(torch.log(t)[:, None] * frequencies)).any()


def test_ctc_leaves_out_what_cannot_be_aligned_and_counts_it() -> None:
    counted = Events()
    logits = torch.randn(16, 2, 5, requires_grad=True)
    targets = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]])
    lengths = torch.tensor([16, 16]), torch.tensor([10, 10])
    loss = numerics.ctc_loss(logits.log_softmax(-1), targets, *lengths, count=counted)
    loss.backward()
    alone = F.ctc_loss(logits.log_softmax(-1)[:, 1:], targets[1:], lengths[0][1:], lengths[1][1:])
    assert loss.item() == pytest.approx(alone.item(), rel=1e-5)
    assert counted.counts() == {"ctc_loss.unalignable": 1}
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert torch.isinf(F.ctc_loss(logits.log_softmax(-1), targets, *lengths, reduction="none")[0])


def test_ctc_of_nothing_that_aligns_is_a_zero_with_a_graph() -> None:
    logits = torch.randn(3, 1, 4, requires_grad=True)
    loss = numerics.ctc_loss(
        logits.log_softmax(-1), torch.tensor([[1, 1, 1]]), torch.tensor([3]), torch.tensor([3])
    )
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


COMPILED = {
    "safe_sqrt": lambda x: numerics.safe_sqrt(x.abs()),
    "safe_norm": lambda x: numerics.safe_norm(x, dim=-1),
    "safe_acos": lambda x: numerics.safe_acos(x.tanh()),
    "safe_log": lambda x: numerics.safe_log(x.abs()),
    "safe_div": lambda x: numerics.safe_div(x, x.flip(0)),
    "rms_norm": lambda x: numerics.rms_norm(x),
    "sinkhorn": lambda x: numerics.sinkhorn(x).matrix,
    "soft_limit": lambda x: numerics.soft_limit(x.square(), 0.5),
    "latent_mse": lambda x: numerics.latent_mse(x, x.flip(0), normalize=True),
    "masked_mean": lambda x: numerics.masked_mean(x, x > 0, count=Events()),
    "masked_cross_entropy": lambda x: numerics.masked_cross_entropy(
        x, torch.arange(4), count=Events()
    ),
    "mix_streams": lambda x: numerics.mix_streams(x.expand(2, 4, 4), x.expand(2, 4, 4)),
    "masking_schedule": lambda x: numerics.masking_schedule(x.sigmoid())[0],
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_into_one_graph_with_the_same_result(name: str) -> None:
    x = torch.randn(4, 4)
    compiled = torch.compile(COMPILED[name], backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x), COMPILED[name](x), equal_nan=True)
    torch.compiler.reset()
