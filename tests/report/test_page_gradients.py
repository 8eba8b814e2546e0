"""The heat map of a card: what the file says, and nothing that it should not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from report.real_runs import batch, build
from stepguard.records import Incident, Origin, Reading, Verdict
from stepguard.report.page import gradient_heat

INCIDENT = Incident(
    id="8-0", step=8, verdict=Verdict(kind="nonfinite_loss"), reading=Reading(step=8)
)
TABLE = {"steps": [7, 8], "modules": ["a", "b", "b.c"], "norms": [[1, 2], [3, "nan"], [1, "inf"]]}


def _heat(folder: Path, table: Any, incident: Incident = INCIDENT) -> dict[str, Any] | None:
    place = folder / "incidents" / "8-0"
    place.mkdir(parents=True, exist_ok=True)
    (place / "gradients.json").write_text(json.dumps(table))
    return gradient_heat(incident, folder)


def test_first_bad_cell_is_that_of_the_origin(tmp_path: Path) -> None:
    assert _heat(tmp_path, TABLE)["first"] == [1, 1]
    born = replace(INCIDENT, origin=Origin(step=8, phase="forward", module="b.c"))
    table = {**TABLE, "modules": ["a", "x", "b.c"]}
    assert _heat(tmp_path, table, born)["first"] == [2, 1]


@pytest.mark.parametrize(
    "table",
    [[], {}, {**TABLE, "norms": [[1]]}, {**TABLE, "steps": ["x"]}, {**TABLE, "norms": 3}],
    ids=["list", "empty", "short", "words", "number"],
)
def test_a_damaged_file_is_no_heat_map(tmp_path: Path, table: Any) -> None:
    assert _heat(tmp_path, table) is None


def test_an_id_that_leads_out_of_the_run_opens_nothing(tmp_path: Path) -> None:
    (tmp_path / "gradients.json").write_text(json.dumps(TABLE))
    assert gradient_heat(replace(INCIDENT, id="../.."), tmp_path / "run") is None
    assert gradient_heat(replace(INCIDENT, id=".."), tmp_path) is None


def test_incident_of_a_real_run_has_the_norms_of_the_steps_before(tmp_path: Path) -> None:
    _, guard, loss_fn = build(tmp_path)
    for number in range(6):
        guard.step(loss_fn, batch(number, bad=number == 5))
    guard.close()
    (incident,) = guard.incidents
    heat = gradient_heat(incident, tmp_path)
    assert heat["steps"] == list(range(6))
    assert heat["modules"] == ["0", "2"]
    assert heat["first"] == [0, 5]
    assert [row[5] for row in heat["values"]] == ["nan", "nan"]
    assert all(isinstance(value, float) for row in heat["values"] for value in row[:5])
