"""Reading journals: while they are written, with lines that are none, by rank and by file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepguard import __version__
from stepguard._errors import JournalError
from stepguard.journal import Journal
from stepguard.records import Reading
from stepguard.report.story import StoryReader, read_story


def line(kind: str, **fields: Any) -> str:
    return json.dumps({"v": 1, "type": kind, **fields}, separators=(",", ":")) + "\n"


def write(folder: Path, *lines: str, name: str = "journal.jsonl") -> Path:
    with (folder / name).open("a", encoding="utf-8") as file:
        file.writelines(lines)
    return folder


def test_line_that_is_still_being_written_waits(tmp_path: Path) -> None:
    whole = line("step", step=1, loss=2.0)
    write(tmp_path, line("run", stepguard=__version__), line("step", step=0, loss=1.0), whole[:9])
    reader = StoryReader(tmp_path)
    assert reader.read()
    assert len(reader.story().latest.steps) == 1
    assert not reader.read()
    write(tmp_path, whole[9:])
    assert reader.read()
    assert list(reader.story().latest.steps.step) == [0, 1]
    assert reader.story().torn == 0


def test_folder_may_come_later(tmp_path: Path) -> None:
    reader = StoryReader(tmp_path / "later")
    assert not reader.exists() and not reader.read()
    assert reader.story().empty
    (tmp_path / "later").mkdir()
    write(tmp_path / "later", line("step", step=0))
    assert reader.read() and not reader.story().empty


@pytest.mark.parametrize(
    "text",
    [
        '{"v":1,"type":"st',
        "[1, 2]",
        '{"v":1}',
        '{"v":1,"type":"step","step":"a"}',
        '{"v":1,"type":"step","step":true,"loss":1}'.replace("true", "1e400"),
        '{"v":1,"type":"incident","incident":{"id":3}}',
        '{"v":1,"type":"incident","incident":null}',
        "[" * 100_000,
        "\udcff".encode("utf-8", "surrogateescape").decode("latin-1"),
    ],
)
def test_line_that_cannot_be_read_is_counted_and_costs_nothing_else(
    tmp_path: Path, text: str
) -> None:
    write(tmp_path, line("run"), text + "\n", line("step", step=0, loss=1.0))
    story = read_story(tmp_path)
    assert story.torn == 1
    assert len(story.latest.steps) == 1


def test_odd_values_are_left_out_of_the_series_and_the_step_stays(tmp_path: Path) -> None:
    odd = {"loss": "high", "components": [1], "followed": {"a": None, "b": True}, "lr": 0.1}
    write(tmp_path, line("step", step=0, **odd), line("step", step=1, loss=10**400))
    table = read_story(tmp_path).latest.steps
    assert list(table.step) == [0, 1]
    assert table.column("loss").values.tolist() == [math.inf]
    assert table.column("lr").values.tolist() == [0.1] and table.last_rates == []


def test_non_finite_numbers_come_back_as_they_were(tmp_path: Path) -> None:
    write(tmp_path, '{"v":1,"type":"step","step":0,"loss":null,"loss_kind":"-inf"}\n')
    write(tmp_path, '{"v":1,"type":"step","step":1,"loss":NaN}\n', line("step", step=2))
    loss = read_story(tmp_path).latest.steps.series["loss"]
    assert loss.values[0] == -math.inf and np.isnan(loss.values[1])
    assert loss.rows.tolist() == [0, 1]


def test_newer_schema_is_refused(tmp_path: Path) -> None:
    write(tmp_path, '{"v":99,"type":"step","step":0}\n')
    with pytest.raises(JournalError, match="line 1 has schema 99"):
        read_story(tmp_path)


def test_missing_journal_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="nothing does not exist"):
        read_story(tmp_path / "nothing")
    with pytest.raises(JournalError, match="give a run directory"):
        read_story(tmp_path)
    with pytest.raises(JournalError, match="rank3"):
        read_story(write(tmp_path, line("run")), rank=3)


def test_step_that_comes_again_without_a_word_is_a_branch(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for step in [0, 1, 2, 3, 1, 2, 3, 4]:
        journal.step(Reading(step=step, loss=1.0), committed=True)
    journal.close()
    run = read_story(tmp_path).latest
    assert [branch.end_row for branch in run.branches] == [4, 8]
    left = run.branches[0].left
    assert left is not None and (left.by, left.to) == ("repeat", 1)
    assert run.steps.kept.tolist() == [True, False, False, False, True, True, True, True]


def test_step_that_was_dropped_and_run_again_is_no_branch(tmp_path: Path) -> None:
    write(
        tmp_path,
        line("step", step=0),
        line("step", step=1, committed=False),
        line("step", step=1),
    )
    run = read_story(tmp_path).latest
    assert len(run.branches) == 1 and run.steps.kept.all()


def test_framework_that_resumed_by_itself_goes_on_with_the_run(tmp_path: Path) -> None:
    for name, steps in {"a": range(10), "b": range(6, 9)}.items():
        journal = Journal(tmp_path)
        journal.write("run", {"run": name})
        for step in steps:
            journal.step(Reading(step=step), committed=True)
        journal.close()
    (run,) = read_story(tmp_path).runs
    assert [attempt.ending for attempt in run.attempts] == ["killed", "running"]
    assert list(run.steps.step[run.steps.kept]) == list(range(9))


def test_end_belongs_to_the_attempt_it_names(tmp_path: Path) -> None:
    write(tmp_path, line("run", run="a"), line("step", step=0), line("run", run="b"))
    write(tmp_path, line("end", attempt=1, steps=1), line("step", step=0))
    first, second = read_story(tmp_path).runs
    assert [first.attempts[0].ending, second.attempts[0].ending] == ["closed", "running"]


def test_journals_of_further_guards_are_named(tmp_path: Path) -> None:
    write(tmp_path, line("run"))
    (tmp_path / "optimizer1").mkdir()
    write(tmp_path / "optimizer1", line("run"))
    assert read_story(tmp_path).elsewhere == (tmp_path / "optimizer1",)


def test_norm_after_clipping_is_a_series(tmp_path: Path) -> None:
    write(tmp_path, line("step", step=0, grad_norm=4.0, clip_factor=0.25))
    write(tmp_path, line("step", step=1, grad_norm=0.5, clip_factor=2.0))
    table = read_story(tmp_path).latest.steps
    assert table.series["grad_norm_clipped"].values.tolist() == [1.0, 0.5]
