"""Running a user's script: what it sees, its guards, its end; and replaying a spike."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ConstantLR, LinearLR, SequentialLR

from settings_of import config_of
from stepguard import Guard, GuardConfig
from stepguard.engine.context import guarded
from stepguard.engine.drivers.schedule import scheduler_of
from stepguard.records import Incident
from stepguard.report.phrases import next_commands
from stepguard.run import guarded_script
from stepguard.run.guarded_script import (
    as_main,
    run_script,
    trained_by,
    variable_name,
)
from stepguard.run.replay import replay

SWALLOWED_STOP = """
from stepguard import TrainingHalted
from stepguard.records import Incident, Reading, Verdict
verdict = Verdict(kind="spike", severity="incident")
incident = Incident(id="i", step=0, verdict=verdict, reading=Reading(step=0))
try:
    raise TrainingHalted(incident)
except TrainingHalted:
    raise SystemExit(1)
"""

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
def test_automatic_guard_makes_way_for_one_that_the_user_builds() -> None:
    with guarded_script.AutomaticGuards(QUIET, lambda text: None) as automatic:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        assert len(automatic.guards) == 1
        with Guard(model, optimizer, config=QUIET) as own:
            assert automatic.guards == []
            own.step(lambda batch: model(batch).sum(), torch.ones(1, 2))


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
    assert "created none that stepped" not in second and "for the reason above" in second


@pytest.mark.slow
@pytest.mark.parametrize(
    ("terminal", "printed", "logged"), [("auto", 1, 0), ("quiet", 0, 0), ("logging", 0, 1)]
)
def test_end_of_a_guarded_script_is_reported_where_the_guard_reports(
    terminal: Any,
    printed: int,
    logged: int,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "stepguard")
    config = GuardConfig(terminal=terminal)
    with guarded_script.AutomaticGuards(config, guarded_script.tell) as automatic:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    guarded_script._tell_how_it_ended(automatic, 0, config)
    said = "1 step guarded, 0 incidents."
    assert capsys.readouterr().err.count(said) == printed
    assert sum(said in record.getMessage() for record in caplog.records) == logged


@pytest.mark.slow
def test_called_model_is_preferred_to_a_container_around_it() -> None:
    model = nn.Linear(2, 1)
    container = nn.ModuleDict({"model": model})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert trained_by(optimizer)[0] is container
    assert trained_by(optimizer, called=model)[0] is model


def test_further_modules_have_the_names_of_their_variables() -> None:
    body = nn.Linear(4, 4)
    head = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    model, modules = trained_by(optimizer)
    assert model is body
    assert modules == {"head": head}
    assert variable_name(head) == "head"


@pytest.mark.slow
def test_scheduler_is_the_outermost_of_a_chain() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    assert scheduler_of(optimizer) is None
    parts = [LinearLR(optimizer), ConstantLR(optimizer)]
    chain = SequentialLR(optimizer, parts, milestones=[3])
    assert scheduler_of(optimizer) is chain


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("x = 1", 0),
        ("raise SystemExit", 0),
        ("raise SystemExit(7)", 7),
        ("raise SystemExit('no data')", 1),
        ("raise ValueError('bad')", 1),
        ("raise KeyboardInterrupt", 130),
        (SWALLOWED_STOP, 3),
    ],
)
def test_exit_code_is_that_of_the_script(tmp_path: Path, source: str, code: int) -> None:
    (tmp_path / "train.py").write_text(source)
    assert run_script(str(tmp_path / "train.py"), [], QUIET) == code


REFUSED = """
import torch
class Engine(torch.optim.SGD):
    pass
Engine.__module__ = "deepspeed.runtime"
model = torch.nn.Linear(1, 1)
optimizer = Engine(model.parameters(), lr=0.1)
model(torch.ones(1, 1)).sum().backward()
optimizer.step()
"""


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = 1", "the script created none that stepped"),
        (REFUSED, "for the reason above"),
        ("raise SystemExit(7)", ""),
        ("raise SystemExit('no data')", "no data"),
    ],
)
def test_end_of_a_run_without_guards_says_why(
    source: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(source)
    run_script(str(tmp_path / "train.py"), [], QUIET)
    lines = capsys.readouterr().err.splitlines()
    assert said in lines[-1] if said else lines == []


BATCH = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)
LossFn = Callable[[Tensor], Tensor]


def build(slope: float = 1.0) -> tuple[nn.Module, torch.optim.Optimizer, LossFn]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def loss_fn(batch: Tensor) -> Tensor:
        return slope * (model(batch) - 1.0).pow(2).mean()

    return model, optimizer, loss_fn


@pytest.fixture(scope="module")
def spike(tmp_path_factory: pytest.TempPathFactory) -> Incident:
    """Weights that jump between two steps: the loss is far too high, and finite."""
    folder = tmp_path_factory.mktemp("spike")
    model, optimizer, loss_fn = build()
    settings: dict[str, Any] = {"terminal": "quiet", "anomalies": "act", "capsule": "full"}
    guard = Guard(model, optimizer, config=config_of(run_dir=folder, **settings))
    incident = None
    for step in range(80):
        noise = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        if step == 60:
            with torch.no_grad():
                next(model.parameters()).mul_(1e4)
        incident = incident or guard.step(loss_fn, BATCH + 0.01 * noise).incident
    guard.close()
    assert incident is not None and incident.verdict.finite_anomaly
    assert incident.capsule is not None
    return incident


def test_same_loss_is_reproduced(spike: Incident) -> None:
    again = replay(Path(str(spike.run)) / str(spike.capsule), build=build)
    assert again.origin is not None and again.origin.reproduced
    assert "the same to the last bit" in again.origin.remarks[0]
    other = replay(Path(str(spike.run)) / str(spike.capsule), build=lambda: build(2.0))
    assert other.origin is not None and other.origin.reproduced is False
    departs = other.origin.evidence.departs
    assert departs is not None and "in training it was" in departs


def test_capsule_without_a_program_is_not_offered_for_replay(spike: Incident) -> None:
    # pytest is no script of a project, as a notebook is none
    assert not spike.replayable
    assert not any("replay" in command for command in next_commands(spike))


SCRIPT = """
import sys
from pathlib import Path
import beside
Path(sys.argv[1]).write_text(f"{__name__} {Path(__file__).is_absolute()} {sys.argv} {beside.x}")
sys.excepthook = print
sys.path.append("nowhere")
"""


def test_script_sees_what_python_would_show_it_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("x = 7")
    told = tmp_path / "told"
    before = (sys.argv, list(sys.path), sys.excepthook, sys.modules["__main__"])
    script = str(tmp_path / "train.py")
    with as_main(script, [str(told)]) as start:
        start()
    sys.modules.pop("beside")
    assert told.read_text() == f"__main__ True {[script, str(told)]} 7"
    assert (sys.argv, sys.path, sys.excepthook, sys.modules["__main__"]) == before
    (tmp_path / "train.py").write_text("raise KeyError('x')")
    with pytest.raises(KeyError), as_main(script, []) as start:
        start()
    assert (sys.argv, sys.path, sys.excepthook, sys.modules["__main__"]) == before
