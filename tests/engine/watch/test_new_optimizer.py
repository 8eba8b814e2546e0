"""A guard follows its loop: a new optimizer, and parts of the model that are replaced."""

from __future__ import annotations

import gc
import math
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from scenes import difference, quiet
from stepguard import Guard, GuardConfig, WiringWarning, watch
from stepguard.run.guarded_script import AutomaticGuards

STAGES = ["same", "head", "subset", "superset", "disjoint", "lbfgs", "fused"]
NEW_AT = 6


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def _first(model: nn.Sequential, stage: str) -> Optimizer:
    part = model[3] if stage in ("superset", "disjoint") else model
    return torch.optim.Adam(part.parameters(), lr=1e-3)


def _second(model: nn.Sequential, stage: str) -> Optimizer:
    if stage == "head":
        torch.manual_seed(5)
        model[3] = nn.Linear(16, 3)
    if stage == "lbfgs":
        return torch.optim.LBFGS(model.parameters(), lr=1e-2, max_iter=2)
    part = {"subset": model[3], "disjoint": model[0]}.get(stage, model)
    return torch.optim.AdamW(part.parameters(), lr=1e-2, fused=stage == "fused")


def _evaluate(model: nn.Module, optimizer: Optimizer, x: Tensor, labels: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), labels)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def _train(
    stage: str, *, guarded: bool, bad: int | None = None, **settings: Any
) -> tuple[nn.Sequential, Guard | None, Optimizer]:
    model = _net()
    optimizer = _first(model, stage)
    guard = watch(model, optimizer, config=quiet(**settings)) if guarded else None
    for index in range(14):
        if index == NEW_AT:
            optimizer = _second(model, stage)
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(index))
        labels = x[:, :3].argmax(1)
        if index == bad:
            x[3, 2] = math.nan

        evaluate = partial(_evaluate, model, optimizer, x, labels)
        if stage == "lbfgs" and index >= NEW_AT:
            optimizer.step(evaluate)  # type: ignore[arg-type]
        else:
            evaluate()
            optimizer.step()
    return model, guard, optimizer


@pytest.mark.parametrize("stage", STAGES)
def test_new_optimizer_is_guarded_and_a_healthy_run_stays_as_it_is(stage: str) -> None:
    unguarded, _, _ = _train(stage, guarded=False)
    model, guard, optimizer = _train(stage, guarded=True)
    assert guard is not None and guard.optimizer is optimizer
    guard.close()
    assert (guard.steps, guard.incidents) == (14, ())
    assert difference(model.state_dict(), unguarded.state_dict()) == ""


@pytest.mark.parametrize("bad", [NEW_AT, 10], ids=["first", "later"])
@pytest.mark.parametrize("stage", STAGES)
def test_bad_batch_of_a_new_optimizer_is_found_and_does_not_go_in(stage: str, bad: int) -> None:
    model, guard, _ = _train(stage, guarded=True, bad=bad)
    assert guard is not None
    guard.close()
    assert [(i.step, i.verdict.bad) for i in guard.incidents] == [(bad, True)]
    assert all(bool(p.isfinite().all()) for p in model.state_dict().values())


def test_rewind_does_not_go_back_to_a_state_of_the_optimizer_before(tmp_path: Path) -> None:
    settings = {"snapshot_every": 2, "probation": 1, "snapshots": 8, "checkpoint_every": 2}
    model, guard, _ = _train("head", guarded=True, run_dir=tmp_path, **settings)
    assert guard is not None
    with torch.no_grad():
        model[3].weight.fill_(math.nan)
    x = torch.randn(16, 6)
    _evaluate(model, guard.optimizer, x, x[:, :3].argmax(1))
    guard.optimizer.step()
    guard.close()
    decision = guard.incidents[-1].decision
    assert decision is not None and decision.action == "rewind"
    assert decision.rewound_to is not None and decision.rewound_to > NEW_AT
    assert bool(model[3].weight.isfinite().all())


def test_checkpoint_holds_the_replaced_part(tmp_path: Path) -> None:
    model, guard, _ = _train("head", guarded=True, run_dir=tmp_path)
    assert guard is not None
    assert guard.save() is not None
    head = model[3].weight.detach().clone()
    with torch.no_grad():
        model[3].weight.zero_()
    assert guard.restore() == 14
    assert torch.equal(model[3].weight, head)
    guard.close()


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)


