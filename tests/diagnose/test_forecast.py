"""Forecasts: every example is foretold in a real run before it fails, and no remedy is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import stepguard
from stepguard import GuardConfig, Probes, Snapshots
from stepguard.diagnose import Rule, all_rules
from stepguard.diagnose.engine import FORECAST_SERIES, forecasts
from stepguard.diagnose.rules.sg900 import trend_begins
from stepguard.journal import RunRecord, read_run
from stepguard.records import Reading

FORECASTS = [rule for rule in all_rules() if rule.code.startswith(FORECAST_SERIES)]
CURES = [
    pytest.param(rule, remedy.snippet, id=f"{rule.code}-{number}")
    for rule in FORECASTS
    for number, remedy in enumerate(rule.ordered)
]


def watched(rule: Rule, lines: str, folder: Path) -> RunRecord:
    """A run of the example under a guard, up to its first bad step."""
    names: dict[str, Any] = {"__name__": "example"}
    torch.manual_seed(0)
    exec(compile(rule.text.setup, f"{rule.code} setup", "exec"), names)
    exec(compile(lines, f"{rule.code} lines", "exec"), names)
    config = GuardConfig(
        run_dir=folder,
        probes=Probes(look_every=5, locate_budget=0),
        snapshots=Snapshots(count=0),
        terminal="quiet",
    )
    guard = stepguard.watch(
        names["model"], names["optimizer"], scaler=names.get("scaler"), config=config
    )
    with guard:
        for batch in names["batches"]:
            names["step"](batch)
            assert guard.armed
    return read_run(folder)


def told(record: RunRecord) -> list[str]:
    return [str(note["code"]) for note in record.notes if note.get("kind") == "forecast"]


@pytest.mark.parametrize("rule", FORECASTS, ids=lambda rule: rule.code)
def test_example_is_foretold(rule: Rule, tmp_path: Path) -> None:
    record = watched(rule, rule.text.bad, tmp_path)
    assert rule.code in told(record)
    note = next(note for note in record.notes if note.get("code") == rule.code)
    for incident in record.incidents:
        only_told = incident.decision is not None and incident.decision.action == "note"
        assert only_told or int(str(note["step"])) < incident.step


@pytest.mark.parametrize(("rule", "lines"), CURES)
def test_cured_example_is_not_told(rule: Rule, lines: str, tmp_path: Path) -> None:
    record = watched(rule, lines, tmp_path)
    assert told(record) == []
    assert record.incidents == []


def test_nothing_is_known_of_a_run_without_history() -> None:
    assert forecasts([], []) == ()
    assert forecasts([], [Reading(step=1, loss=1.0)]) == ()
    assert not trend_begins([], [])
