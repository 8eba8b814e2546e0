"""Common advice against NaN, tried: what each fix does, and what the guard does instead."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import stepguard
from stepguard import Guard, GuardConfig, Probes, TrainingHalted, numerics

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


QUIET = GuardConfig(terminal="quiet", probes=Probes(locate_budget=0))


def parameters(*gradients: list[float]) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.ones(len(values))) for values in gradients]
    for parameter, values in zip(made, gradients, strict=True):
        parameter.grad = torch.tensor(values)
    return made


@pytest.mark.parametrize(
    ("test", "survives"),
    [(torch.isnan, False), (lambda norm: ~torch.isfinite(norm), True)],
    ids=["isnan", "isfinite"],
)
def test_isnan_lets_an_infinite_norm_pass_and_the_weights_are_nan(
    test: Callable[[torch.Tensor], torch.Tensor], survives: bool
) -> None:
    (weight,) = parameters([1.0, math.inf, 2.0])
    optimizer = torch.optim.AdamW([weight], lr=1e-3)
    norm = clip_grad_norm_([weight], 1.0)
    if bool(test(norm)):
        optimizer.zero_grad(set_to_none=True)
    optimizer.step()

    assert norm == math.inf
    assert bool(torch.isfinite(weight).all()) is survives


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_clipping_first_or_checking_first_sees_the_same_norm(bad: float) -> None:
    given = [1.0, bad, 2.0], [1.0, 1.0, 1.0]
    before = torch.linalg.vector_norm(
        torch.cat([p.grad for p in parameters(*given) if p.grad is not None])
    )
    made = parameters(*given)
    returned = clip_grad_norm_(made, 1.0)

    torch.testing.assert_close(returned, before, equal_nan=True)
    clipped = made[1].grad
    assert clipped is not None  # the healthy gradients are lost in either case
    assert bool(torch.isnan(clipped).all()) if math.isnan(bad) else bool((clipped == 0).all())


def test_the_norm_that_clipping_returns_is_the_one_before_it() -> None:
    (weight,) = parameters([3.0, 4.0])
    assert float(clip_grad_norm_([weight], 0.5)) == 5.0
    assert weight.grad is not None and float(weight.grad.norm()) == pytest.approx(0.5)


def test_a_tighter_clip_changes_nothing_under_adam() -> None:
    def ends_at(threshold: float) -> torch.Tensor:
        source = torch.Generator().manual_seed(1)
        weight = nn.Parameter(torch.zeros(4))
        optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.0)
        for _ in range(50):
            weight.grad = torch.randn(4, generator=source) * 10 + 5
            clip_grad_norm_([weight], threshold)
            optimizer.step()
        return weight.detach()

    loose = ends_at(1.0)
    assert float(loose.abs().max()) > 0.02
    for threshold in (0.5, 0.3, 0.1):
        torch.testing.assert_close(ends_at(threshold), loose, rtol=1e-5, atol=0.0)


def test_zeroed_gradients_are_still_a_step_and_missing_ones_are_not() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=1e-2, weight_decay=0.01)
    for _ in range(5):
        weight.grad = torch.ones(3)
        optimizer.step()
    before = weight.detach().clone()
    weight.grad = torch.zeros(3)
    optimizer.step()
    assert float((weight.detach() - before).abs().max()) == pytest.approx(8.7e-3, rel=0.05)

    before = weight.detach().clone()
    optimizer.zero_grad(set_to_none=True)
    optimizer.step()
    assert torch.equal(weight, before)


def test_a_finite_loss_does_not_promise_finite_gradients() -> None:
    x = torch.zeros(3, requires_grad=True)
    loss = x.square().sum().sqrt()
    assert loss.item() == 0.0
    loss.backward()
    assert x.grad is not None and bool(torch.isnan(x.grad).all())


def micro_batches(bad: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.tensor([math.nan if index in bad else 1.0]) for index in range(4)]


@pytest.mark.parametrize(("bad", "share"), [((), 1.0), ((1,), 0.75), ((0, 1, 2), 0.25)])
def test_continue_inside_accumulation_shrinks_the_gradient_and_the_guard_does_not(
    bad: tuple[int, ...], share: float
) -> None:
    weight = nn.Parameter(torch.zeros(1))
    for batch in micro_batches(bad):
        loss = (weight - 1.0).square().mean() * batch.mean()
        if torch.isnan(loss):
            continue
        (loss / 4).backward()
    assert weight.grad is not None and weight.grad.item() == -2.0 * share

    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    with Guard(model, torch.optim.SGD(model.parameters(), lr=0.5), config=QUIET) as guard:
        guard.step(lambda batch: (model(batch) - 1.0).square().mean() / 4, *micro_batches(bad))
    assert model.weight.item() == 1.0  # half of a gradient of -2, whatever was left out


def test_a_step_of_bad_micro_batches_advances_the_schedule_unguarded_and_not_guarded() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()  # every micro-batch was passed over with `continue`
    schedule.step()
    assert schedule.get_last_lr() == [0.5]
    with Guard(model, optimizer, scheduler=schedule, config=QUIET) as guard:
        guard.step(lambda batch: model(batch).mean(), *micro_batches((0, 1, 2, 3)))
    assert schedule.get_last_lr() == [0.5]


def test_continue_above_the_counter_never_ends_when_every_batch_is_bad() -> None:
    step, tries = 0, 0
    for tries in count(1):
        if step == 10 or tries > 1000:
            break
        if math.isnan(math.nan):
            continue
        step += 1
    assert (step, tries) == (0, 1001)


def test_clipping_before_unscaling_clips_to_nothing() -> None:
    def gradient(order: str) -> float:
        torch.manual_seed(0)
        model, inputs = nn.Linear(4, 1), torch.randn(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = GradScaler("cpu", init_scale=2.0**16)
        scaler.scale(model(inputs).square().mean()).backward()
        if order == "clip first":
            clip_grad_norm_(model.parameters(), 1.0)
            scaler.unscale_(optimizer)
        else:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)
        return float(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
        )

    assert gradient("clip first") == pytest.approx(2.0**-16, rel=1e-3)
    assert gradient("unscale first") > 0.5


def test_continue_between_unscale_and_update_ends_the_next_step() -> None:
    model = nn.Linear(4, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 4)).mean()).backward()
    scaler.unscale_(optimizer)
    optimizer.zero_grad()  # and `continue`, without scaler.update()
    scaler.scale(model(torch.ones(2, 4)).mean()).backward()
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        scaler.unscale_(optimizer)


def test_a_scaler_over_nan_weights_halves_its_scale_to_nothing() -> None:
    model = nn.Linear(4, 1)
    model.weight.data[0, 0] = math.nan
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu")
    for _ in range(200):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 0.0


def test_a_static_scale_that_overflows_is_skipped_at_every_step() -> None:
    """The guard lowers it: tests/engine/test_transaction_policy.py."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).half()
    skipped = 0
    for batch in torch.randn(12, 4, 6):
        model.zero_grad()
        loss = model(batch.half()).float().square().sum() * 8
        (loss * 65536.0).backward()
        skipped += not bool(torch.isfinite(clip_grad_norm_(model.parameters(), 1.0)))
    assert skipped == 12


