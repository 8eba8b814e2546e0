"""Fixes that change values: the number looks finite, the gradient is not, or nothing is learned any
more.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepguard import Guard, GuardConfig, Probes, numerics

QUIET = GuardConfig(terminal="quiet", probes=Probes(locate_budget=0))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))


def rows_with_one_nan() -> Tensor:
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    x[0, 0] = torch.nan
    return x


def finite_gradients(model: nn.Module) -> int:
    return sum(
        p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in model.parameters()
    )


@pytest.mark.parametrize("where", ["loss", "prediction"])
def test_nan_to_num_leaves_a_finite_loss_over_gradients_that_are_nan(where: str) -> None:
    model = net()
    predicted = model(rows_with_one_nan())
    if where == "prediction":
        loss = torch.nan_to_num(predicted).square().mean()
    else:
        loss = torch.nan_to_num(predicted.square().mean())
    loss.backward()

    assert bool(torch.isfinite(loss))
    assert finite_gradients(model) < 4  # of four
    assert bool(torch.isnan(model[0].weight.grad).any())


def test_nan_to_num_shows_a_plausible_loss_of_a_model_that_is_all_nan() -> None:
    model = net()
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    source = torch.Generator().manual_seed(2)
    seen = [
        F.mse_loss(
            torch.nan_to_num(model(torch.randn(64, 3, generator=source))),
            torch.randn(64, 1, generator=source),
        )
        for _ in range(5)
    ]

    assert [0.5 < loss.item() < 2.0 for loss in seen] == [True] * 5


def test_the_same_step_under_a_guard_leaves_the_weights_alone() -> None:
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    with Guard(model, torch.optim.AdamW(model.parameters()), config=QUIET) as guard:
        result = guard.step(
            lambda x: torch.nan_to_num(model(x)).square().mean(), rows_with_one_nan()
        )

        assert result.incident is not None and result.incident.verdict.kind == "nonfinite_gradient"
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_where_behind_the_logarithm_leaves_a_nan_gradient_and_before_it_does_not() -> None:
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    torch.where(x > 0, torch.log(x), 0.0).sum().backward()
    assert x.grad is not None and torch.isnan(x.grad).tolist() == [True, False]

    x.grad = None
    numerics.safe_log(x).sum().backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize(("loss", "clamped", "slope"), [(50.0, 50.0, 1.0), (150.0, 100.0, 0.0)])
def test_a_clamp_on_the_loss_ends_the_gradient_where_it_is_needed(
    loss: float, clamped: float, slope: float
) -> None:
    x = torch.tensor(loss, requires_grad=True)
    found = torch.clamp(x * 1.0, max=100.0)
    found.backward()
    assert (found.item(), x.grad) == (clamped, torch.tensor(slope))


def test_a_clamped_loss_never_comes_down_and_a_soft_limit_does() -> None:
    def ends_at(limited: object) -> float:
        w = nn.Parameter(torch.tensor(20.0))
        optimizer = torch.optim.Adam([w], lr=0.1)
        for _ in range(600):
            optimizer.zero_grad()
            limited(w.square()).backward()  # type: ignore[operator]
            optimizer.step()
        return abs(w.item())

    assert ends_at(lambda loss: torch.clamp(loss, max=100.0)) == 20.0
    assert ends_at(lambda loss: numerics.soft_limit(loss, 100.0)) < 0.1


def test_a_clamp_lets_nan_pass_and_makes_one_of_an_overflow() -> None:
    assert torch.isnan(torch.clamp(torch.tensor(torch.nan), max=100.0))
    w = torch.tensor(100.0, requires_grad=True)
    loss = torch.clamp(torch.exp(w), max=100.0)
    loss.backward()
    assert loss.item() == 100.0
    assert w.grad is not None and torch.isnan(w.grad)  # 0 times Inf


def test_a_loss_replaced_by_a_small_constant_trains_nothing() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.tensor(1e-6).backward()
    before = model[0].weight.detach().clone()
    torch.tensor(1e-6, requires_grad=True).backward()
    optimizer.step()
    assert [p.grad for p in model.parameters()] == [None] * 4
    assert torch.equal(model[0].weight, before)


def test_zero_times_a_nan_loss_is_nan() -> None:
    model = net()
    (model(rows_with_one_nan()).mean() * 0.0).backward()
    assert bool(torch.isnan(model[0].weight.grad).any())


def test_a_loss_of_zero_has_a_gradient_norm_of_zero_and_not_nan() -> None:
    model = net()
    (model(torch.ones(2, 3)) * 0.0).sum().backward()
    assert float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("labels", [0, 1, 7, 4096])
def test_an_eps_of_1e_8_beside_a_count_has_no_effect(labels: int, dtype: torch.dtype) -> None:
    count = torch.tensor(float(labels), dtype=dtype).clamp(min=1)
    assert torch.equal(count + 1e-8, count)


def test_labels_that_are_all_masked_give_nan_and_by_hand_a_nan_gradient_too() -> None:
    ignored = torch.full((4,), -100)
    logits = torch.randn(4, 7, requires_grad=True)
    loss = F.cross_entropy(logits, ignored)
    loss.backward()
    assert torch.isnan(loss) and float(logits.grad.abs().max()) == 0.0  # type: ignore[union-attr]

    mask = torch.zeros(4)
    logits.grad = None
    by_hand = (
        F.cross_entropy(logits, torch.zeros(4, dtype=torch.long), reduction="none") * mask
    ).sum() / mask.sum()
    by_hand.backward()
    assert torch.isnan(by_hand) and bool(torch.isnan(logits.grad).all())

    logits.grad = None
    loss = numerics.masked_cross_entropy(logits, ignored, count=numerics.Events())
    loss.backward()
    assert loss.item() == 0.0 and float(logits.grad.abs().max()) == 0.0  # type: ignore[attr-defined]


def test_the_mean_of_micro_batch_means_is_another_loss() -> None:
    long, short = torch.ones(8), torch.full((1,), 9.0)
    assert float((long.mean() + short.mean()) / 2) == 5.0
    assert float(torch.cat([long, short]).mean()) == pytest.approx(1.889, abs=1e-3)
    share = numerics.token_share([long, short], len)
    assert float(long.sum() / share + short.sum() / share) == pytest.approx(17 / 9)


def test_zero_infinity_counts_a_sample_it_could_not_read_as_a_loss_of_zero() -> None:
    torch.manual_seed(0)
    scores = torch.randn(16, 2, 37).log_softmax(-1)
    targets = torch.stack(
        [torch.ones(10, dtype=torch.long), torch.arange(1, 11)]
    )  # ten times "1" needs 19 frames
    lengths = torch.full((2,), 16), torch.full((2,), 10)
    plain = F.ctc_loss(scores, targets, *lengths, reduction="none")
    zeroed = F.ctc_loss(scores, targets, *lengths, reduction="none", zero_infinity=True)

    assert torch.isinf(plain[0]) and zeroed[0].item() == 0.0
    assert float((zeroed / 10).mean()) == pytest.approx(
        float(plain[1] / 10) / 2
    )  # half of the true loss


def test_normalising_latents_inside_the_loss_loses_their_scale() -> None:
    target = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    unit = F.normalize(target, dim=-1, eps=1e-8)
    worst = F.mse_loss(unit, -unit)
    assert float(worst) == pytest.approx(4 / 32)  # a clamp at 10 or 100 above it never acts
    a_thousand_times_too_large = F.normalize(1000.0 * target, dim=-1, eps=1e-8)
    assert float(F.mse_loss(a_thousand_times_too_large, unit)) < 1e-12
    assert float(F.mse_loss(1000.0 * target, target)) > 9e5


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, 1e8), (torch.bfloat16, 1e8)])
def test_normalising_a_zero_vector_multiplies_its_gradient_by_1e8(
    dtype: torch.dtype, largest: float
) -> None:
    x = torch.zeros(1, 32, dtype=dtype, requires_grad=True)
    F.normalize(x, dim=-1, eps=1e-8).sum().backward()
    assert x.grad is not None and float(x.grad.abs().max()) == pytest.approx(largest, rel=0.01)


def test_normalising_a_zero_vector_in_float16_is_nan() -> None:
    x = torch.zeros(1, 32, dtype=torch.float16)
    assert bool(torch.isnan(F.normalize(x, dim=-1, eps=1e-8)).all())
    assert torch.isfinite(numerics.latent_mse(x, x, normalize=True))


def test_the_weights_of_the_decoupled_loss_never_reach_the_clamp() -> None:
    first, second = numerics.ddm_weights(torch.linspace(0.0, 1.0, 10001), limit=1e30)
    assert float(first.max()) == pytest.approx(5.4366, abs=1e-4)
    assert float(second.max()) == pytest.approx(2.7183, abs=1e-4)