def _of_parts(pair: _Pair) -> dict[str, Optimizer]:
    parts = {"one": pair.one, "two": pair.two}
    return {name: torch.optim.SGD(part.parameters(), 0.1) for name, part in parts.items()}


def _of_all(pair: _Pair) -> dict[str, Optimizer]:
    return {name: torch.optim.SGD(pair.parameters(), 0.1) for name in ("one", "two")}


def _turns(pair: _Pair, optimizers: dict[str, Optimizer], order: list[str]) -> None:
    for name in order:
        optimizers[name].zero_grad()
        loss: Tensor = getattr(pair, name)(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizers[name].step()


def test_other_optimizers_of_the_process_are_left_alone() -> None:
    torch.manual_seed(0)
    pair, elsewhere = _Pair(), _Pair()
    optimizers, theirs = _of_parts(pair), _of_parts(elsewhere)
    with watch(pair, optimizers["one"], config=quiet()) as guard:
        _turns(pair, optimizers, ["one", "two"] * 6)
        _turns(elsewhere, theirs, ["one", "two"] * 6)
        assert guard.optimizer is optimizers["one"] and guard.steps == 6
        assert not guard._context.incidents


def test_each_of_two_guards_keeps_its_optimizer() -> None:
    torch.manual_seed(0)
    pair = _Pair()
    optimizers = _of_all(pair)
    with (
        watch(pair, optimizers["one"], config=quiet()) as one,
        watch(pair, optimizers["two"], config=quiet()) as two,
    ):
        _turns(pair, optimizers, ["one"] * 5 + ["two", "one"] * 3)
        assert (one.optimizer, two.optimizer) == (optimizers["one"], optimizers["two"])
        assert (one.steps, two.steps) == (8, 3)


def test_optimizer_that_comes_back_stays_the_guarded_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    pair = _Pair()
    optimizers = _of_all(pair)
    with watch(pair, optimizers["one"], config=quiet(run_dir=tmp_path)) as guard:
        _turns(pair, optimizers, ["one", "two"] * 5)
        assert guard.optimizer is optimizers["one"] and guard.armed
    assert "take turns on this model" in (tmp_path / "journal.jsonl").read_text()


def test_optimizers_of_an_inner_loop_are_taken_for_turns_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    pair = _Pair()
    outer = torch.optim.SGD(pair.parameters(), 0.1)
    with watch(pair, outer, config=quiet(run_dir=tmp_path)) as guard:
        for _ in range(5):
            inner = torch.optim.SGD(pair.parameters(), 0.01)
            _turns(pair, {"one": inner}, ["one", "one"])
            _turns(pair, {"two": outer}, ["two"])
            assert guard.optimizer is outer
    assert (tmp_path / "journal.jsonl").read_text().count("take turns on this model") == 1


def test_clipping_of_the_guard_goes_over_to_the_new_optimizer() -> None:
    model, guard, optimizer = _train("same", guarded=True, clip_norm=1e-3)
    assert guard is not None
    x = torch.randn(16, 6)
    _evaluate(model, optimizer, x, x[:, :3].argmax(1))
    optimizer.step()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    guard.close()
    assert float(nn.utils.get_total_norm(gradients)) <= 1.001e-3


def test_part_that_the_optimizer_of_guard_step_does_not_hold_is_told() -> None:
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).square().mean()

    with Guard(model, optimizer, config=quiet()) as guard:
        guard.step(loss_fn, torch.randn(16, 6))
        model[3] = nn.Linear(16, 3)
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.warns(WiringWarning, match=r"3\.weight, 3\.bias of the model replaced"):
            guard.step(loss_fn, torch.randn(16, 6))
        loss_fn(torch.randn(16, 6)).backward()
        with pytest.warns(WiringWarning, match="its updates are not guarded"):
            other.step()


def test_guard_that_is_never_closed_does_not_keep_its_model() -> None:
    model = _net()
    Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), config=quiet())
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_run_keeps_one_guard_for_one_optimizer_after_another() -> None:
    model = _net()
    with AutomaticGuards(GuardConfig(terminal="quiet"), print) as automatic:
        for _ in range(3):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.randn(16, 6)).square().mean().backward()
                optimizer.step()
        (guard,) = automatic.guards
        assert guard.optimizer is optimizer and guard.steps == 12
