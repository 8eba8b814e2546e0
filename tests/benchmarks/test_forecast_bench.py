"""The benchmark of forecasts counts what it says it counts, and its quick form runs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from benchmarks.parts import failing_trainings, sound_trainings
from benchmarks.parts.forecast_runs import Outcome, first_loss_above, first_norm_above

from benchmarks import forecast


def told(step: int, place: str = "layer") -> dict[str, object]:
    found = {"place": place, "earliest": 60, "latest": 80}
    return {"step": step, "code": "SG953", "forecast": found}


def test_lead_is_counted_from_the_first_warning_before_the_failure() -> None:
    early = Outcome("a", 0, failed=70, told=[told(40), told(60)])
    late = Outcome("a", 1, failed=50, told=[told(50)])
    row = forecast.failing_row("a", [early, late, Outcome("a", 2)])
    assert row["failed"] == 2
    assert row["rules"]["stepguard"]["leads"] == [30]
    assert row["rules"]["stepguard, no looks"]["foretold"] == 0
    assert row["interval_held"] == 1


def test_every_warning_of_a_healthy_run_counts() -> None:
    row = forecast.sound_row("a", [Outcome("a", 0, steps=100, told=[told(5), told(90)])])
    assert row["warnings"]["stepguard"] == 2
    total = forecast.totals([], [row])
    assert total["rules"]["stepguard"]["false_per_1000_steps"] == pytest.approx(20.0)


def test_simple_rules_warn_once_a_stretch() -> None:
    calm = [1.0 + 0.1 * math.sin(step) for step in range(40)]
    wild = [*calm, 50.0, 60.0, *calm, 50.0]
    outcome = Outcome("a", 0, losses=wild, norms=wild)
    assert first_norm_above(outcome) == [40, 82]
    assert first_loss_above(outcome) == [40]


def test_enough_is_measured() -> None:
    assert len(failing_trainings.KINDS) >= 8
    assert len(sound_trainings.KINDS) * forecast.SEEDS >= 100


def test_quick_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert forecast.main(["--quick", "--output", str(tmp_path / "forecast.json")]) == 0
    content = json.loads((tmp_path / "forecast.json").read_text(encoding="utf-8"))
    rows = {row["kind"]: row for row in content["failing"]}
    assert rows["activations outgrow float16"]["rules"]["stepguard"]["foretold"] == 1
    assert content["totals"]["rules"]["stepguard"]["false_warnings"] == 0
    assert "nothing is foretold of" in capsys.readouterr().out
