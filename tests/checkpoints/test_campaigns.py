"""The campaigns in small: random kills lose nothing, damage is always found, and the peers show
that both can fail.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.disk.campaign import campaign
from benchmarks.disk.damage import DAMAGES
from benchmarks.disk.formats import FORMATS, Safetensors, Sealed, TwoFiles

from benchmarks import corruption, crash, store

pytestmark = pytest.mark.slow


def test_sixty_random_kills_lose_nothing(tmp_path: Path) -> None:
    tally = campaign(Sealed, tmp_path / "run", runs=60, size=100_000, seed=1)
    assert tally.killed == tally.runs == 60
    outcome = (tally.newest_unusable, tally.all_lost, tally.mixed, tally.went_back)
    assert outcome == (0, 0, 0, 0), tally.first_failure
    assert len(tally.killed_during) >= 3


def test_the_campaign_can_see_a_loss(tmp_path: Path) -> None:
    tally = campaign(TwoFiles, tmp_path / "run", runs=25, size=300_000, seed=1)
    assert tally.newest_unusable + tally.mixed + tally.all_lost > 0


@pytest.mark.parametrize("kind", DAMAGES)
def test_every_damage_is_found(kind: str) -> None:
    counts = {kind: 150 if kind == "bit flips" else 60}
    found = corruption.damaged(Sealed, counts)["kinds"][kind]
    assert found == {"found": counts[kind], "harmless": 0, "missed": 0}


def test_the_damage_is_real() -> None:
    assert corruption.damaged(Safetensors, {"bit flips": 40})["kinds"]["bit flips"]["missed"] > 30


def test_crash_campaign_prints_and_keeps_its_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "crash.json"
    code = crash.main(
        ["--runs", "2", "--size", "1000", "--only", "stepguard", "--output", str(output)]
    )
    row = json.loads(output.read_text(encoding="utf-8"))["rows"]["stepguard"]
    assert (code, row["killed"], row["newest_unusable"], row["missing"]) == (0, 2, 0, None)
    assert "stepguard store" in capsys.readouterr().out
    assert crash.main(["--only", "nothing"]) == 2
    assert f"use one of {', '.join(FORMATS)}" in " ".join(capsys.readouterr().out.split())


def test_corruption_campaign_prints_and_keeps_its_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "corruption.json"
    assert corruption.main(["--share", "0.002", "--output", str(output)]) == 0
    rows = json.loads(output.read_text(encoding="utf-8"))["rows"]
    assert list(rows) == list(corruption.FORMATS)
    assert "load without a word" in capsys.readouterr().out


def test_stall_is_measured_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "store.json"
    assert store.main(["--quick", "--output", str(output)]) == 0
    ways = json.loads(output.read_text(encoding="utf-8"))["rows"]["tiny"]["ways"]
    assert list(ways) == ["all cores", "one core"]
    assert all(way["save_s"] > 0 and way["step_ms"] > 0 for way in ways.values())
    assert "what a save costs training" in capsys.readouterr().out
