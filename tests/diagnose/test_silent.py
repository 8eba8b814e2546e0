"""Silent failures: every example is found in a real run, and none of its remedies is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import stepguard
from stepguard import GuardConfig, Probes
from stepguard.diagnose import Rule, all_rules
from stepguard.diagnose.engine import SERIES, silent_findings
from stepguard.journal import read_run
from stepguard.records import Reading

SILENT = [rule for rule in all_rules() if rule.code.startswith(SERIES)]
CURES = [
    pytest.param(rule, remedy.snippet, id=f"{rule.code}-{number}")
    for rule in SILENT
    for number, remedy in enumerate(rule.ordered)
]


def told(rule: Rule, lines: str, folder: Path) -> list[str]:
    """Codes that a watched run of the example told."""
    names: dict[str, Any] = {"__name__": "example"}
    torch.manual_seed(0)
    exec(compile(rule.text.setup, f"{rule.code} setup", "exec"), names)
    config = GuardConfig(run_dir=folder, probes=Probes(look_every=2), terminal="quiet")
    if {"model", "optimizer", "step"} <= names.keys():  # the run before, in the same folder
        with stepguard.watch(names["model"], names["optimizer"], config=config):
            for batch in names["batches"]:
                names["step"](batch)
    exec(compile(lines, f"{rule.code} lines", "exec"), names)
    guard = stepguard.watch(
        names["model"], names["optimizer"], state=names.get("state"), config=config
    )
    with guard:
        for batch in names["batches"]:
            names["step"](batch)
        assert guard.armed
    record = read_run(folder)
    assert record.incidents == []
    return [str(note["code"]) for note in record.notes if note.get("kind") == "silent"]


@pytest.mark.parametrize("rule", SILENT, ids=lambda rule: rule.code)
def test_example_is_found(rule: Rule, tmp_path: Path) -> None:
    assert rule.code in told(rule, rule.text.bad, tmp_path)


@pytest.mark.parametrize(("rule", "lines"), CURES)
def test_cured_example_is_not_told(rule: Rule, lines: str, tmp_path: Path) -> None:
    assert told(rule, lines, tmp_path) == []


def test_nothing_is_known_of_a_run_without_looks() -> None:
    assert silent_findings([], []) == ()
    assert silent_findings([], [Reading(step=1, loss=1.0)]) == ()
