"""The document of a page: parts, panels and cards are those of the story."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.journals import write_run
from report.hostile import ATTACK, hostile_run
from report.real_runs import restarted
from stepguard.journal import Journal
from stepguard.records import Reading
from stepguard.report.page import LONGEST_TEXT, Extras, parts, run_name, story_document, version
from stepguard.report.story import read_story


def test_one_line_without_going_back_is_one_part(tmp_path: Path) -> None:
    run = read_story(write_run(tmp_path / "run")).latest
    (part,) = parts(run)
    assert (part["first"], part["last"], part["left"]) == (0, 12, None)


def test_rows_above_a_restart_are_a_part_that_was_left(tmp_path: Path) -> None:
    run = read_story(restarted(tmp_path / "run")).latest
    kept, left, after = parts(run)
    assert kept["left"] is None and after["left"] is None
    assert (left["first"], left["last"]) == (24, 30)
    assert left["left"]["kind"] == "restart"
    assert left["joint"] == 23


def test_empty_run_has_no_part(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write("run", {"stepguard": "0"})
    journal.close()
    document = story_document(read_story(tmp_path), "empty")
    assert document["runs"][0]["parts"] == []
    assert set(document["runs"][0]["columns"]) == {"step", "state"}


def test_columns_are_of_what_was_recorded(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write("run", {"stepguard": "0"})
    for step in range(3):
        reading = Reading(
            step=step,
            loss=1.0,
            components={"text": 0.5},
            followed={"kl": 0.1},
            grad_norm=2.0,
            clip_factor=0.5,
            scale=1024.0,
            lr=(0.1, 0.2),
            seconds=0.1,
        )
        journal.step(reading, committed=True)
    journal.close()
    (run,) = story_document(read_story(tmp_path), "run")["runs"]
    losses = {"loss", "loss/text", "followed/kl"}
    norms = {"grad_norm", "grad_norm_clipped"}
    rest = {"step", "state", "lr", "lr/1", "scale", "seconds"}
    assert set(run["columns"]) == losses | norms | rest


def test_card_tells_what_where_why_and_what_was_done(tmp_path: Path) -> None:
    (run,) = story_document(read_story(write_run(tmp_path / "run")), "run")["runs"]
    (card,) = run["incidents"]
    assert card["summary"] == "loss is nan"
    assert card["where"]["text"] == "forward: aten._softmax in attn at model.py:88"
    assert card["cause"] == "SG204 softmax over a fully masked row"
    assert card["done"] == "skipped"
    assert card["bad"] == {"loss": 1, "grad_norm": 1}
    assert "stepguard explain SG204" in card["commands"]


def test_version_changes_with_an_incident_and_not_with_a_row(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write("run", {"stepguard": "0"})
    journal.step(Reading(step=0, loss=1.0), committed=True)
    first = version(read_story(tmp_path).latest)
    journal.step(Reading(step=1, loss=1.0), committed=True)
    assert version(read_story(tmp_path).latest) == first
    journal.note("note", {"step": 1, "kind": "x", "summary": "x"})
    journal.close()
    assert version(read_story(tmp_path).latest) != first


@pytest.mark.slow
def test_hostile_journal_loses_no_row_and_is_not_shown_at_any_length(tmp_path: Path) -> None:
    story = read_story(hostile_run(tmp_path / "run"))
    document = story_document(story, ATTACK, Extras())
    text = json.dumps(document, allow_nan=False)
    assert len(story.latest.steps) == 14
    assert len(text) < 400_000
    assert LONGEST_TEXT < 10_000
    (run,) = document["runs"]
    assert run["unread"] == "not shown, because they cannot be read: 5 lines of the journal"
    assert ATTACK in run["incidents"][0]["where"]["text"]


def test_run_is_called_by_its_folder(tmp_path: Path) -> None:
    run = write_run(tmp_path / "mine")
    assert run_name(run) == "mine"
    assert run_name(run / "journal.jsonl") == "mine"
