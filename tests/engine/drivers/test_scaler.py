"""Loss scales and schedules: what a guard advances, holds back and takes for a jump."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

import stepguard
from engine.parts import each
from guard.optimizers import OPTIMIZERS
from scenes import Batch, batches, difference, plain_net, quiet
from stepguard import ConfigError, Guard, Incident, watch
from stepguard.engine.drivers.schedule import (
    declared_rates,
    evaluates_again,
    inner_optimizer,
    needs_closure,
    takes_closure,
    takes_found_inf,
)
from stepguard.journal import read_run

SCALE = 256.0


def _scaled_loss(model: nn.Linear, kind: str) -> Tensor:
    if kind == "overflow":  # finite as it is; only the scale makes its gradient infinite
        return torch.sin(model.weight * 1e37).sum()
    rows = torch.full((4, 4), float("nan") if kind == "nan" else 1.0)
    return model(rows).sum()


def _schedule_after(kinds: list[str], *, fused: bool) -> tuple[int, float]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count))
    with stepguard.watch(
        model, optimizer, scaler=scaler, scheduler=scheduler, config=quiet(locate=True)
    ):
        for kind in kinds:
            optimizer.zero_grad()
            scaler.scale(_scaled_loss(model, kind)).backward()
            scaler.step(optimizer)
            before = scaler.get_scale()
            scaler.update()
            if scaler.get_scale() >= before:
                scheduler.step()
    return scheduler.last_epoch, scaler.get_scale()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize(
    "kinds",
    [
        ["good", "good", "overflow", "nan", "good", "good"],
        ["good", "overflow", "nan", "overflow", "good", "good"],
        ["overflow", "nan", "good", "good"],
        ["good", "nan", "overflow", "nan", "good"],
    ],
    ids=" ".join,
)
def test_schedule_counts_updates_only(kinds: list[str], fused: bool) -> None:
    moved, scale = _schedule_after(kinds, fused=fused)
    assert moved == kinds.count("good")
    assert scale == SCALE / 2 ** kinds.count("overflow")


def _calibrated(
    mode: str, *, clip: float | None = None, nan_at: int = -1, fused: bool = False
) -> tuple[list[Tensor], tuple[Incident, ...]]:
    """Train with a scaler that starts at 2**127: its first scaled losses are infinite.

    Returns the gradients that every step left, the final weights and the scale.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)

    def loss_fn(x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x) * 50, x[:, :3].nan_to_num().argmax(1))

    guard = None
    if mode == "step":
        guard = Guard(model, optimizer, scaler=scaler, config=quiet(clip_norm=clip))
    elif mode != "unguarded":
        handed = {"scaler": scaler} if mode == "watch" else {}
        guard = watch(model, optimizer, config=quiet(), **handed)
    seen: list[Tensor] = []
    for index in range(12):
        x = torch.randn(16, 6)
        if index == nan_at:
            x[2, 2] = float("nan")
        if guard is not None and mode == "step":
            guard.step(loss_fn, x)
        else:
            optimizer.zero_grad()
            scaler.scale(loss_fn(x)).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    if guard is not None:
        guard.close()
    assert scaler.get_scale() < 2.0**127
    seen += [*(p.detach() for p in model.parameters()), torch.tensor(scaler.get_scale())]
    return seen, guard.incidents if guard is not None else ()


@pytest.mark.parametrize(
    ("mode", "fused"), [("step", False), ("step", True), ("watch", False), ("watch-alone", False)]
)
def test_nan_under_a_scaler_that_is_calibrating_is_found(mode: str, fused: bool) -> None:
    _, incidents = _calibrated(mode, nan_at=2, fused=fused)
    assert [(i.step, i.verdict.kind) for i in incidents] == [(2, "nonfinite_input")]


# --- schedules that a guard is given


