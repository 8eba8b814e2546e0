"""Lightning's DDP strategy and Fabric on two gloo ranks: healthy runs are untouched, bad steps
decided together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.launch import launch
from integrations.lightning_scenes import BAD, STEPS, bad_tensors, last, learned
from scenes import difference

WORKER = Path(__file__).with_name("lightning_worker.py")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every scenario, run by one pair of processes."""
    folder = tmp_path_factory.mktemp("lightning")
    code, said = launch(WORKER, folder, [], 150, imports=("lightning",))
    assert code == 0, said[-4000:]
    return folder


@pytest.fixture(scope="module")
def found(out: Path) -> list[dict[str, Any]]:
    return [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("bare", "guarded"),
    [
        ("bare", "healthy"),
        ("bare accumulated", "healthy accumulated"),
        ("fabric bare", "fabric healthy"),
    ],
)
def test_a_healthy_run_is_bit_identical_on_both_ranks(
    found: list[dict[str, Any]], bare: str, guarded: str
) -> None:
    for rank in found:
        assert not difference(rank[bare]["state"], rank[guarded]["state"])
        assert rank[guarded]["incidents"] == []


def test_unguarded_one_rank_s_batch_ruins_the_last_checkpoint(
    out: Path, found: list[dict[str, Any]]
) -> None:
    assert all(bad_tensors(rank["damaged"]["state"]["module"]) for rank in found)
    assert bad_tensors(last(out / "damaged")["state_dict"])


@pytest.mark.parametrize(
    ("name", "step"),
    [("bad", BAD), ("bad fused", BAD), ("bad accumulated", BAD // 2), ("fabric bad", BAD)],
)
def test_both_ranks_skip_the_step_and_name_rank_1_and_its_sample(
    found: list[dict[str, Any]], name: str, step: int
) -> None:
    for rank in found:
        assert rank[name]["incidents"] == [(step, (1,), 1, "batch:x", (2,), True)]
        assert not bad_tensors(rank[name]["state"])
    assert not difference(_learned(found[0][name]), _learned(found[1][name]))


def _learned(outcome: dict[str, Any]) -> dict[str, Any]:
    """What ranks share: BatchNorm's statistics are each rank's own."""
    state = outcome["state"].get("module") or outcome["state"]["model"]
    return {key: value for key, value in state.items() if "running" not in key}


@pytest.mark.parametrize(
    ("folder", "steps"), [("bad", STEPS), ("fused", STEPS), ("bad2", STEPS // 2)]
)
def test_the_last_checkpoint_is_good_and_the_schedule_held(
    out: Path, folder: str, steps: int
) -> None:
    state = last(out / folder)
    assert not bad_tensors(learned(state))
    assert (state["global_step"], state["lr_schedulers"][0]["last_epoch"]) == (steps, steps - 1)
