"""The recovery and snapshot benchmarks run in small, and their parts do what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import recovery, snapshot


def test_small_recovery_brings_the_run_back_where_the_others_do_not(tmp_path: Path) -> None:
    path = tmp_path / "recovery.json"
    assert recovery.main(["--quick", "--output", str(path)]) == 0
    found = json.loads(path.read_text(encoding="utf-8"))
    (never,) = found["never_failed"]
    jump = {
        name: rows[0]["accuracy"] for name, rows in found["failures"]["lr x100 (resume)"].items()
    }
    assert never["accuracy"] > 0.7
    assert jump["stepguard"] > never["accuracy"] - 0.15
    assert max(jump["do nothing"], jump["skip only"], jump["newest finite"]) < 0.3


@pytest.mark.parametrize("name", recovery.HARMS)
def test_every_failure_changes_the_state(name: str) -> None:
    run = recovery.begin(0, 20)
    recovery.do_nothing(run, None)
    before = [t.clone() for t in [*run.model.parameters(), *run.model.buffers()]]
    before += [state["exp_avg_sq"].clone() for state in run.optimizer.state.values()]
    rates = [group["lr"] for group in run.optimizer.param_groups]
    recovery.HARMS[name](run)
    after = [*run.model.parameters(), *run.model.buffers()]
    after += [state["exp_avg_sq"] for state in run.optimizer.state.values()]
    same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not same or rates != [group["lr"] for group in run.optimizer.param_groups]


def test_small_snapshot_measurement_says_what_it_promises(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.json"
    assert snapshot.main(["--quick", "--output", str(path)]) == 0
    found = json.loads(path.read_text(encoding="utf-8"))
    (row,) = found["sizes"].values()
    assert row["stall_seconds"] > 0 and row["bytes"] > 3 * 4 * row["parameters"]
    assert all(cost["share"] <= found["promise"] for cost in row["amortised"].values())
