"""A damaged rank is healed by one that holds a copy, bit for bit, and by no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.launch import launch

WORKER = Path(__file__).with_name("heal_worker.py")
TWO = [
    *("ddp-step-weight", "ddp-watch-weight", "ddp-step-slot", "ddp-watch-slot"),
    *("zero-step-weight", "zero-watch-weight", "manual-step-weight", "batchnorm-step-weight"),
]
FOUR = ["hsdp-step-weight", "hsdp-watch-slot", "ddp-step-weight"]
APART = "apart-step-weight"
MINORITY = ["ddp-step-flip", "ddp-watch-flip"]
Outcomes = dict[str, list[tuple[Any, Any]]]


def _run(out: Path, names: list[str], ranks: int) -> Outcomes:
    code, log = launch(WORKER, out, names, 150, ranks)
    assert code == 0, log[-3000:]
    found: Outcomes = {}
    for name in names:
        found[name] = []
        for rank in range(ranks):
            guarded = torch.load(out / f"{name}.guarded.{rank}.pt")
            never = torch.load(out / f"{name}.never.{rank}.pt")
            found[name].append((guarded, never))
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return _run(tmp_path_factory.mktemp("two"), [*TWO, APART], 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return _run(tmp_path_factory.mktemp("four"), [*FOUR, *MINORITY], 4)


def _healed(ranks: list[tuple[Any, Any]], by: int) -> None:
    for guarded, never in ranks:
        assert [told[1:] for told in guarded["told"]] == [("nonfinite_parameter", "heal")]
        assert guarded["reasons"] == [f"by rank {by}, which held a copy"]
        assert guarded["armed"]
        assert all(map(torch.equal, guarded["weights"], never["weights"]))


@pytest.mark.parametrize("name", TWO)
def test_healed_run_ends_as_one_that_was_never_damaged(name: str, two: Outcomes) -> None:
    _healed(two[name], by=0)


@pytest.mark.parametrize("name", FOUR)
def test_copy_of_the_same_shard_heals(name: str, four: Outcomes) -> None:
    _healed(four[name], by=3 if name.startswith("hsdp") else 0)


def test_ranks_that_train_apart_do_not_heal_each_other(two: Outcomes) -> None:
    for guarded, never in two[APART]:
        assert [told[2] for told in guarded["told"]] == ["rewind"]
        assert all(map(torch.equal, guarded["weights"], never["weights"]))


@pytest.mark.parametrize("name", MINORITY)
def test_drifted_minority_gets_the_weights_of_the_majority(name: str, four: Outcomes) -> None:
    first, _ = four[name][0]
    for guarded, _ in four[name]:
        assert guarded["told"] == [(7, "replica_drift", "heal")]
        assert all(map(torch.equal, guarded["weights"], first["weights"]))
