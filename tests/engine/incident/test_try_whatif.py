"""`guard.whatif()`: what would have helped, tried on the run's own steps, which stays as it was."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stepguard
from scenes import (
    NAN,
    Batch,
    Scene,
    batches,
    difference,
    generators,
    noisy_net,
    plain_net,
    poisoned,
    quiet,
    state_of,
)
from stepguard import ConfigError, Guard
from stepguard.journal import read_run
from stepguard.probes.whatif import TrialSubject
from stepguard.records import Incident, Reading, Verdict
from stepguard.records.probes import TrialOutcome, WhatIf
from stepguard.state.capsule import Window, WindowStep

DATA = batches(48)
BAD = 40


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def by_name(found: WhatIf) -> dict[str, TrialOutcome]:
    return {one.name: one for one in found.outcomes}


def run_to_the_end(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch], **settings: Any
) -> Guard:
    guard = Guard(model, optimizer, config=quiet(locate=True, **settings))
    for batch in data:
        guard.step(lambda given: loss_of(model, given), batch)
    return guard


def with_bad_sample(index: int = BAD) -> list[Batch]:
    return [*DATA[:index], poisoned(DATA[index], NAN), *DATA[index + 1 :]]


def noisy_scene() -> Scene:
    model = noisy_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10)
    return Scene(model, optimizer, schedule, scaler, clip_norm=0.5)


def test_run_goes_on_bit_for_bit_as_if_nothing_had_been_tried(tmp_path: Path) -> None:
    ended = []
    for name in ("tried", "not tried"):
        torch.manual_seed(3)
        scene = noisy_scene()
        config = quiet(locate=True, clip_norm=0.5, run_dir=tmp_path / name)
        with Guard(scene.model, scene.optimizer, config=config, **scene.close_over()) as guard:
            for index, batch in enumerate(with_bad_sample()):
                guard.step(scene.loss_fn, batch)
                if name == "tried" and index in (BAD, BAD + 3):
                    with torch.no_grad():
                        found = guard.whatif()
        ended.append((state_of(scene), generators(), len(read_run(tmp_path / name).steps)))
    assert found.best is not None
    assert found.remarks == ()
    assert difference(ended[0], ended[1]) == ""


def test_bad_sample_is_best_left_out_and_nothing_else_but_skipping_helps() -> None:
    model = plain_net()
    guard = run_to_the_end(
        model, torch.optim.Adam(model.parameters(), lr=0.01), with_bad_sample()[: BAD + 1]
    )
    found = guard.whatif()
    guard.close()
    assert [one.name for one in found.outcomes if one.works] == ["leave out", "skip"]
    assert found.best is not None and found.best.answers == ("SG101",)
    assert by_name(found)["nothing"].bad_step == BAD
    assert by_name(found)["lr x0.1"].bad_value == "loss is nan"
    assert found.window > 0 and found.held_out > 0


def test_steps_that_came_later_are_trained_after_the_bad_one() -> None:
    model = plain_net()
    guard = run_to_the_end(model, torch.optim.SGD(model.parameters(), lr=0.1), with_bad_sample())
    guard.close()
    found = guard.whatif()
    assert found.after == len(DATA) - BAD - 1
    assert found.remarks == ()


def test_rate_that_is_too_high_is_lowered_and_skipping_does_not_help() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss_fn(batch: Batch) -> Tensor:
        return (model(batch[0]) - 2.0 * batch[0]).square().mean()

    with Guard(model, optimizer, config=quiet(locate=True)) as guard:
        for index, batch in enumerate(batches(90, seed=1)):
            if index == 40:
                optimizer.param_groups[0]["lr"] = 0.4
            if guard.incidents:
                break
            guard.step(loss_fn, batch)
        found = guard.whatif()
    assert found.best is not None
    assert found.best.name in ("keep lr", "lr x0.1")
    assert not by_name(found)["skip"].works
    assert not by_name(found)["nothing"].works


def test_own_fix_is_tried_beside_the_others_and_leaves_nothing_behind() -> None:
    model = plain_net()

    def own(given: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        given[0].register_forward_pre_hook(lambda module, args: (args[0].nan_to_num(),))
        optimizer.param_groups[0]["lr"] *= 0.5

    guard = run_to_the_end(
        model, torch.optim.Adam(model.parameters(), lr=0.01), with_bad_sample()[: BAD + 1]
    )
    tried = by_name(guard.whatif(own))["own"]
    guard.close()
    assert tried.works, tried
    assert tried.label == "your own: own"
    assert not model[0]._forward_pre_hooks
    assert guard.optimizer.param_groups[0]["lr"] == 0.01


def test_fix_that_fails_costs_only_itself() -> None:
    model = plain_net()

    def own(*_: Any) -> None:
        raise ValueError("not today")

    guard = run_to_the_end(
        model, torch.optim.SGD(model.parameters(), lr=0.1), with_bad_sample(5)[:6]
    )
    found = guard.whatif(own)
    guard.close()
    assert by_name(found)["own"].why_not == "ValueError: not today"
    assert found.best is not None


def test_halted_run_can_still_be_asked() -> None:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = quiet(locate=True, policy=stepguard.Policy(actions=("stop",)))
    guard = Guard(model, optimizer, config=config)
    with pytest.raises(stepguard.TrainingHalted):
        for batch in with_bad_sample(12):
            guard.step(lambda given: loss_of(model, given), batch)
    guard.close()
    found = guard.whatif()
    assert found.best is not None and found.best.name == "leave out"


def test_watched_loop_that_hands_its_loss_over_has_the_bad_step_at_least() -> None:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stepguard.watch(model, optimizer, config=quiet(locate=True)) as guard:
        for index, batch in enumerate(with_bad_sample(4)[:8]):
            optimizer.zero_grad()
            guard.loss(lambda given: loss_of(model, given), batch).backward()
            optimizer.step()
            if index == 4:
                found = guard.whatif()
        assert len(guard.incidents) == 1
        assert guard.steps == 8
    assert found.window == 0
    assert found.remarks[0].startswith("no step before the bad one")
    assert found.best is not None and found.best.name == "leave out"


def test_state_that_is_gone_from_memory_is_read_from_the_capsule(tmp_path: Path) -> None:
    model = plain_net()
    guard = run_to_the_end(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        with_bad_sample(),
        run_dir=tmp_path,
    )
    guard.close()
    in_memory = guard.whatif()
    lead_up = guard._context.memory.lead_up
    assert lead_up is not None and lead_up.snapshot is not None
    lead_up.snapshot.overwritten = True
    on_disk = guard.whatif()
    assert (on_disk.window, on_disk.first) == (in_memory.window, in_memory.first)
    for one in in_memory.outcomes:
        same = by_name(on_disk)[one.name]
        assert (same.works, same.loss) == (one.works, one.loss)
        assert difference(same.losses, one.losses) == ""


def test_what_cannot_be_tried_is_said_in_one_sentence() -> None:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, config=quiet())
    with pytest.raises(ConfigError, match="no incident yet"):
        guard.whatif()
    guard.close()
    with stepguard.watch(model, optimizer, config=quiet()) as guard:
        loss_of(model, poisoned(DATA[0])).backward()
        optimizer.step()
        with pytest.raises(ConfigError, match=r"guard.loss\(loss_fn, batch\)"):
            guard.whatif()
    lbfgs = torch.optim.LBFGS(model.parameters())
    with Guard(model, lbfgs, config=quiet()) as guard:
        guard.step(lambda given: loss_of(model, given), poisoned(DATA[0]))
        with pytest.raises(ConfigError, match="update of LBFGS"):
            guard.whatif()
    compiled: Any = torch.compile(plain_net(), backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    with Guard(compiled, optimizer, config=quiet()) as guard:
        guard.step(lambda given: loss_of(compiled, given), poisoned(DATA[0]))
        with pytest.raises(ConfigError, match="compiled"):
            guard.whatif()


def test_losses_are_those_of_the_run() -> None:
    model = plain_net()
    guard = run_to_the_end(
        model, torch.optim.Adam(model.parameters(), lr=0.01), with_bad_sample()[: BAD + 1]
    )
    found = guard.whatif()
    guard.close()
    lead_up = guard._context.memory.lead_up
    assert lead_up is not None
    recorded = [one.loss for one in lead_up.steps][-found.window :]
    skipped = by_name(found)["skip"].losses
    assert skipped[: found.window] == pytest.approx(recorded, rel=1e-6)
    assert all(math.isfinite(loss) for loss in skipped)


def test_second_bad_step_in_a_row_is_asked_about_from_the_first() -> None:
    """The window that led to the first one is kept until a good step has been made."""
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [*DATA[:BAD], poisoned(DATA[BAD], NAN), poisoned(DATA[BAD + 1], NAN)]
    policy = stepguard.Policy(actions=("skip", "rewind", "stop"))
    found = run_to_the_end(model, optimizer, data, policy=policy).whatif()
    assert found.step == BAD and found.window > 0
    assert by_name(found)["leave out"].works
    assert by_name(found)["skip"].bad_step == BAD + 1


def test_panels_fix_is_the_first_candidate() -> None:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, config=quiet(locate=True))
    code = loss_with_a_log.__code__
    for step, batch in enumerate(DATA[: BAD + 1]):
        guard.step(lambda given, step=step: loss_with_a_log(model, given, step), batch)
    found = guard.whatif()
    assert found.outcomes[0].name == "fix" and found.outcomes[0].works
    assert "safe_log" in found.outcomes[0].change
    assert loss_with_a_log.__code__ is code


def loss_with_a_log(model: nn.Module, batch: Batch, step: int) -> Tensor:
    level = batch[0].abs().mean() * (step != BAD)
    return loss_of(model, batch) + 0.01 * torch.log(level * model(batch[0]).abs().mean())


def test_spike_that_is_the_same_again_is_not_called_over() -> None:
    """Where the losses before it were no lower, half-way to them is no limit."""
    before = [WindowStep(index=i, micro_batches=(), rng=[], loss=9.0) for i in range(3)]
    bad = WindowStep(index=3, micro_batches=(), rng=[])
    subject = TrialSubject.__new__(TrialSubject)
    subject.bad = bad
    subject.window = Window(start=None, steps=before)  # type: ignore[arg-type]
    verdict = Verdict(kind="spike", severity="incident", summary="")
    reading = Reading(step=3, loss=8.0)
    subject.incident = Incident(id="3", step=3, verdict=verdict, reading=reading)
    assert subject.limit is not None and subject.limit < 8.0
