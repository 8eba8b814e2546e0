"""SG9xx, healthy numbers: silent failures are found and failures predicted in real runs."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import stepguard
from stepguard import GuardConfig, Probes, Snapshots
from stepguard.diagnose import Rule, all_rules
from stepguard.diagnose.engine import FORECAST_SERIES, SERIES, forecasts, silent_findings
from stepguard.diagnose.rules.sg950 import crossing, trend_begins
from stepguard.journal import RunRecord, read_run
from stepguard.records import Reading

SILENT = [rule for rule in all_rules() if rule.code.startswith(SERIES)]
FORECASTS = [rule for rule in all_rules() if rule.code.startswith(FORECAST_SERIES)]


def cures(rules: list[Rule]) -> list[Any]:
    """Every remedy of each rule."""
    return [
        pytest.param(rule, remedy.snippet, id=f"{rule.code}-{number}")
        for rule in rules
        for number, remedy in enumerate(rule.text.remedies)
    ]


def watched(rule: Rule, lines: str, folder: Path, config: GuardConfig) -> RunRecord:
    """A run of the example under a guard."""
    names: dict[str, Any] = {"__name__": "example"}
    torch.manual_seed(0)
    exec(compile(rule.text.setup, f"{rule.code} setup", "exec"), names)
    probes = replace(config.probes, audit_every=names.get("audit_every"))
    config = replace(config, probes=probes)
    if "build" in names:  # its model is trained before, in the same folder
        with stepguard.watch(names["model"], names["optimizer"], config=config):
            for batch in names["batches"]:
                names["step"](batch)
    exec(compile(lines, f"{rule.code} lines", "exec"), names)
    also = {name: names.get(name) for name in ("scaler", "state")}
    guard = stepguard.watch(names["model"], names["optimizer"], config=config, **also)
    names["guard"] = guard
    with guard:
        for batch in names["batches"]:
            names["step"](batch)
            assert guard.armed
    return read_run(folder)


def codes(record: RunRecord, kind: str) -> list[str]:
    return [str(note["code"]) for note in record.notes if note.get("kind") == kind]


def silently(rule: Rule, lines: str, folder: Path) -> list[str]:
    """Codes that a watched run of the example reported."""
    config = GuardConfig(run_dir=folder, probes=Probes(look_every=2), terminal="quiet")
    record = watched(rule, lines, folder, config)
    assert record.incidents == []
    return codes(record, "silent")


@pytest.mark.parametrize("rule", SILENT, ids=lambda rule: rule.code)
def test_silent_example_is_found(rule: Rule, tmp_path: Path) -> None:
    assert rule.code in silently(rule, rule.text.bad, tmp_path)


@pytest.mark.parametrize(("rule", "lines"), cures(SILENT))
def test_cured_silent_example_is_not_reported(rule: Rule, lines: str, tmp_path: Path) -> None:
    assert silently(rule, lines, tmp_path) == []


def predicted(rule: Rule, lines: str, folder: Path) -> RunRecord:
    config = GuardConfig(
        run_dir=folder,
        probes=Probes(look_every=5, locate_budget=0),
        snapshots=Snapshots(count=0),
        terminal="quiet",
    )
    return watched(rule, lines, folder, config)


@pytest.mark.parametrize("rule", FORECASTS, ids=lambda rule: rule.code)
def test_example_is_predicted_before_it_fails(rule: Rule, tmp_path: Path) -> None:
    record = predicted(rule, rule.text.bad, tmp_path)
    assert rule.code in codes(record, "forecast")
    note = next(note for note in record.notes if note.get("code") == rule.code)
    for incident in record.incidents:
        only_noted = incident.decision is not None and incident.decision.action == "note"
        assert only_noted or int(str(note["step"])) < incident.step


@pytest.mark.parametrize(("rule", "lines"), cures(FORECASTS))
def test_cured_example_is_not_predicted(rule: Rule, lines: str, tmp_path: Path) -> None:
    record = predicted(rule, lines, tmp_path)
    assert codes(record, "forecast") == []
    assert record.incidents == []


def test_nothing_is_known_of_a_run_without_history() -> None:
    for readings in ([], [Reading(step=1, loss=1.0)]):
        assert silent_findings([], readings) == ()
        assert forecasts([], readings) == ()
    assert not trend_begins([], [])


def series(count: int, value: float, slope: float, noise: float = 0.0) -> list[tuple[int, float]]:
    rng = random.Random(0)
    return [(10 * i, value + slope * 10 * i + rng.gauss(0.0, noise)) for i in range(count)]


def test_straight_line_meets_its_limit_where_it_must() -> None:
    found = crossing(series(10, 0.0, 0.1), 14.0, rising=True)
    assert found is not None
    assert (found.step, found.earliest, found.latest) == (140, 140, 140)
    assert (found.since, found.first, found.now) == (0, 1.0, 90)
    assert found.value == pytest.approx(2**9)
    falling = crossing(series(10, 16.0, -0.1), 0.0, rising=False)
    assert falling is not None and (falling.step, falling.first) == (160, 2.0**16)
    assert falling.value == pytest.approx(2**7)
    gaps = [*series(9, 0.0, 0.1), (90, math.inf), (90, 9.0)]
    again = crossing(gaps, 14.0, rising=True)
    assert again is not None and again.step == 140


def test_noise_widens_the_interval() -> None:
    found = crossing(series(20, 0.0, 0.1, noise=0.5), 30.0, rising=True)
    assert found is not None
    assert found.earliest < found.step < found.latest
    assert abs(found.step - 300) < 30


NO_TREND = {
    "few points": series(4, 0.0, 1.0),
    "noise": series(20, 0.0, 0.0, noise=1.0),
    "noise above the slope": series(20, 0.0, 0.01, noise=2.0),
    "levelling off": [(10 * i, math.log(1 + i)) for i in range(20)],
    "jump": [(10 * i, 0.1 * i + 9.0 * (i > 6)) for i in range(10)],
    "falling": series(10, 0.0, -0.1),
    "past it": series(10, 20.0, 0.1),
}


@pytest.mark.parametrize("name", NO_TREND)
def test_what_is_no_clear_trend_is_not_extended(name: str) -> None:
    assert crossing(NO_TREND[name], 12.0, rising=True) is None


def test_limit_that_is_far_is_not_predicted() -> None:
    assert crossing(series(10, 0.0, 0.1), 1000.0, rising=True) is None
