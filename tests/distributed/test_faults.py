"""Something of the guard's own fails on one of two ranks: it costs that, never the veto."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.launch import launch
from scenes import difference

WORKER = Path(__file__).with_name("fault_worker.py")
SPOTS = ["closer_look", "own_trouble", "foreign", "causes", "deciding", "recording"]
EXPLAINING = ["-".join(("explaining", *p)) for p in product(SPOTS, ["step"], ["ddp", "manual"])]
EXPLAINING += ["explaining-closer_look-watch-ddp", "explaining-deciding-watch-manual"]
RECORDING = [
    "-".join(("recording", *p)) for p in product(["full", "gone", "start"], ["step", "watch"])
]
BAD_STEP = 2
Outcomes = dict[str, list[Any]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    out = tmp_path_factory.mktemp("faults")
    names = [*EXPLAINING, *RECORDING]
    code, log = launch(WORKER, out, names, 150)
    files = {name: [out / f"{name}.{rank}.pt" for rank in (0, 1)] for name in names}
    ended = [name for name in names if all(file.exists() for file in files[name])]
    assert code == 0, f"ended {len(ended)} of {len(names)}, last {ended[-1:]}\n{log[-3000:]}"
    return {name: [torch.load(file, weights_only=False) for file in files[name]] for name in names}


def _parts(rank: dict[str, Any], which: str) -> dict[str, Any]:
    return {key: rank[which][key] for key in ("model", "optimizer")}


@pytest.mark.parametrize("name", [*EXPLAINING, *RECORDING])
def test_step_is_vetoed_and_the_guards_stay_armed(name: str, outcomes: Outcomes) -> None:
    for rank in outcomes[name]:
        assert rank["disarmed"] == []
        assert rank["guarded"]["armed"]
        assert difference(_parts(rank, "guarded"), _parts(rank, "reference")) == ""


@pytest.mark.parametrize("name", [*EXPLAINING, *RECORDING])
def test_ranks_tell_the_same(name: str, outcomes: Outcomes) -> None:
    first, second = [rank["guarded"]["incidents"] for rank in outcomes[name]]
    assert [(incident[0], incident[3]) for incident in first] == [(BAD_STEP, "skip")]
    assert second == first


@pytest.mark.parametrize("name", [name for name in EXPLAINING if "causes" not in name])
def test_rank_at_fault_is_still_named(name: str, outcomes: Outcomes) -> None:
    assert outcomes[name][0]["guarded"]["incidents"][0][2] == (1,)


@pytest.mark.parametrize("name", [name for name in RECORDING if "gone" not in name])
def test_what_could_not_be_written_is_said_by_that_rank(name: str, outcomes: Outcomes) -> None:
    first, second = outcomes[name]
    assert first["said"] == []
    assert any("cannot be written" in line for line in second["said"])