def poisoned() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    model.weight.data[0, 0] = math.nan
    return model


def test_skipping_never_heals_a_nan_weight_and_the_guard_stops_at_once() -> None:
    model, skipped = poisoned(), 0
    for _ in range(100):
        loss = model(torch.randn(8, 4)).square().mean()
        skipped += not bool(torch.isfinite(loss))
    assert skipped == 100

    optimizer = torch.optim.AdamW(model.parameters())
    with Guard(model, optimizer, config=QUIET) as guard, pytest.raises(TrainingHalted) as halted:
        guard.step(lambda batch: model(batch).square().mean(), torch.randn(8, 4))
    assert halted.value.incident.reading.bad_state == ("param:weight",)


def test_weights_that_were_repaired_are_poisoned_again_by_the_optimizer_state() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.tensor([math.nan, 1.0])
    optimizer.step()
    weight.data.fill_(1.0)  # repaired
    weight.grad = torch.ones(2)
    optimizer.step()
    assert torch.isnan(weight).tolist() == [True, False]


def test_a_safe_exit_leaves_batchnorm_poisoned() -> None:
    torch.manual_seed(0)
    norm, inputs = nn.BatchNorm2d(3), torch.randn(4, 3, 8, 8)
    inputs[0, 0, 0, 0] = math.nan
    hidden = norm(inputs)
    out = hidden if bool(torch.isfinite(hidden).all()) else torch.zeros_like(inputs)

    assert bool(torch.isfinite(out).all())
    assert all(bool(torch.isfinite(p).all()) for p in norm.parameters())
    assert bool(torch.isnan(norm.eval()(torch.randn(1, 3, 8, 8))).any())  # every later evaluation


def test_one_average_with_a_poisoned_model_poisons_the_average() -> None:
    model = poisoned()
    average = nn.Linear(4, 1)
    with torch.no_grad():
        for mean, value in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(value, 1e-3)
    assert bool(torch.isnan(average.weight).any())


