"""The benchmark of silent failures counts what it says."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from zoo.silent.catalogue import chosen
from zoo.silent.plant import Plant

from benchmarks import silent
from stepguard.diagnose import all_rules
from stepguard.diagnose.engine import SERIES


def test_every_code_is_planted_in_three_trainings() -> None:
    planted: dict[str, set[str]] = {}
    for plant in chosen():
        planted.setdefault(plant.code, set()).add(plant.training)
    codes = {rule.code for rule in all_rules() if rule.code.startswith(SERIES)}
    forecasts = {code for code in codes if code >= "SG950"}
    assert set(planted) == codes - forecasts
    assert min(len(trainings) for trainings in planted.values()) >= 3
    assert max(Counter(plant.name for plant in chosen()).values()) == 1


@pytest.mark.parametrize(
    "plant",
    chosen(
        [
            "zeroes_the_head_only",
            "no_master_weights",
            "loader_made_in_every_step",
        ]
    ),
    ids=lambda plant: plant.name,
)
def test_mistake_is_told_and_its_twin_is_not(plant: Plant) -> None:
    result = silent.judge(plant, 1)
    assert result.found
    assert result.false == []


def test_quick_form_writes_its_result(tmp_path: Path) -> None:
    path = tmp_path / "silent.json"
    code = silent.main(
        ["--quick", "--only", "average_never_updated", "--jobs", "1", "--output", str(path)]
    )
    found = json.loads(path.read_text(encoding="utf-8"))
    assert code == 0
    assert (found["mistakes"], found["found"], found["twins"], found["false"]) == (1, 1, 1, 0)


def test_unknown_mistake_is_refused() -> None:
    with pytest.raises(SystemExit, match="no planted mistake fits"):
        chosen(["no_such"])
