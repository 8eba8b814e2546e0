"""A kill at any instant loses nothing, and the campaigns show that both can fail."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from benchmarks.disk.campaign import campaign
from benchmarks.disk.damage import DAMAGES
from benchmarks.disk.faults import MOMENTS, Dying, Moment, Recorder
from benchmarks.disk.formats import FORMATS, Safetensors, Sealed, TwoFiles
from benchmarks.disk.states import GOOD, facts_at, state_at

from benchmarks import corruption, crash, store
from checkpoints.kit import SIZE, held, in_child, names, saved
from stepguard.checkpoints import Store
from stepguard.checkpoints.seal import entry_of, read_pointer


def _resume_and_save(folder: Path, disk: Dying | Recorder, steps: int) -> None:
    store = Store(folder, keep=1, keep_every=7, disk=disk)
    step = held(store.open())
    for next_step in range(step + 1, step + 1 + steps):
        store.save(next_step, state_at(next_step, SIZE), facts_at(next_step), GOOD)


def _save_doubtful(folder: Path, disk: Dying, step: int) -> None:
    Store(folder, disk=disk).save(step, state_at(step), {}, replace(GOOD, good=False))


def _check(folder: Path, earliest: int, latest: int) -> int:
    """Last-good names a sealed checkpoint, opens without falling back, and holds exactly what was
    saved.
    """
    assert entry_of(read_pointer(folder)).good
    opened = Store(folder).open()
    assert opened.passed_over == ()
    assert earliest <= held(opened) <= latest
    for path in folder.glob("step-*"):
        assert held(Store(folder).open(path)) == entry_of(path).step
    return opened.step


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_any_operation_the_last_good_checkpoint_opens(
    moment: Moment, tmp_path: Path
) -> None:
    saved(Store(tmp_path), 0)
    step, number, killed = 0, 0, 0
    while True:
        code = in_child(lambda: _resume_and_save(tmp_path, Dying(number, moment), 2))  # noqa: B023
        now = _check(tmp_path, step, step + 2)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        killed, number, step = killed + 1, number + 1, now
    assert killed > 50
    saved(Store(tmp_path, keep=1), step + 3)
    assert names(tmp_path) == ["last-good", f"step-{step + 3}"]


def test_killed_again_while_the_litter_is_cleared_loses_nothing(tmp_path: Path) -> None:
    saved(Store(tmp_path), 0)
    for number in range(30):
        in_child(lambda: _resume_and_save(tmp_path, Dying(20, "after"), 1))
        code = in_child(lambda: _resume_and_save(tmp_path, Dying(number, "before"), 1))  # noqa: B023
        assert code == -signal.SIGKILL
        _check(tmp_path, 0, 60)


def test_killed_during_the_very_first_save_leaves_an_empty_store_that_can_be_used(
    tmp_path: Path,
) -> None:
    number = 0
    while True:
        folder = tmp_path / f"{number}"
        code = in_child(lambda: saved(Store(folder, disk=Dying(number, "middle")), 5))  # noqa: B023
        entries = Store(folder).list()
        assert [entry.step for entry in entries] in ([], [5])
        if entries:
            assert held(Store(folder).open()) == 5
        saved(Store(folder, keep=1), 6)
        assert names(folder) == ["last-good", "step-6"]
        if code == 0:
            return
        number += 1


def test_killed_while_saving_a_doubtful_state_keeps_the_good_one(tmp_path: Path) -> None:
    saved(Store(tmp_path), 1)
    for number in range(40):
        step = 2 + number
        in_child(partial(_save_doubtful, tmp_path, Dying(number, "after"), step))
        assert held(Store(tmp_path).open()) == 1


# --- the campaigns in small, and that they can see a loss


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
