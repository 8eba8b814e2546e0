"""Two real processes with weights of their own: each gets back what it had, or all are refused."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.launch import launch
from distributed.rank_state_worker import notes, rows
from scenes import difference
from stepguard.report.phrases import next_commands

WORKER = Path(__file__).with_name("rank_state_worker.py")
LOOPS = ["step", "watch"]
APART = ["-".join(p) for p in product(["expert", "stage"], LOOPS, ["asked", "scheduled"])]
NAMES = [
    *(f"saved-{how}" for how in (*APART, "replica-step-asked", "replica-watch-scheduled")),
    "nothing",
    "misfit",
    "data-written",
    "data-grown",
    *(f"origin-{trouble}-{loop}" for trouble in ("input", "transient") for loop in LOOPS),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Every scenario, run by one pair of processes."""
    out = tmp_path_factory.mktemp("ranks")
    rows(out / "of_one", 0, 1, [3], save=True)
    code, said = launch(WORKER, out, NAMES, 120)
    assert code == 0, said[-4000:]
    found: dict[str, list[Any]] = {}
    for name in NAMES:
        found[name] = [torch.load(out / f"{name}.{r}.pt", weights_only=False) for r in (0, 1)]
    found["data-shrunk"] = [rows(out / "of_two", 0, 1, [], save=False), notes(out / "of_two")]
    return found


@pytest.mark.parametrize("how", APART)
def test_every_rank_gets_its_own_weights_back(how: str, outcomes: dict[str, list[Any]]) -> None:
    for rank in outcomes[f"saved-{how}"]:
        assert rank["armed"] and rank["done"] == 4
        assert difference(rank["then"], rank["back"]) == ""
    first, second = outcomes[f"saved-{how}"]
    assert difference(first["back"], second["back"]) != ""
    told = [note for note in first["notes"] if "the ranks hold different values" in note]
    assert len(told) == 1 and "model/" in told[0]


@pytest.mark.parametrize("how", ["replica-step-asked", "replica-watch-scheduled"])
def test_checkpoint_of_replicas_holds_their_weights_once(
    how: str, outcomes: dict[str, list[Any]]
) -> None:
    first, second = outcomes[f"saved-{how}"]
    assert first["done"] == second["done"] == 4
    assert difference(first["then"], first["back"]) == ""
    assert not [name for name in first["names"] if name.startswith("rank/")]


def test_nothing_to_restore_is_the_documented_error_on_every_rank(
    outcomes: dict[str, list[Any]],
) -> None:
    first, second = outcomes["nothing"]
    assert first["armed"] and second["armed"]
    assert first["raised"] is not None and first["raised"] == second["raised"]


def test_state_that_fits_one_rank_only_is_loaded_by_none(outcomes: dict[str, list[Any]]) -> None:
    first, second = outcomes["misfit"]
    assert first["raised"] == f"rank 1: {second['raised']}"
    for rank in (first, second):
        assert difference(rank["before"], rank["after"]) == ""


def test_rank_without_a_place_in_the_data_goes_on_where_the_others_do(
    outcomes: dict[str, list[Any]],
) -> None:
    first, second = outcomes["data-grown"]
    assert first["seen"][0] == [12.0, 14.0] and second["seen"][0] == [13.0, 15.0]
    assert len(first["seen"]) == len(second["seen"]) == 3
    told = [note for note in first["notes"] if "places in the data for 1 ranks" in note]
    assert len(told) == 1 and "ranks 1 go on at batch 3 of pass 0" in told[0]


def test_fewer_ranks_than_places_in_the_data_are_told(outcomes: dict[str, list[Any]]) -> None:
    seen, said = outcomes["data-shrunk"]
    assert seen[0] == [6.0, 7.0]
    told = [note for note in said if "places in the data for 2 ranks, this run has 1" in note]
    assert len(told) == 1 and "some samples come twice" in told[0]


@pytest.mark.parametrize("loop", LOOPS)
def test_replay_is_offered_of_the_rank_to_blame(loop: str, outcomes: dict[str, list[Any]]) -> None:
    for rank in outcomes[f"origin-input-{loop}"]:
        (incident,) = rank["incidents"]
        assert rank["armed"] and incident.origin.rank == 1 and incident.reading.bad_ranks == (1,)
        if loop == "watch":
            continue  # no capsule: the guard does not run the step
        command = next_commands(incident)[0]
        assert command.startswith("stepguard replay ") and command.endswith("-rank1/capsule")
        assert Path(command.removeprefix("stepguard replay ")).is_dir()


@pytest.mark.parametrize("loop", LOOPS)
def test_fault_that_no_rank_shows_again_is_put_on_no_rank(
    loop: str, outcomes: dict[str, list[Any]]
) -> None:
    for rank in outcomes[f"origin-transient-{loop}"]:
        (incident,) = rank["incidents"]
        assert rank["armed"] and incident.origin.rank is None
        assert incident.reading.bad_ranks == ()
        assert any("the rank it came from is not known" in text for text in incident.origin.remarks)
    first, second = outcomes[f"origin-transient-{loop}"]
    assert difference(first["weights"], second["weights"]) == ""
