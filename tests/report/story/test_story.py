"""The story of real runs: rewind, restart, second run in a folder, a part left out, ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from report import real_runs
from report.two_ranks import two_ranks
from stepguard.report.page import Extras, run_facts
from stepguard.report.story import Run, read_story


@pytest.fixture(scope="module")
def rewound(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return read_story(real_runs.rewound(tmp_path_factory.mktemp("run") / "rewound")).latest


def _checkpoint_states(run: Run) -> set[str]:
    facts = run_facts(run, "run", Extras(), run)
    return {mark["state"] for mark in facts["checkpoints"]}


def test_steps_before_a_rewind_no_longer_count(rewound: Run) -> None:
    branch = rewound.branches[0]
    assert branch.left is not None
    assert (branch.left.by, branch.left.came_from) == ("rewind", 40)
    table = rewound.steps
    left = ~table.kept
    assert set(table.step[left]) == set(range(branch.left.to, 41))
    assert table.branch[left].max() == 0


def test_kept_rows_are_the_steps_in_their_order(rewound: Run) -> None:
    steps = rewound.steps.step[rewound.steps.kept]
    assert (np.diff(steps) > 0).all()
    assert steps[0] == 0


def test_incidents_are_in_the_order_of_time_with_what_was_really_done(rewound: Run) -> None:
    assert [(one.incident.step, one.done) for one in rewound.incidents][:6] == [
        (20, "partial"),
        (30, "dropped"),
        (31, "dropped"),
        (32, "dropped"),
        (33, "dropped"),
        (40, "rewound"),
    ]
    assert rewound.incidents[-1].kept and not rewound.incidents[1].kept
    rows = [one.row for one in rewound.incidents]
    assert rows == sorted(rows, key=lambda row: row or 0)


def test_rewind_names_the_incident_that_asked_for_it(rewound: Run) -> None:
    left = rewound.branches[0].left
    assert left is not None and left.incident is not None
    assert rewound.incidents[left.incident].incident.step == 40
    assert "rewound to" in _checkpoint_states(rewound)


def test_every_row_points_at_its_incident(rewound: Run) -> None:
    for place, one in enumerate(rewound.incidents):
        assert one.row is not None
        assert rewound.steps.incident[one.row] == place
        assert rewound.steps.step[one.row] == one.incident.step


def test_non_finite_values_stay_in_their_series(rewound: Run) -> None:
    loss = rewound.steps.series["loss"]
    assert len(loss) == len(rewound.steps)
    assert np.isnan(loss.values).sum() >= 5


def test_part_of_a_step_was_left_out(tmp_path: Path) -> None:
    run = read_story(real_runs.in_part(tmp_path)).latest
    (one,) = run.incidents
    assert one.done == "partial"
    assert one.row == 12 and run.steps.committed[12]
    assert one.incident.decision is not None
    assert one.incident.decision.left_out == "micro-batch 2 of 4"


def test_second_run_in_the_folder_has_a_story_of_its_own(tmp_path: Path) -> None:
    story = read_story(real_runs.fixed(tmp_path))
    assert [len(run.steps) for run in story.runs] == [20, 20]
    assert [len(run.incidents) for run in story.runs] == [1, 0]
    assert story.latest.number == 2
    assert story.runs[0].id != story.runs[1].id


def test_restart_goes_on_with_its_run(tmp_path: Path) -> None:
    (run,) = read_story(real_runs.restarted(tmp_path)).runs
    assert [attempt.ending for attempt in run.attempts] == ["closed", "closed"]
    assert run.attempts[1].restored == 24
    left = run.branches[0].left
    assert left is not None
    assert (left.by, left.to, left.came_from) == ("restart", 24, 29)
    assert list(run.steps.step[run.steps.kept]) == list(range(40))
    assert {"good", "restored"} <= _checkpoint_states(run)
    assert [one.attempt for one in run.incidents] == [0]


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
