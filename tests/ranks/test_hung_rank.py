"""A rank that does not come to a step is named by the others."""

from __future__ import annotations

from pathlib import Path

import forked
from distributed.launch import environment
from stepguard.ranks.hung import RankProgress, behind

WORKER = Path(__file__).parents[1] / "distributed" / "hung_worker.py"
SEEN = 7
"""The exit code of a rank that has been told of the other one."""


def test_rank_that_stalls_in_its_forward_pass_is_named_with_its_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert forked.logged([str(WORKER), str(tmp_path)], 2, log, environment(), 120) == 1
    assert f"rank 0 ended with exit code {SEEN}" in log.read_text()
    said = (tmp_path / "said").read_text()
    assert "rank 1 is behind the others" in said
    assert "hung_worker.py" in said and "(stall)" in said
    assert "rank 0" not in said


def test_ranks_at_one_place_are_nothing_to_tell() -> None:
    assert (
        behind(
            {0: RankProgress(4, 1, 100.0, "a.py:1"), 1: RankProgress(4, 1, 101.0, "b.py:2")}, 90.0
        )
        == ""
    )


def test_rank_without_a_word_is_dead_or_frozen() -> None:
    places = {0: RankProgress(4, 1, 100.0, ""), 1: RankProgress(4, 1, 10.0, "")}
    assert behind(places, 90.0) == "rank 1 has not reported since step 4: dead or frozen"


def test_many_ranks_are_counted() -> None:
    places = {rank: RankProgress(3, 0, 100.0, "") for rank in range(20)}
    places[20] = RankProgress(3, 1, 100.0, "")
    words = behind(places, 90.0)
    assert words.count("is behind") == 8
    assert words.endswith("and 12 more")
