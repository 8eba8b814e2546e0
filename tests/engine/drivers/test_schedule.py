"""Which schedulers a guard takes, when it advances them, and what it leaves to the loop."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from scenes import Batch, batches, plain_net, quiet
from stepguard import ConfigError, Guard
from stepguard.journal import read_run

DATA = batches(8)
PASSES = 3


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def _built(fused: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = plain_net()
    return model, torch.optim.AdamW(model.parameters(), 0.1, fused=fused)


def _rate(optimizer: torch.optim.Optimizer) -> float:
    return float(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("fused", [False, True])
def test_list_of_schedulers_advances_in_order_as_a_loop_would(fused: bool) -> None:
    def several(optimizer: torch.optim.Optimizer) -> list[Any]:
        return [lr_scheduler.ExponentialLR(optimizer, 0.9), lr_scheduler.StepLR(optimizer, 2, 0.5)]

    model, optimizer = _built(fused)
    with Guard(model, optimizer, scheduler=several(optimizer), config=quiet()) as guard:
        for batch in DATA:
            guard.step(lambda b: _loss(model, b), batch)
    bare_model, bare = _built(fused)
    schedulers = several(bare)
    for batch in DATA:
        bare.zero_grad()
        _loss(bare_model, batch).backward()
        bare.step()
        for scheduler in schedulers:
            scheduler.step()
    assert _rate(optimizer) == _rate(bare)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), bare_model.parameters(), strict=True)
    )


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


def test_schedule_that_the_loop_advances_is_kept_as_a_further_state(tmp_path: Path) -> None:
    def run(folder: Path, stop: int | None = None, *, resume: bool = False) -> float:
        model, optimizer = _built()
        schedule = {"schedule": lr_scheduler.StepLR(optimizer, 1, 0.5)}
        settings = quiet(run_dir=folder, on_signal="off")
        with Guard(model, optimizer, state=schedule, loader=DATA, config=settings) as guard:
            if resume:
                guard.restore()
            while guard.loader.epoch < PASSES:
                for batch in guard.loader:
                    guard.step(lambda b: _loss(model, b), batch)
                    if guard.steps == stop:
                        guard.save()
                        return 0.0
                schedule["schedule"].step()
        return _rate(optimizer)

    never = run(tmp_path / "a")
    run(tmp_path / "b", 11)
    assert run(tmp_path / "b", resume=True) == never == 0.1 * 0.5**PASSES


def test_what_is_no_scheduler_is_refused_by_its_type() -> None:
    model, optimizer = _built()
    with pytest.raises(ConfigError, match="scheduler is a float; give a scheduler"):
        Guard(model, optimizer, scheduler=0.1, config=quiet())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="scheduler is a str"):
        Guard(model, optimizer, scheduler=["cosine"], config=quiet())  # type: ignore[list-item]
