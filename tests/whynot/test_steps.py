"""Fixes around the optimizer's step: what is checked, when, and what "skip" has to mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_

from stepguard import Guard, GuardConfig, Probes

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