@pytest.mark.parametrize("rate", [1e-2, 1e-4, 1e-8])
def test_a_lower_learning_rate_does_not_move_a_failure_of_the_data(rate: float) -> None:
    """log(0) in a time embedding, once in 1001 draws: the failure of recipes/radiodiff."""
    torch.manual_seed(0)
    model, source = nn.Linear(2, 1), torch.Generator().manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    first = -1
    for step in range(400):
        times = torch.randint(0, 1001, (16, 1), generator=source) / 1000
        angles = torch.log(times) / 4
        loss = model(torch.cat([angles.sin(), angles.cos()], 1)).square().mean()
        if not torch.isfinite(loss):
            first = step
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert first == 50


def run(peak: float) -> tuple[torch.optim.Optimizer, OneCycleLR]:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=peak)
    return optimizer, OneCycleLR(optimizer, peak, total_steps=1000)


def test_a_lower_rate_in_the_configuration_is_undone_by_loading_the_optimizer() -> None:
    optimizer, schedule = run(5e-4)
    for _ in range(200):
        optimizer.step()
        schedule.step()
    saved = copy.deepcopy((optimizer.state_dict(), schedule.state_dict()))
    resumed, its_schedule = run(1e-4)
    its_schedule.load_state_dict(saved[1])
    resumed.step()
    its_schedule.step()
    assert resumed.param_groups[0]["lr"] < 1e-4  # the schedule alone keeps the new peak

    resumed.load_state_dict(saved[0])
    resumed.step()
    its_schedule.step()
    assert resumed.param_groups[0]["lr"] == pytest.approx(schedule.get_last_lr()[0], rel=0.05)
    assert resumed.param_groups[0]["max_lr"] == 5e-4


def test_the_rates_of_the_reports_healthy_log_are_impossible_with_its_settings() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1e-4)
    schedule = OneCycleLR(optimizer, 1e-4, total_steps=80 * 594)
    rates = []
    for _ in range(15 * 594):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    ends = [rates[epoch * 594 - 1] for epoch in (1, 2, 15)]
    assert ends == pytest.approx(
        [4.41e-6, 5.63e-6, 7.04e-5], rel=0.01
    )  # said: 5.00e-05, 7.23e-05, 1.23e-04


def test_a_floor_given_to_lambda_lr_is_a_factor_and_past_the_end_a_complex_number() -> None:
    steps, floor = 50_000, 1e-6

    def factor(step: int) -> float:
        return max((1 - step / steps) ** 0.96, floor)

    schedule = LambdaLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-5), factor)
    assert schedule.base_lrs[0] * factor(steps) == pytest.approx(1e-11)  # 1e-6 was meant
    with pytest.raises(TypeError, match="complex"):
        factor(steps + 1)


def test_the_reports_look_at_a_checkpoint_misses_inf_optimizer_and_other_layouts(
    tmp_path: Path,
) -> None:
    def one_liner(path: Path) -> bool:
        return any(bool(torch.isnan(p).any()) for p in torch.load(path)["model"].values())

    model = nn.Linear(2, 2)
    infinite = {**model.state_dict(), "bias": torch.tensor([math.inf, 0.0])}
    moments = {
        "state": {0: {"exp_avg": torch.tensor([math.nan])}},
        "param_groups": [{"params": [0], "lr": 0.1}],
    }
    files = {
        "infinite": {"model": infinite},
        "moments": {"model": model.state_dict(), "optimizer": moments},
        "bare": {**model.state_dict(), "bias": torch.tensor([math.nan, 0.0])},
    }
    for name, content in files.items():
        torch.save(content, tmp_path / f"{name}.pt")

    assert [one_liner(tmp_path / f"{name}.pt") for name in ("infinite", "moments")] == [
        False,
        False,
    ]
    with pytest.raises(KeyError):
        one_liner(tmp_path / "bare.pt")
    assert [stepguard.verify(tmp_path / f"{name}.pt").ok for name in files] == [False] * 3


def test_bfloat16_has_the_range_of_float32() -> None:
    assert torch.finfo(torch.bfloat16).max == pytest.approx(3.39e38, rel=0.01)
    assert torch.finfo(torch.float16).max == 65504


@pytest.mark.parametrize(("dtype", "end"), [(torch.float32, 0.9), (torch.bfloat16, 1.0)])
def test_bfloat16_weights_do_not_move_at_the_rates_of_the_report(
    dtype: torch.dtype, end: float
) -> None:
    weight = nn.Parameter(torch.ones(1, dtype=dtype))
    optimizer = torch.optim.AdamW([weight], lr=1e-4, weight_decay=0.0)
    for _ in range(1000):
        weight.grad = torch.ones(1, dtype=dtype)
        optimizer.step()
    assert weight.item() == pytest.approx(end, abs=1e-3)


def test_a_uniform_time_is_exactly_one_in_bfloat16_once_in_512_draws() -> None:
    times = torch.rand(1_000_000, generator=torch.Generator().manual_seed(0))
    share = float((times.bfloat16() == 1).float().mean())
    assert share == pytest.approx(1 / 512, rel=0.1)
    assert not bool((times == 1).any())
    in_half = 1.0 / (1.0 - torch.tensor(0.9985).bfloat16())
    assert torch.isinf(in_half)