DATA = batches(8)


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def _built(fused: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = plain_net()
    return model, torch.optim.AdamW(model.parameters(), 0.1, fused=fused)


def _rate(optimizer: torch.optim.Optimizer) -> float:
    return float(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("fused", [False, True])
def test_list_of_schedulers_advances_in_order_as_a_loop_would(fused: bool) -> None:
    def several(optimizer: Optimizer) -> list[Any]:
        return [lr_scheduler.ExponentialLR(optimizer, 0.9), lr_scheduler.StepLR(optimizer, 2, 0.5)]

    model, optimizer = _built(fused)
    with Guard(model, optimizer, scheduler=several(optimizer), config=quiet()) as guard:
        for batch in DATA:
            guard.step(lambda b: _loss(model, b), batch)
    other, bare = _built(fused)
    schedulers = several(bare)
    for batch in DATA:
        bare.zero_grad()
        _loss(other, batch).backward()
        bare.step()
        for scheduler in schedulers:
            scheduler.step()
    assert _rate(optimizer) == _rate(bare)
    assert difference(dict(model.state_dict()), dict(other.state_dict())) == ""


def test_list_of_schedulers_is_saved_and_restored(tmp_path: Path) -> None:
    model, optimizer = _built()
    schedulers = [
        lr_scheduler.ExponentialLR(optimizer, 0.9),
        lr_scheduler.StepLR(optimizer, 2, 0.5),
    ]
    config = quiet(run_dir=tmp_path, on_signal="off")
    with Guard(model, optimizer, scheduler=schedulers, config=config) as guard:
        for batch in DATA[:5]:
            guard.step(lambda b: _loss(model, b), batch)
        assert guard.save() is not None
        then = copy.deepcopy([s.state_dict() for s in schedulers]), _rate(optimizer)
        for batch in DATA[5:]:
            guard.step(lambda b: _loss(model, b), batch)
        guard.restore()
    assert ([s.state_dict() for s in schedulers], _rate(optimizer)) == then


class ByEpoch:
    """As timm's schedulers: not torch's, and its step wants to be told the epoch."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.epoch = optimizer, 0

    def step(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [lr_scheduler.ReduceLROnPlateau, ByEpoch])
def test_scheduler_that_wants_a_value_is_left_to_the_loop_and_that_is_said_once(
    kind: Any, fused: bool, tmp_path: Path
) -> None:
    model, optimizer = _built(fused)
    scheduler = kind(optimizer)
    config = quiet(run_dir=tmp_path, on_signal="off", snapshot_every=2)
    with Guard(model, optimizer, scheduler=scheduler, config=config) as guard:
        for batch in DATA:
            assert guard.step(lambda b: _loss(model, b), batch).committed
        scheduler.step(1)
        assert guard.save() is not None
        guard.restore()
        assert guard.armed and guard.incidents == ()
    told = [str(n["summary"]) for n in read_run(tmp_path).notes if n.get("kind") == "schedule"]
    assert len(told) == 1
    assert f"{kind.__name__}.step needs a value, so guard.step leaves it to your loop" in told[0]


def test_what_is_no_scheduler_is_refused_by_its_type() -> None:
    model, optimizer = _built()
    with pytest.raises(ConfigError, match="scheduler is a float; give a scheduler"):
        Guard(model, optimizer, scheduler=0.1, config=quiet())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="scheduler is a str"):
        Guard(model, optimizer, scheduler=["cosine"], config=quiet())  # type: ignore[list-item]


# --- rates that are declared, and jumps


MORE = batches(30)
DRIVEN = ["step", "watch", "watch, not handed over"]


def _sgd(lr: float = 1e-2) -> tuple[nn.Module, Optimizer]:
    model = plain_net()
    return model, torch.optim.SGD(model.parameters(), lr)


def _notes(
    model: nn.Module, optimizer: Optimizer, how: str, scheduler: Any, before: Any = None
) -> list[str]:
    """What is said about learning rates; `before` is called before each step with its index."""
    said: list[str] = []
    handed = {} if "not handed" in how else {"scheduler": scheduler}
    with (Guard if how == "step" else stepguard.watch)(
        model, optimizer, config=quiet(), **handed
    ) as guard:
        guard._context.outputs.note = lambda kind, text, **facts: said.append(text)  # type: ignore[method-assign]
        for index, batch in enumerate(MORE):
            if before is not None:
                before(index)
            if how == "step":
                guard.step(lambda b: _loss(model, b), batch)
                continue
            optimizer.zero_grad()
            _loss(model, batch).backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        assert guard.armed and guard.incidents == ()
    return [line for line in said if "runs with lr" in line]


def _noam(step: int) -> float:
    return 1e-3 * min((step + 1) ** -0.5, (step + 1) * 8**-1.5) * 1000


CLIMBING: dict[str, Callable[[Optimizer], Any]] = {
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=60),
    "linear above its base": lambda o: lr_scheduler.LinearLR(o, 0.01, 1.0, total_iters=3),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 1e-5, 1e-2, step_size_up=4),
    "noam by lambda": lambda o: lr_scheduler.LambdaLR(o, _noam),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 1e-3, total_iters=4), lr_scheduler.CosineAnnealingLR(o, 20)],
        [4],
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 1e-3, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(
        o, lambda step: 3.0 if step < 4 else 1.0
    ),
}


@pytest.mark.parametrize("how", DRIVEN)
@pytest.mark.parametrize("scheduled", [False, True])
def test_rate_put_into_the_group_by_hand_is_told(how: str, scheduled: bool) -> None:
    model, optimizer = _sgd(1e-4)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 100) if scheduled else None

    def jump(index: int) -> None:
        if index == 12:
            optimizer.param_groups[0]["lr"] *= 100

    (told,) = _notes(model, optimizer, how, scheduler, jump)
    assert "the highest configured or seen before is 0.0001" in told


@pytest.mark.parametrize("how", DRIVEN)
def test_schedule_state_loaded_over_the_configured_rate_is_told(how: str) -> None:
    model, optimizer = _sgd(1e-4)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 100)
    _, old = _sgd(1e-2)
    saved = (
        copy.deepcopy(lr_scheduler.CosineAnnealingLR(old, 100).state_dict()),
        copy.deepcopy(old.state_dict()),
    )

    def resume(index: int) -> None:
        if index == 12:
            scheduler.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])

    assert _notes(model, optimizer, how, scheduler, resume) != []


# --- which optimizers need a driver of their own


WAYS = [("step", None), ("step", 1.0), ("watch", None), ("watch-alone", None)]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("mode", "clip"), WAYS)
def test_scaler_calibrates_whatever_its_start_and_leaves_the_gradients_of_an_unguarded_loop(
    mode: str, clip: float | None, fused: bool
) -> None:
    unguarded, _ = _calibrated("unguarded", clip=clip, fused=fused)
    guarded, incidents = _calibrated(mode, clip=clip, fused=fused)
    assert incidents == ()
    for theirs, ours in zip(unguarded, guarded, strict=True):
        assert torch.allclose(theirs, ours, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("name", "how"), each(CLIMBING, DRIVEN))
def test_schedule_that_climbs_as_it_declares_is_not_a_jump(name: str, how: str) -> None:
    model, optimizer = _sgd(1e-3 if name == "multiplicative" else 1e-2)
    assert _notes(model, optimizer, how, CLIMBING[name](optimizer)) == []


@pytest.mark.parametrize("declared", [False, True], ids=["built with it", "in the group"])
@pytest.mark.parametrize("how", ["step", "watch"])
def test_warm_up_by_hand_to_the_rate_that_was_configured_is_not_a_jump(
    how: str, declared: bool
) -> None:
    model, optimizer = _sgd(0.1)
    (group,) = optimizer.param_groups
    group["lr"] = 1e-6
    if declared:  # what timm's Scheduler does
        group["initial_lr"] = 0.1

    def warm(index: int) -> None:
        group["lr"] = 0.1 if index >= 10 else 1e-6 if declared else min(0.1, 1e-6 * 10.0**index)

    assert _notes(model, optimizer, how, None, warm) == []


def test_optimizers_are_told_apart_by_what_they_are_and_not_by_their_names() -> None:
    class Required(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Any) -> Any:  # type: ignore[override]
            return closure()

    def parameters() -> list[nn.Parameter]:
        return [nn.Parameter(torch.ones(4, 3))]

    lbfgs, sam = torch.optim.LBFGS(parameters()), OPTIMIZERS["sam"](parameters())
    assert needs_closure(lbfgs) and not evaluates_again(lbfgs)
    assert evaluates_again(sam) and not needs_closure(sam)
    assert needs_closure(Required(parameters()))
    assert inner_optimizer(OPTIMIZERS["lookahead"](parameters())) is not None
    plain: Any = torch.optim.AdamW(parameters())
    plain.helper = torch.optim.SGD(parameters())  # of other parameters
    assert inner_optimizer(plain) is None and not takes_closure(plain)
    assert not takes_found_inf(plain)
    assert takes_found_inf(torch.optim.AdamW(parameters(), fused=True))


def test_declared_rates_are_found_and_looking_ahead_changes_nothing() -> None:
    model = plain_net()
    groups = [
        {"params": model[0].parameters(), "lr": 1e-3},
        {"params": model[2].parameters(), "lr": 1e-2},
    ]
    optimizer = torch.optim.SGD(groups, 1e-5)
    assert declared_rates(optimizer) == (1e-3, 1e-2)
    cycle = lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2], total_steps=50)
    before = copy.deepcopy((cycle.state_dict(), optimizer.state_dict()))
    assert declared_rates(optimizer, cycle) == pytest.approx((0.1, 0.2))
    assert difference((cycle.state_dict(), optimizer.state_dict()), before) == ""

    def explodes(step: int) -> float:
        if step > 3:
            raise RuntimeError("no such step")
        return 1.0

    _, optimizer = _sgd()
    assert declared_rates(optimizer, lr_scheduler.LambdaLR(optimizer, explodes)) == (1e-2,)
    climbs = lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 + step)
    assert max(declared_rates(optimizer, climbs)) > 1e-2 * 500
