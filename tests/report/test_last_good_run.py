"""Which run counts as the last good one, and what is told of the difference."""

from __future__ import annotations

from pathlib import Path

from cli.journals import write_run
from stepguard.journal import Journal
from stepguard.records import Reading
from stepguard.report.page import differences, last_good, page_extras
from stepguard.report.story import Run, read_story


def _run(folder: Path, time: float, *, ends: bool = True, **config: object) -> Run:
    journal = Journal(folder)
    journal.write("run", {"time": time, "torch": "2", "config": config, "run": str(time)})
    journal.step(Reading(step=0, loss=1.0), committed=True)
    if ends:
        journal.write("end", {"steps": 1, "incidents": 0, "armed": True})
    journal.close()
    return read_story(folder).latest


def test_newest_run_that_was_closed_without_an_incident_is_chosen(tmp_path: Path) -> None:
    old = _run(tmp_path / "old", 1.0)
    newer = _run(tmp_path / "newer", 2.0)
    killed = _run(tmp_path / "killed", 3.0, ends=False)
    ill = read_story(write_run(tmp_path / "ill")).latest
    now = _run(tmp_path / "now", 5.0)
    later = _run(tmp_path / "later", 6.0)
    assert last_good(now, [old, newer, killed, ill, now, later]) is newer
    assert last_good(now, [killed, ill, now, later]) is None


def test_only_what_differs_is_told(tmp_path: Path) -> None:
    good = _run(tmp_path / "good", 1.0, lr=0.1, clip=1)
    now = _run(tmp_path / "now", 2.0, lr=0.2, clip=1, seed=3)
    assert differences(good, now) == [
        ["", "good (run 1)", "this run"],
        ["config.lr", "0.1", "0.2"],
        ["config.seed", "-", "3"],
    ]
    assert differences(good, good) == []


def test_runs_beside_the_folder_are_looked_at(tmp_path: Path) -> None:
    _run(tmp_path / "good", 1.0, lr=0.1)
    _run(tmp_path / "now", 2.0, lr=0.2)
    story = read_story(tmp_path / "now")
    rows = page_extras(story, tmp_path / "now").difference
    assert ["config.lr", "0.1", "0.2"] in rows
    alone = tmp_path / "alone" / "run"
    _run(alone, 3.0)
    assert page_extras(read_story(alone), alone).difference is None