@pytest.mark.parametrize(
    ("dtype", "eps", "rows"),
    [
        (torch.float16, 1e-8, [0, 3, 4, 5, 6, 7]),
        (torch.float16, 1e-4, []),
        (torch.bfloat16, 1e-8, []),
    ],
)
def test_an_eps_of_1e_8_is_zero_in_float16_and_every_row_without_a_gradient_turns_nan(
    dtype: torch.dtype, eps: float, rows: list[int]
) -> None:
    table = nn.Embedding(8, 4).to(dtype)
    optimizer = torch.optim.AdamW(table.parameters(), lr=1e-4, eps=eps, fused=False)
    table(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert torch.isnan(table.weight).any(-1).nonzero().flatten().tolist() == rows


@pytest.mark.parametrize(("eps", "gain"), [(1e-20, 1e10), (1e-6, 1e3)])
def test_a_norm_with_an_eps_of_1e_20_multiplies_gradients_by_1e10_at_zero(
    eps: float, gain: float
) -> None:
    x = torch.zeros(1, 64, requires_grad=True)
    numerics.rms_norm(x, eps=eps).sum().backward()
    assert x.grad is not None and float(x.grad.max()) == pytest.approx(gain, rel=0.01)


def by_exp(scores: Tensor, eps: float = 0.0) -> Tensor:
    matrix = torch.exp(scores)
    for _ in range(20):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [(torch.float32, 88.7), (torch.bfloat16, 88.5), (torch.float16, 11.0)],
    ids=str,
)
def test_exp_overflows_at_88_and_only_in_float16_at_11(dtype: torch.dtype, largest: float) -> None:
    assert torch.isfinite(torch.exp(torch.tensor(largest, dtype=dtype)))
    assert torch.isinf(torch.exp(torch.tensor(largest + 0.8, dtype=dtype)))


FIXES = {
    "exp": by_exp,
    "eps": lambda s: by_exp(s, 1e-8),
    "where": lambda s: torch.where(
        torch.isnan(made := by_exp(s)), torch.full_like(made, 0.5), made
    ),
    "clamp": lambda s: by_exp(s.clamp(-10.0, 10.0), 1e-8),
    "log": lambda s: numerics.sinkhorn(s).matrix,
}


@pytest.mark.parametrize(
    ("fix", "value", "slope"),
    [
        ("exp", "nan", "nan"),
        ("eps", "nan", "nan"),
        ("where", "finite", "nan"),
        ("clamp", "finite", "dead"),
        ("log", "finite", "alive"),
    ],
)
def test_of_the_fixes_of_sinkhorn_only_log_space_has_values_and_gradients(
    fix: str, value: str, slope: str
) -> None:
    scores = torch.tensor([[[100.0, 99.0], [99.5, 100.0]]], requires_grad=True)
    matrix = FIXES[fix](scores)
    (matrix * torch.tensor([[1.0, 2.0], [3.0, 5.0]])).sum().backward()
    assert scores.grad is not None
    corner = float(scores.grad[0, 0, 0])

    assert ("finite" if bool(torch.isfinite(matrix).all()) else "nan") == value
    if slope == "nan":
        assert math.isnan(corner)
    else:
        assert (corner == 0.0) is (slope == "dead")


def test_the_reports_einsum_takes_the_diagonal_and_amplifies_nothing() -> None:
    streams, matrix = torch.randn(2, 4, 3, 5, 5), torch.rand(2, 4, 4).softmax(-1)
    mixed = torch.einsum("bnn,bnchw->bnchw", matrix, streams)
    assert torch.equal(mixed, matrix.diagonal(dim1=1, dim2=2)[..., None, None, None] * streams)
    assert float(mixed.norm() / streams.norm()) < 1.0


@pytest.mark.parametrize(("streams", "gain"), [(1, 1.5), (2, 1.5), (4, 2.25), (8, 4.125)])
def test_more_streams_grow_faster_because_the_read_out_adds_them(streams: int, gain: float) -> None:
    """A block that is only its own skip; H_pre = 1/2, H_post = 1, the report's diagonal 1/n."""
    x = torch.randn(1, 1, 3, 4, 4, generator=torch.Generator().manual_seed(0)).expand(
        1, streams, 3, 4, 4
    )
    half, one = torch.full((1, streams), 0.5), torch.ones(1, streams)
    out = numerics.write_in(x / streams, numerics.read_out(x, half), one).mean(1)
    assert float(out.norm() / x[:, 0].norm()) == pytest.approx(gain)  # n / 2 + 1 / n
