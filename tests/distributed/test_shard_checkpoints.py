"""Real ranks that each write their shards: sealed by all or none, restored by any number.

Four ranks write, two restore and write, four restore again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import stepguard
from distributed.launch import launch
from distributed.shard_checkpoint_worker import STEPS, STOP_AT
from scenes import difference
from stepguard.checkpoints import Store

WORKER = Path(__file__).with_name("shard_checkpoint_worker.py")
MESHES = ["fsdp2", "hsdp", "tp", "2d"]
"""Engines whose shards can be divided anew."""
ENGINES = [*MESHES, "fsdp1"]
OF_FOUR = [
    *(f"written-{engine}" for engine in ENGINES),
    *(f"resumed-{engine}" for engine in ("fsdp2", "hsdp", "fsdp1")),
    *(f"signalled-{engine}" for engine in ENGINES),
    *(f"{name}-fsdp2" for name in ("scheduled", "poisoned", "full_disk", "damaged", "nothing")),
]
OF_TWO = [f"resharded-{engine}" for engine in ENGINES]
AGAIN = [f"back-{engine}" for engine in MESHES]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Every scenario; by name, what each rank has of it."""
    out = tmp_path_factory.mktemp("shards")
    found: dict[str, list[Any]] = {}
    for ranks, names in ((4, OF_FOUR), (2, OF_TWO), (4, AGAIN)):
        code, said = launch(WORKER, out, names, 150, ranks)
        assert code == 0, said[-4000:]
        for name in names:
            found[name] = [
                torch.load(out / f"{name}.{rank}.pt", weights_only=False) for rank in range(ranks)
            ]
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_every_rank_writes_its_shards_and_the_checkpoint_verifies_without_a_group(
    engine: str, outcomes: dict[str, list[Any]]
) -> None:
    ranks = outcomes[f"written-{engine}"]
    path = ranks[0]["path"]
    assert path is not None and {rank["path"] for rank in ranks} == {path}
    found = stepguard.verify(path)
    assert found.ok and not found.problems, found.problems
    assert len(list(path.glob("rank-*.safetensors"))) == 4


@pytest.mark.parametrize("engine", MESHES)
def test_one_process_opens_whole_tensors(engine: str, outcomes: dict[str, list[Any]]) -> None:
    first = outcomes[f"written-{engine}"][0]
    opened = Store(first["path"].parent).open().tensors
    for name, tensor in first["whole"]["model"].items():
        assert torch.equal(opened[f"model/{name}"], tensor)
    for name, slots in first["whole"]["optimizer"].items():
        assert torch.equal(opened[f"optimizer/{name}/exp_avg"], slots["exp_avg"])


@pytest.mark.parametrize("engine", MESHES)
def test_four_ranks_two_and_four_again_hold_the_same(
    engine: str, outcomes: dict[str, list[Any]]
) -> None:
    before = outcomes[f"written-{engine}"][0]["whole"]
    for rank in outcomes[f"resharded-{engine}"]:
        assert rank["done"] == STOP_AT and rank["path"] is not None
        assert difference(rank["whole"], before) == ""
    for rank in outcomes[f"back-{engine}"]:
        assert rank["done"] == STOP_AT and rank["armed"]


def test_flat_parameters_of_fsdp1_are_refused_with_another_number_of_ranks(
    outcomes: dict[str, list[Any]],
) -> None:
    said = {rank["refused"] for rank in outcomes["resharded-fsdp1"]}
    assert len(said) == 1 and "restore it with 4" in said.pop()


@pytest.mark.parametrize("engine", ["fsdp2", "hsdp", "fsdp1"])
def test_resumed_run_of_shards_is_the_one_that_never_stopped(
    engine: str, outcomes: dict[str, list[Any]]
) -> None:
    for rank in outcomes[f"resumed-{engine}"]:
        assert rank["done"] == STOP_AT
        assert difference(rank["resumed"], rank["never"]) == ""


@pytest.mark.parametrize("engine", ENGINES)
def test_signal_to_one_rank_saves_the_same_step_of_all_shards(
    engine: str, outcomes: dict[str, list[Any]]
) -> None:
    ranks = outcomes[f"signalled-{engine}"]
    assert [rank["code"] for rank in ranks] == [143] * 4
    (entry,) = Store(ranks[0]["folder"] / "checkpoints").list()
    assert {rank["steps"] for rank in ranks} == {entry.step}
    assert stepguard.verify(entry.path).ok


def test_checkpoints_on_schedule_are_written_by_all_ranks_in_the_background(
    outcomes: dict[str, list[Any]],
) -> None:
    for rank in outcomes["scheduled-fsdp2"]:
        assert rank["armed"] and rank["done"] in (2, 4, 6) and rank["done"] < STEPS
        assert difference(rank["again"], rank["once"]) == ""


def test_nan_in_one_shard_is_refused_by_all_with_parameter_and_rank(
    outcomes: dict[str, list[Any]],
) -> None:
    for rank in outcomes["poisoned-fsdp2"]:
        assert rank["path"] is None and rank["armed"]
    told = [note for note in outcomes["poisoned-fsdp2"][0]["notes"] if "NOT saved" in note]
    assert len(told) == 1 and "rank 1: param:0.weight is not finite" in told[0]


def test_rank_that_cannot_write_leaves_nothing_sealed(outcomes: dict[str, list[Any]]) -> None:
    for rank in outcomes["full_disk-fsdp2"]:
        assert rank["before"] is not None and rank["path"] is None
        assert rank["names"] == [".writer.lock", "last-good", "step-3"]
    told = [note for note in outcomes["full_disk-fsdp2"][0]["notes"] if "NOT saved" in note]
    assert len(told) == 1 and "rank 1" in told[0] and "No space left" in told[0]


def test_damage_in_one_ranks_shard_makes_all_take_the_checkpoint_before(
    outcomes: dict[str, list[Any]],
) -> None:
    for rank in outcomes["damaged-fsdp2"]:
        assert rank["done"] == 3
    told = [note for note in outcomes["damaged-fsdp2"][0]["notes"] if "passed over" in note]
    assert len(told) == 1 and "rank 1" in told[0] and "step-5" in told[0]


def test_nothing_to_restore_is_the_documented_error(outcomes: dict[str, list[Any]]) -> None:
    said = {rank["raised"] for rank in outcomes["nothing-fsdp2"]}
    assert len(said) == 1 and None not in said
