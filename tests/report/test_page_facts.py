"""The words around the curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cli.journals import write_run
from report.hostile import ATTACK
from stepguard.journal import Journal
from stepguard.records import Reading
from stepguard.report.page import overview, story_document, tiles, verdict
from stepguard.report.story import read_story
from stepguard.report.summary import summarize


def _shown(folder: Path) -> dict[str, Any]:
    (run,) = story_document(read_story(folder), "run")["runs"]
    return run


def test_numbers_are_those_of_the_story(tmp_path: Path) -> None:
    run = read_story(write_run(tmp_path / "run")).latest
    shown = {label: (value, note) for label, value, note in tiles(summarize(run))}
    assert shown["steps committed"] == ("11", "of 12 seen")
    assert shown["updates dropped"] == ("1", "")
    assert shown["loss"] == ("0.9", "best 0.9")
    assert verdict(run) == {"text": "running, 1 incident", "weight": "note"}


def test_list_of_runs_has_the_newest_run_of_a_folder(tmp_path: Path) -> None:
    row = overview(read_story(write_run(tmp_path / "run")))
    assert (row["steps"], row["incidents"], row["last"]) == ("11", "1", "11")


def test_chain_is_in_time_and_names_the_incident(tmp_path: Path) -> None:
    chain = _shown(write_run(tmp_path / "run"))["chain"]
    assert [link["first"] for link in chain] == sorted(link["first"] for link in chain)
    assert any("SG204" in link["text"] for link in chain)


def test_settings_inside_settings_have_dotted_names(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write("run", {"torch": ATTACK, "config": {"policy": {"max_total": 3}}})
    journal.step(Reading(step=0, loss=1.0), committed=True)
    journal.close()
    groups = {group["title"]: group["rows"] for group in _shown(tmp_path)["groups"]}
    assert groups["Configuration"] == [["policy.max_total", "3"]]
    assert ["torch", ATTACK] in groups["Run facts"]


def test_what_is_held_against_a_run_is_told(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write("run", {"torch": "2"})
    for step in range(100):
        journal.step(Reading(step=step, loss=1.0 + step % 7 / 10, lr=(0.0,)), committed=True)
    journal.close()
    words = _shown(tmp_path)["concerns"]
    assert any("learning rate" in text for _, text in words)
