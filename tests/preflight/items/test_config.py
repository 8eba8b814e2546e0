"""Types, values, unread keys and changes of a configuration, and the launcher."""

from __future__ import annotations

import pickle
import sys
import types
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from preflight.asking import CONFIG, HEALTHY, ask, ask_one, assert_found, built, saved, written
from stepguard.check.inspection import CheckContext, Inspection
from stepguard.check.preflight import Subject, run_item
from stepguard.check.settings import read_settings

FAULTS = [
    ("other_accumulation", "launcher.agrees", "fail", "gradient_accumulation_steps=2", "has 8"),
]


@pytest.mark.parametrize(("build", "item", "status", "first", "second"), FAULTS)
def test_planted_fault_is_found_with_its_numbers(
    build: str, item: str, status: str, first: str, second: str
) -> None:
    assert_found(build, item, status, first, second)


def test_change_since_the_checkpoint_is_listed(tmp_path: Path) -> None:
    parts = built("training:build")
    path = saved(tmp_path / "old.pt", parts["model"], config=CONFIG | {"seed": 7, "old_key": 1})
    outcome = ask_one(HEALTHY, "config.changed", checkpoint=path)
    assert outcome.status == "warn"
    assert outcome.evidence == ("changed: seed: 7 -> 0", "only in the checkpoint: old_key")


def test_configuration_of_a_class_that_torch_would_not_load_is_read_without_importing_it(
    tmp_path: Path,
) -> None:
    module = types.ModuleType("gone_tomorrow")
    module.Settings = type("Settings", (), {"__module__": "gone_tomorrow"})  # type: ignore[attr-defined]
    settings = module.Settings()
    vars(settings).update(CONFIG | {"seed": 7, "folder": Path("somewhere")})
    sys.modules["gone_tomorrow"] = module
    try:
        path = saved(tmp_path / "old.pt", built("training:build")["model"], config=settings)
    finally:
        del sys.modules["gone_tomorrow"]
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)
    outcome = ask_one(HEALTHY, "config.changed", checkpoint=path)
    assert "changed: seed: 7 -> 0" in outcome.evidence


def test_keys_that_nothing_reads_are_listed(tmp_path: Path) -> None:
    config = written(tmp_path, text_loss_weight=2.0, optimizer__use_fused=True)
    outcome = ask_one(HEALTHY, "config.unread", config=config)
    assert outcome.status == "warn"
    assert "2 keys of 13 not read" in outcome.evidence[0]
    assert "optimizer.use_fused, text_loss_weight" in outcome.evidence[0]


def test_numbers_read_as_text_are_found(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("trainer:\n  lr: 1e-5\n  min_lr: 1.0e-6\n  amp: 'False'\n")
    assert yaml.safe_load(path.read_text())["trainer"]["lr"] == "1e-5"
    outcome = ask(str(path), "config.types", config=None).outcome("config.types")
    assert outcome.status == "fail"
    assert (
        "text for PyYAML: trainer.lr: 1e-5" in outcome.evidence[0]
        and "trainer.amp: 'False'" in outcome.evidence[1]
    )


def test_impossible_values_are_found(tmp_path: Path) -> None:
    config = written(tmp_path, optimizer={"lr": -1e-4, "beta2": 9.99}, dropout=float("nan"))
    outcome = ask(str(config), "config.values", config=None).outcome("config.values")
    assert outcome.status == "fail"
    assert outcome.evidence == (
        "optimizer.lr=-0.0001 must be above 0, optimizer.beta2=9.99 must lie between 0 and 1, "
        "dropout is NaN",
    )


@pytest.mark.parametrize(
    ("text", "source", "status"),
    [
        ("lr: 2e-3", "", "warn"),
        ("lr: 2e-3\ndecay: 1e-4", "import omegaconf", "pass"),
        ("lr: 2e-3", "optimizer", "pass"),
        ("lr: 2e-3\ndecay: 1e-4", "optimizer", "warn"),
        ("lr: '2e-3'", "optimizer", "fail"),
        ("lr: 2.0e-3\nname: e3", "", "pass"),
    ],
)
def test_unquoted_exponent_is_a_number_where_the_program_takes_it_for_one(
    tmp_path: Path, text: str, source: str, status: str
) -> None:
    (tmp_path / "train.py").write_text(source)
    (tmp_path / "c.yaml").write_text(text)
    model = nn.Linear(2, 2)
    optimizer = None
    if source == "optimizer":
        optimizer = torch.optim.SGD(model.parameters(), lr=2e-3)
    subject = Subject(model=model, optimizer=optimizer, config=read_settings(tmp_path / "c.yaml"))
    run = Inspection(subject, CheckContext(tmp_path, script=tmp_path / "train.py"))
    outcome = run_item("config.types", run)
    assert outcome.status == status, outcome
    if status == "warn":
        assert "1.0e-4 instead of 1e-4" in outcome.fix
