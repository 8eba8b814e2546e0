"""One step as one transaction: the nine verbs in order, and what is told is what was done."""

from __future__ import annotations

import inspect
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stepguard.engine.recover.rewind
from scenes import LOOPS, NAN, Scene, batches, calm_net, plain_net, poisoned, quiet
from stepguard import Guard, GuardConfig, Policy, Probes, TrainingHalted
from stepguard.engine.incident import situation
from stepguard.engine.protect import GuardDisarmed
from stepguard.engine.transaction import Transaction
from stepguard.journal import read_run

VERBS = ["read", "agree", "judge", "veto", "locate", "diagnose", "decide", "apply", "record"]
DATA = batches(12)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def test_nine_verbs_stand_in_the_order_of_the_design_page() -> None:
    source = inspect.getsource(Transaction)
    defined = [name for name in re.findall(r"    def (\w+)\(", source) if name in VERBS]
    assert defined == VERBS


@pytest.mark.parametrize("loop", LOOPS)
def test_bad_step_runs_the_verbs_in_this_order(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for verb in VERBS:
        _note_calls(monkeypatch, verb, called)
    model = calm_net()
    scene = Scene(model, _sgd(model))
    config = quiet(locate=True, policy=Policy(actions=("skip", "stop")))
    LOOPS[loop](scene, [(poisoned(DATA[0]),)], config)
    assert [verb for verb in called if verb != "read"] == VERBS[1:]
    assert called[0] == "read"


def _note_calls(monkeypatch: pytest.MonkeyPatch, verb: str, called: list[str]) -> None:
    original = getattr(Transaction, verb)

    def noted(self: Transaction, *args: Any, **kwargs: Any) -> Any:
        called.append(verb)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Transaction, verb, noted)


def test_panel_and_journal_say_what_was_left_out_of_a_partly_committed_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = plain_net()
    config = GuardConfig(run_dir=tmp_path, probes=Probes(locate_budget=0))
    before = model[0].weight.detach().clone()
    with Guard(model, _sgd(model), config=config) as guard:
        scene = Scene(model, guard.optimizer)
        result = guard.step(scene.loss_fn, poisoned(DATA[0]), DATA[1])
    assert result.committed
    assert not torch.equal(model[0].weight, before)
    told = capsys.readouterr().err
    assert "micro-batch 1 of 2" in told
    assert "as before the step" not in told
    (incident,) = read_run(tmp_path).incidents
    assert incident.decision is not None
    assert incident.decision.action == "leave_out"
    assert incident.decision.left_out == "micro-batch 1 of 2"


@pytest.mark.parametrize("loop", LOOPS)
def test_fault_in_a_rewind_stops_the_run_instead_of_flying_into_the_loop(
    loop: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*args: Any) -> None:
        raise ArithmeticError("a fault of the guard's own")

    model = plain_net()
    scene = Scene(model, _sgd(model))
    monkeypatch.setattr(stepguard.engine.recover.rewind.Rewinder, "put_back", broken)
    damage = [(batch,) for batch in DATA[:6]]
    scene.loss = _damaging(at=4)
    config = quiet(run_dir=tmp_path, snapshot_every=1)
    with pytest.raises(TrainingHalted, match=r"rewind to step .* failed"):
        LOOPS[loop](scene, damage, config)
    (incident,) = read_run(tmp_path).incidents
    assert incident.decision is not None
    assert incident.decision.action == "stop"


def _damaging(at: int) -> Any:
    """A loss that damages a stored weight, as a broken kernel does, in the `at`-th step."""
    calls = [0]

    def loss(scene: Scene, batch: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            with torch.no_grad():
                scene.model[0].weight[0, 0] = NAN
        inputs, targets = batch
        return nn.functional.cross_entropy(scene.model(inputs), targets)

    return loss


def test_decision_that_could_not_be_applied_is_recorded_as_a_skip(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(self: Transaction, incident: Any) -> Any:
        raise ArithmeticError("a fault of the guard's own")

    model = plain_net()
    monkeypatch.setattr(Transaction, "apply", broken)
    config = quiet(run_dir=tmp_path, policy=Policy(actions=("leave_out", "skip", "stop")))
    with pytest.warns(GuardDisarmed), Guard(model, _sgd(model), config=config) as guard:
        guard.step(Scene(model, guard.optimizer).loss_fn, poisoned(DATA[0]))
    (incident,) = read_run(tmp_path).incidents
    assert incident.decision is not None
    assert incident.decision.action == "skip"


def test_steps_that_could_not_be_decided_on_count_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise ArithmeticError("a fault of the guard's own")

    monkeypatch.setattr(situation, "choose_remedy", broken)
    model = plain_net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = quiet(policy=Policy(max_consecutive=3))
        guard = Guard(model, _sgd(model), config=config)
        with guard, pytest.raises(TrainingHalted, match="4 incidents in a row"):
            for _ in range(10):
                guard.step(Scene(model, guard.optimizer).loss_fn, poisoned(DATA[0]))
    assert [incident.decision.action for incident in guard.incidents if incident.decision] == [
        *["skip"] * 3,
        "stop",
    ]
