"""Automatic guards: built at the first call of the model, closed for the user's own guard."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stepguard
from stepguard import GuardConfig
from stepguard.engine.context import guarded
from stepguard.run import guarded_script

QUIET = GuardConfig(terminal="quiet")


@pytest.mark.slow
def test_guard_is_built_at_the_first_call_of_the_model_and_closed_at_the_end() -> None:
    before = nn.Module.__call__
    with guarded_script.AutomaticGuards(QUIET, lambda text: None) as automatic:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert automatic.guards == [] and nn.Module.__call__ is not before
        model(torch.ones(1, 2)).sum().backward()
        assert nn.Module.__call__ is before
        optimizer.step()
        (guard,) = automatic.guards
        assert guard.model is model and guard.steps == 1
    assert optimizer not in guarded


@pytest.mark.slow
def test_automatic_guard_is_closed_when_the_user_builds_one() -> None:
    with guarded_script.AutomaticGuards(QUIET, lambda text: None) as automatic:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        assert len(automatic.guards) == 1
        with stepguard.Guard(model, optimizer, config=QUIET) as own:
            assert automatic.guards == []
            own.step(lambda batch: model(batch).sum(), torch.ones(1, 2))


@pytest.mark.slow
def test_parameters_of_no_module_are_guarded_at_the_first_step() -> None:
    with guarded_script.AutomaticGuards(QUIET, lambda text: None) as automatic:
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        weight.sum().backward()
        assert automatic.guards == []
        optimizer.step()
        assert len(automatic.guards) == 1


@pytest.mark.slow
def test_an_optimizer_that_cannot_be_guarded_is_told_once_and_truly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: object, **settings: object) -> None:
        raise TypeError("float() argument must be a number, not 'NoneType'")

    monkeypatch.setattr(guarded_script, "watch", refuse)
    with guarded_script.AutomaticGuards(GuardConfig(), guarded_script.tell) as several:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    guarded_script._tell_how_it_ended(several, 0, GuardConfig())
    first, second = capsys.readouterr().err.splitlines()
    assert "SGD is not guarded: TypeError" in first
    assert "made none that stepped" not in second and "for the reason above" in second
