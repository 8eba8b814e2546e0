"""Real ranks that drift apart without a NaN are told; what differs on purpose is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.launch import launch

WORKER = Path(__file__).with_name("compare_worker.py")
DRIFT = ["bitflip-step", "bitflip-watch", "rate-step", "rate-watch", "seeds-step", "seeds-watch"]
DATA = ["samedata-step", "samedata-watch", "samplers-step"]
KINDS = ["ddp", "zero", "batchnorm", "ownnorm", "apart", "manual", "fsdp2"]
HEALTHY = [f"healthy-{kind}-{loop}" for kind in KINDS for loop in ("step", "watch")]
HEALTHY.append("healthy-constant-step")
BARE = ["healthy-ddp-bare", "healthy-manual-bare", "healthy-fsdp2-bare"]
# a guard that only one rank builds shifts the numbers of those after it: last
NAMES = [*DRIFT, *DATA, *HEALTHY, *BARE, "alone"]
FOUR = ["bitflip-watch", "rate-step", "hsdp-step-flip", "hsdp-watch-none"]
Outcomes = dict[str, list[Any]]


def _run(out: Path, names: list[str], ranks: int) -> Outcomes:
    code, log = launch(WORKER, out, names, 150, ranks)
    files = {name: [out / f"{name}.{rank}.pt" for rank in range(ranks)] for name in names}
    ended = [name for name in names if all(file.exists() for file in files[name])]
    assert code == 0, f"ended {len(ended)} of {len(names)}, last {ended[-1:]}\n{log[-3000:]}"
    return {name: [torch.load(file) for file in files[name]] for name in names}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return _run(tmp_path_factory.mktemp("compare"), NAMES, 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return _run(tmp_path_factory.mktemp("four"), FOUR, 4)


@pytest.mark.parametrize("name", DRIFT)
def test_ranks_that_drift_apart_are_told_once(name: str, two: Outcomes) -> None:
    step = 0 if name.startswith("seeds") else 7
    for rank in two[name]:
        (told,) = rank["incidents"]
        assert (told["step"], told["kind"], told["codes"]) == (step, "replica_drift", ["SG704"])
        assert "param:0.weight" in told["summary"]
        assert "ranks 0, 1" in told["summary"]
        assert told["action"] == "note"
        assert rank["armed"]


@pytest.mark.parametrize("name", ["rate-step", "rate-watch"])
def test_the_learning_rate_of_each_rank_is_told(name: str, two: Outcomes) -> None:
    assert "rank 1: 0.005" in two[name][0]["incidents"][0]["summary"]


@pytest.mark.parametrize("name", DATA)
def test_ranks_that_read_the_same_data_are_told_once(name: str, two: Outcomes) -> None:
    for rank in two[name]:
        (told,) = rank["incidents"]
        assert (told["kind"], told["codes"]) == ("same_data", ["SG705"])
        assert rank["armed"]


@pytest.mark.parametrize("name", HEALTHY)
def test_what_differs_on_purpose_is_not_told(name: str, two: Outcomes) -> None:
    for rank in two[name]:
        assert rank["incidents"] == []
        assert rank["armed"]


@pytest.mark.parametrize("name", BARE)
def test_comparing_changes_no_bit(name: str, two: Outcomes) -> None:
    for loop in ("step", "watch"):
        for bare, compared in zip(two[name], two[name.replace("bare", loop)], strict=True):
            assert all(map(torch.equal, bare["weights"], compared["weights"]))


def test_rank_that_compares_alone_ends_that_and_goes_on(two: Outcomes) -> None:
    bare, guarded = two["alone"]
    assert guarded["armed"]
    assert guarded["incidents"] == []
    assert all(map(torch.equal, bare["weights"], guarded["weights"]))


@pytest.mark.parametrize("name", ["bitflip-watch", "rate-step"])
def test_the_minority_of_four_ranks_is_named(name: str, four: Outcomes) -> None:
    for rank in four[name]:
        (told,) = rank["incidents"]
        assert told["rank"] == 1
        assert "rank 1 holds other weights than ranks 0, 2, 3" in told["summary"]


def test_shards_are_compared_with_their_copies_only(four: Outcomes) -> None:
    for rank in four["hsdp-step-flip"]:
        (told,) = rank["incidents"]
        assert "ranks 1, 3" in told["summary"]
    for rank in four["hsdp-watch-none"]:
        assert rank["incidents"] == []
