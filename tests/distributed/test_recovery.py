"""Two real processes: one rank's damaged weights are everybody's rewind, and checkpoints are
everybody's.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.launch import launch
from scenes import difference
from stepguard.checkpoints import Store

WORKER = Path(__file__).with_name("recovery_worker.py")
BOTH = ["-".join(parts) for parts in product(["step", "watch"], ["ddp", "manual"])]
NAMES = [
    f"{kind}-{how}"
    for kind in ("rewound", "paced", "resumed", "refused", "automatic", "hopeless")
    for how in BOTH
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Every scenario, run by one pair of processes."""
    out = tmp_path_factory.mktemp("ranks")
    code, log = launch(WORKER, out, NAMES, 150)
    assert code == 0, log[-4000:]
    return {
        n: [torch.load(out / f"{n}.{rank}.pt", weights_only=False) for rank in (0, 1)]
        for n in NAMES
    }


@pytest.mark.parametrize("how", BOTH)
def test_ranks_rewind_together_and_end_with_the_same_weights(
    how: str, outcomes: dict[str, list[Any]]
) -> None:
    first, second = outcomes[f"rewound-{how}"]
    assert first["armed"] and second["armed"]
    assert first["told"] == second["told"] and [t[0] for t in first["told"]] == ["rewind"]
    assert difference(first["guarded"], second["guarded"]) == ""
    if how.startswith("step"):
        assert first["told"][0][2] == "repeat"
        assert difference(first["guarded"], first["never"]) == ""


@pytest.mark.parametrize("how", BOTH)
def test_ranks_with_different_clocks_share_snapshots_of_the_same_steps(
    how: str, outcomes: dict[str, list[Any]]
) -> None:
    first, second = outcomes[f"paced-{how}"]
    assert first["armed"] and second["armed"]
    assert first["told"] == second["told"]
    # the newest one on the grids of 8 and of 64 steps; the damage came at step 260
    assert first["told"] == [("rewind", 256)]
    assert difference(first["guarded"], second["guarded"]) == ""


@pytest.mark.parametrize("how", BOTH)
def test_resumed_ranks_end_where_ranks_that_never_stopped_end(
    how: str, outcomes: dict[str, list[Any]]
) -> None:
    first, second = outcomes[f"resumed-{how}"]
    assert first["armed"] and first["path"] == second["path"]
    for rank in (first, second):
        assert difference(rank["guarded"], rank["never"]) == ""


@pytest.mark.parametrize("how", ["step-manual", "watch-manual"])
def test_state_that_is_bad_on_one_rank_is_saved_by_none(
    how: str, outcomes: dict[str, list[Any]]
) -> None:
    assert [rank["saved"] for rank in outcomes[f"refused-{how}"]] == [None, None]


@pytest.mark.parametrize("how", ["step-ddp", "watch-ddp"])
def test_replica_that_is_bad_on_one_rank_is_not_the_one_that_is_saved(
    how: str, outcomes: dict[str, list[Any]]
) -> None:
    first, damaged = outcomes[f"refused-{how}"]
    assert damaged["saved"] is None
    opened = Store(first["saved"].parent).open()
    assert opened.step == 4 and opened.health.missing == "random numbers of rank 1"
    assert all(tensor.isfinite().all() for tensor in opened.tensors.values())


@pytest.mark.parametrize("how", BOTH)
def test_checkpoints_taken_by_themselves_hold_every_ranks_random_numbers(
    how: str, outcomes: dict[str, list[Any]]
) -> None:
    for rank in outcomes[f"automatic-{how}"]:
        assert rank["armed"] and rank["done"] in (7, 14)
        assert difference(rank["guarded"], rank["never"]) == ""


@pytest.mark.parametrize("how", BOTH)
def test_damage_that_comes_back_stops_all_ranks_together(
    how: str, outcomes: dict[str, list[Any]]
) -> None:
    first, second = outcomes[f"hopeless-{how}"]
    assert first["halted"] is not None and first["halted"] == second["halted"]
    assert 1 <= first["rewinds"] == second["rewinds"] <= 3
