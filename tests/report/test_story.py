"""The story of a folder: journals while they are written, broken lines, runs that went back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from report import real_runs
from report.real_runs import two_ranks
from stepguard import __version__
from stepguard._errors import JournalError
from stepguard.cli.app import app
from stepguard.journal import Journal
from stepguard.records import Reading
from stepguard.report.page import parts, run_facts
from stepguard.report.run_report import render_terminal
from stepguard.report.story import Run, Story, StoryReader, read_story
from stepguard.report.summary import compare, summarize


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
    assert table.column("lr").values.tolist() == [0.1]


def test_non_finite_numbers_come_back_as_they_were(tmp_path: Path) -> None:
    write(tmp_path, '{"v":1,"type":"step","step":0,"loss":null,"loss_kind":"-inf"}\n')
    write(tmp_path, '{"v":1,"type":"step","step":1,"loss":NaN}\n', line("step", step=2))
    loss = read_story(tmp_path).latest.steps.series["loss"]
    assert loss.values[0] == -math.inf and np.isnan(loss.values[1])
    assert loss.rows.tolist() == [0, 1]


def test_missing_journal_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="nothing does not exist"):
        read_story(tmp_path / "nothing")
    with pytest.raises(JournalError, match="give a run directory"):
        read_story(tmp_path)
    write(tmp_path, '{"v":99,"type":"step","step":0}\n', name="newer.jsonl")
    with pytest.raises(JournalError, match="line 1 has schema 99"):
        read_story(tmp_path / "newer.jsonl")
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


def test_norm_after_clipping_is_a_series(tmp_path: Path) -> None:
    write(tmp_path, line("step", step=0, grad_norm=4.0, clip_factor=0.25))
    write(tmp_path, line("step", step=1, grad_norm=0.5, clip_factor=2.0))
    table = read_story(tmp_path).latest.steps
    assert table.series["grad_norm_clipped"].values.tolist() == [1.0, 0.5]


@pytest.fixture(scope="module")
def rewound(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return read_story(real_runs.rewound(tmp_path_factory.mktemp("true") / "rewound"))


def test_fixed_run_does_not_show_the_incidents_of_the_run_before(tmp_path: Path) -> None:
    folder = real_runs.fixed(tmp_path / "run")
    now = CliRunner().invoke(app, ["report", str(folder)])
    assert now.exit_code == 0
    assert "20 seen, 20 committed, 0 skipped" in now.stdout and "SG" not in now.stdout
    assert "used for 2 runs, this is number 2" in now.stdout
    before = CliRunner().invoke(app, ["report", str(folder), "--run", "1"])
    assert "SG101" in before.stdout and "this is number 1" in before.stdout
    third = CliRunner().invoke(app, ["report", str(folder), "--run", "3"])
    assert third.exit_code == 2 and "holds 2" in third.stderr
    live = CliRunner().invoke(app, ["live", str(folder), "--once", "--stage", "0-19: incidents=0"])
    assert live.exit_code == 0 and "healthy" in live.stdout
    doctor = CliRunner().invoke(app, ["doctor", str(folder)])
    assert "20 steps, 0 incidents" in doctor.stdout and "SG" not in doctor.stdout


def _checkpoint_states(run: Run) -> set[str]:
    facts = run_facts(run, "run", None, run)
    return {mark["state"] for mark in facts["checkpoints"]}


def test_ranks_tell_one_story(tmp_path: Path) -> None:
    story = read_story(two_ranks(tmp_path))
    (run,) = story.runs
    assert sorted(run.by_rank) == [0, 1]
    assert run.world == 2
    (one,) = run.incidents
    assert one.ranks == (0, 1) and one.incident.step == 5
    assert "SG701" in {finding.code for finding in one.incident.findings}
    tables = [read_story(tmp_path / "run", rank=rank).latest.steps for rank in (0, 1)]
    for rank, table in enumerate(tables):
        assert list(run.by_rank[rank]) == list(table.step) == list(range(8))
        assert table.incident[5] == 0
    losses = [table.series["loss"].values for table in tables]
    assert np.isfinite(losses[0]).sum() >= 7 and losses[0][0] != losses[1][0]


def test_a_rewind_leaves_rows_behind_and_every_incident_knows_its_row(rewound: Story) -> None:
    run = rewound.latest
    table, left = run.steps, run.branches[0].left
    assert left is not None and (left.by, left.came_from) == ("rewind", 40)
    assert left.incident is not None and run.incidents[left.incident].incident.step == 40
    assert "rewound to" in _checkpoint_states(run)
    assert set(table.step[~table.kept]) == set(range(left.to, 41))
    assert table.branch[~table.kept].max() == 0
    assert table.step[0] == 0 and (np.diff(table.step[table.kept]) > 0).all()
    assert [(one.incident.step, one.done) for one in run.incidents][:6] == [
        (20, "partial"),
        *((step, "dropped") for step in range(30, 34)),
        (40, "rewound"),
    ]
    assert run.incidents[-1].kept and not run.incidents[1].kept
    for place, one in enumerate(run.incidents):
        assert one.row is not None and table.incident[one.row] == place
        assert table.step[one.row] == one.incident.step
    loss = table.series["loss"]
    assert len(loss) == len(table) and np.isnan(loss.values).sum() >= 5


def test_a_rewind_is_told_in_the_order_of_time_by_what_counts(
    rewound: Story, tmp_path: Path
) -> None:
    summary = summarize(rewound.latest, rewound)
    texts = [event.text for event in summary.timeline]
    back = next(place for place, text in enumerate(texts) if "rewound to step" in text)
    assert summary.timeline[back].step == 40 and texts[-1] == "the guard was closed"
    assert "no step was committed after" not in " ".join(texts)
    screen = render_terminal(summary, width=100)
    assert "of them no longer count: 1 rewind" in screen
    assert "continued without sample 3" in screen and "longest stretch 4 in a row" in screen
    healthy = read_story(real_runs.fixed(tmp_path / "healthy")).latest
    rows = {row.aspect: row for row in compare(rewound.latest, healthy).rows}
    assert (
        "no longer counted" in rows["steps"].first
        and "no longer counted" not in rows["steps"].second
    )
    assert "rewound 1" in rows["what was done"].first


def test_part_of_a_step_that_was_left_out_is_named_and_counted_from_1(tmp_path: Path) -> None:
    story = read_story(real_runs.in_part(tmp_path))
    run = story.latest
    (one,) = run.incidents
    assert (one.done, one.row) == ("partial", 12) and run.steps.committed[12]
    assert one.incident.decision is not None
    assert one.incident.decision.left_out == "micro-batch 2 of 4"
    screen = render_terminal(summarize(run, story), width=100)
    for words in ("loss is nan in", "continued without"):
        assert f"{words} micro-batch 2 of 4" in screen
    assert "20 seen, 20 committed, 0 skipped" in screen


def test_restart_goes_on_with_its_run(tmp_path: Path) -> None:
    story = read_story(real_runs.restarted(tmp_path))
    (run,) = story.runs
    assert [attempt.ending for attempt in run.attempts] == ["closed", "closed"]
    assert run.attempts[1].restored == 24
    left = run.branches[0].left
    assert left is not None and (left.by, left.to, left.came_from) == ("restart", 24, 29)
    assert list(run.steps.step[run.steps.kept]) == list(range(40))
    assert {"good", "restored"} <= _checkpoint_states(run)
    assert [one.attempt for one in run.incidents] == [0]
    summary = summarize(run, story)
    assert (summary.restarts, summary.left) == (1, 6)
    texts = [event.text for event in summary.timeline]
    assert any(
        text.startswith("started again at step 24; 6 earlier steps no longer counted")
        for text in texts
    )
    kept, gone, after = parts(run)
    assert kept["left"] is None and after["left"] is None
    assert (gone["first"], gone["last"], gone["joint"]) == (24, 30, 23)
    assert gone["left"]["kind"] == "restart"
