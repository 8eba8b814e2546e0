"""Two real processes: every rank has its own ledger, and both pass over the same batches after a
restart.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distributed.launch import launch

WORKER = Path(__file__).with_name("ledger_worker.py")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("ranks")
    code, log = launch(WORKER, out, [], 120)
    assert code == 0, log[-4000:]
    return [json.loads((out / f"told.{rank}.json").read_text()) for rank in (0, 1)]


def test_row_of_the_guilty_rank_is_known_on_both(told: list[dict[str, Any]]) -> None:
    assert (
        told[0]["first"]["incidents"]
        == told[1]["first"]["incidents"]
        == [["row 17", "row 19"], ["row 25"]]
    )


def test_each_rank_writes_what_it_lost_and_only_one_is_to_blame(told: list[dict[str, Any]]) -> None:
    assert told[0]["entries"] == [
        [2, [16, 18, 20, 22], True, "step"],
        [3, [24, 26, 28, 30], True, "step"],
    ]
    assert told[1]["entries"] == [[2, [17, 19], False, "step"], [3, [25], False, "step"]]


def test_both_ranks_pass_over_the_same_batches_after_a_restart(told: list[dict[str, Any]]) -> None:
    for rank in (0, 1):
        assert told[rank]["second"]["armed"] and told[rank]["second"]["incidents"] == []
        starts = [rows[0] for rows in told[rank]["second"]["seen"]]
        assert starts == [8 + rank, *(start + rank for start in (32, 40, 48, 56))]
        assert told[rank]["said"] == ["skipping batches 2-3 of pass 0: dropped before as SG101"]
