"""The section of looks on a run's page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cli.journals import write_run
from report.real_runs import silently_wrong
from stepguard.journal import Journal
from stepguard.report.page import story_document
from stepguard.report.story import read_story


def _looks(folder: Path) -> dict[str, Any] | None:
    (run,) = story_document(read_story(folder), "run")["runs"]
    return run["looks"]


def test_run_without_looks_has_no_section(tmp_path: Path) -> None:
    assert _looks(write_run(tmp_path / "run")) is None


def test_looks_and_what_was_told_are_listed(tmp_path: Path) -> None:
    section = _looks(silently_wrong(tmp_path / "run"))
    assert section is not None
    assert [(step, code) for step, code, _ in section["findings"]] == [("5", "SG902")]
    titles = [table["title"] for table in section["tables"]]
    assert titles[:2] == [
        "Room left in the dtype, least first",
        "Updates, the most suspicious first",
    ]
    assert [step for step, _ in section["tables"][1]["rows"][0]["history"]] == [2, 5, 8]
    assert section["remarks"] == ["the step began with the gradients of the one before"]


def test_forecasts_are_listed_beside_them(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run")
    journal.write("run", {"stepguard": "0.1.0", "config": {}})
    journal.write(
        "note", {"kind": "forecast", "code": "SG951", "step": 9, "summary": "SG951 the loss scale"}
    )
    journal.close()
    section = _looks(tmp_path / "run")
    assert section is not None
    assert section["findings"] == [["9", "SG951", "SG951 the loss scale"]]
