"""Functions and layers with a singular point: equal to torch away from it, finite on it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import stepguard
from stepguard import numerics
from stepguard.numerics import Events

# --- functions with a singular point: right away from it, finite on it, NaN outside their domain

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

UNARY: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], list[float]]] = {
    "sqrt": (numerics.safe_sqrt, torch.sqrt, [0.25, 1.0, 3.5]),
    "acos": (numerics.safe_acos, torch.acos, [-0.9, 0.0, 0.7]),
    "asin": (numerics.safe_asin, torch.asin, [-0.9, 0.1, 0.7]),
    "log": (numerics.safe_log, torch.log, [0.25, 1.0, 7.5]),
    "pow": (lambda x: numerics.safe_pow(x, 0.3), lambda x: x**0.3, [0.25, 1.0, 3.5]),
}


@pytest.mark.parametrize("name", UNARY)
def test_equals_torch_away_from_the_singular_point(name: str) -> None:
    ours, theirs, points = UNARY[name]
    x = torch.tensor(points, dtype=torch.float64, requires_grad=True)
    assert torch.allclose(ours(x), theirs(x), rtol=1e-14)
    assert torch.autograd.gradcheck(ours, (x,))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", UNARY)
def test_is_close_to_float64_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    ours, theirs, points = UNARY[name]
    x = torch.tensor(points, dtype=dtype)
    assert torch.allclose(
        ours(x).double(), theirs(x.double()), rtol=4 * torch.finfo(dtype).eps, atol=1e-6
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "point", "value"),
    [
        ("sqrt", 0.0, 0.0),
        ("acos", 1.0, 0.0),
        ("acos", -1.0, 3.1415926),
        ("log", 0.0, None),
        ("asin", 1.0, 1.5707963),
        ("pow", 0.0, 0.0),
    ],
)
def test_value_and_gradient_are_finite_at_the_singular_point(
    name: str, point: float, value: float | None, dtype: torch.dtype
) -> None:
    x = torch.tensor(point, dtype=dtype, requires_grad=True)
    y = UNARY[name][0](x)
    y.backward()
    assert torch.isfinite(y)
    assert x.grad is not None
    assert torch.isfinite(x.grad)
    if value is not None:
        assert y.item() == pytest.approx(value, abs=3 * torch.finfo(dtype).eps ** 0.5)


@pytest.mark.parametrize(("name", "outside"), [("sqrt", -1.0), ("acos", 1.5), ("log", -0.1)])
def test_outside_the_domain_the_answer_stays_nan(name: str, outside: float) -> None:
    assert torch.isnan(UNARY[name][0](torch.tensor(outside)))


def test_a_cosine_rounded_past_one_is_an_angle_near_zero() -> None:
    angle = numerics.safe_acos(torch.tensor(1.0 + 1e-7))
    assert angle.item() == pytest.approx(0.0, abs=1e-3)


def test_torch_alone_gives_an_infinite_gradient_where_ours_is_zero() -> None:
    x = torch.tensor(0.0, requires_grad=True)
    torch.sqrt(x).backward()
    assert x.grad is not None
    assert torch.isinf(x.grad)
    y = torch.tensor(0.0, requires_grad=True)
    numerics.safe_sqrt(y).backward()
    assert y.grad is not None
    assert float(y.grad) == 0.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_neither_overflows_nor_underflows(dtype: torch.dtype) -> None:
    largest, smallest = torch.finfo(dtype).max / 4, torch.finfo(dtype).tiny * 4
    for size in (largest, smallest):
        found = numerics.safe_norm(torch.full((4,), size, dtype=dtype))
        assert found.item() == pytest.approx(2 * size, rel=4 * torch.finfo(dtype).eps)


def test_norm_of_a_zero_vector_has_gradient_zero() -> None:
    x = torch.zeros(3, requires_grad=True)
    numerics.safe_norm(x).backward()
    assert torch.equal(x.grad, torch.zeros(3))


def test_norm_passes_gradcheck_over_one_dimension() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: numerics.safe_norm(v, dim=1), (x,))
    assert torch.allclose(numerics.safe_norm(x, dim=1, keepdim=True), x.norm(dim=1, keepdim=True))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_norm_does_not_hide_a_bad_element(bad: float) -> None:
    assert not torch.isfinite(numerics.safe_norm(torch.tensor([1.0, bad])))


def test_division_by_zero_gives_the_chosen_value_without_a_gradient() -> None:
    top, bottom = torch.ones(2, requires_grad=True), torch.tensor([0.0, 4.0], requires_grad=True)
    found = numerics.safe_div(top, bottom, otherwise=7.0)
    found.sum().backward()
    assert found.tolist() == [7.0, 0.25]
    assert top.grad is not None
    assert bottom.grad is not None
    assert top.grad.tolist() == [0.0, 0.25]
    assert bottom.grad.tolist() == [0.0, -0.0625]


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_eps_that_would_vanish_is_raised_to_what_the_dtype_can_hold(dtype: torch.dtype) -> None:
    eps = numerics.lasting_eps(1e-8, dtype)
    assert float(torch.tensor(eps, dtype=dtype)) > 0
    assert eps >= 1e-8


@pytest.mark.parametrize("eps", [0.0, -1e-6, 1.0])
def test_an_impossible_eps_is_refused_with_its_value(eps: float) -> None:
    with pytest.raises(stepguard.ConfigError, match=str(eps)):
        numerics.lasting_eps(eps, torch.float32)


def test_angle_of_the_origin_is_0_and_has_gradient_0() -> None:
    y = torch.tensor([0.0, 1.0, -2.0], dtype=torch.float64, requires_grad=True)
    x = torch.tensor([0.0, 3.0, -1.0], dtype=torch.float64, requires_grad=True)
    angle = numerics.safe_atan2(y, x)
    assert torch.equal(angle[1:], torch.atan2(y, x)[1:]) and angle[0] == 0
    angle.sum().backward()
    assert x.grad is not None and y.grad is not None
    assert x.grad[0] == 0 and y.grad[0] == 0 and x.grad.isfinite().all()


def test_softmax_of_a_masked_row_is_0_and_of_others_as_in_torch() -> None:
    x = torch.tensor([[1.0, 2.0], [-torch.inf, -torch.inf]], requires_grad=True)
    weights = numerics.safe_softmax(x)
    assert torch.equal(weights[0], torch.softmax(x, dim=-1)[0])
    assert torch.equal(weights[1], torch.zeros(2))
    weights.pow(2).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


def test_zero_to_a_negative_power_is_still_infinite() -> None:
    assert numerics.safe_pow(torch.tensor(0.0), -1.0) == torch.inf


def test_division_takes_python_numbers() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    assert torch.equal(numerics.safe_div(x, 2.0), x / 2.0)
    blank = numerics.safe_div(x, 0.0)
    assert torch.equal(blank, torch.zeros(2))
    blank.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.zeros(2))
    assert float(numerics.safe_div(3, 0, otherwise=5.0)) == 5.0
    assert float(numerics.safe_div(3, 2)) == 1.5


# --- rMSNorm: equal to torch, with a finite gradient at zero


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


# --- sinkhorn in log space: finite for scores of any size, and honest about its residual


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


# --- reading, mixing and writing residual streams


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


# --- every function compiles into one graph with the same result

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
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_into_one_graph_with_the_same_result(name: str) -> None:
    x = torch.randn(4, 4)
    compiled = torch.compile(COMPILED[name], backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x), COMPILED[name](x), equal_nan=True)
    torch.compiler.reset()
