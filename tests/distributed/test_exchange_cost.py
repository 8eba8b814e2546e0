"""What ranks exchange grows neither with them nor with the model, in healthy steps and bad ones."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import forked
from distributed.launch import PATHS

WORKER = Path(__file__).with_name("exchange_worker.py")
ROOT = Path(__file__).parents[2]
BAD_STEP = 2
MOST_BYTES = 4096
Counts = dict[str, list[list[int]]]


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Counts:
    """Collectives and bytes of each step of one rank, by wrapper, layers and ranks."""
    out = tmp_path_factory.mktemp("exchanges")
    paths = os.pathsep.join([*PATHS, str(ROOT)])
    known = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    ran = forked.python([str(WORKER), str(out), "2", "4"], variables=known, seconds=200)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: Counts = {}
    for name, ends in json.loads((out / "found.json").read_text()).items():
        assert [how for how, _ in ends] == ["ok"] * len(ends), ends
        of_ranks = [steps for _, steps in ends]
        assert all(steps == of_ranks[0] for steps in of_ranks)
        found[name] = of_ranks[0]
    return found


def test_healthy_step_of_ddp_adds_nothing_and_others_one_small_reduction(counts: Counts) -> None:
    for name, steps in counts.items():
        healthy = [step for number, step in enumerate(steps) if number != BAD_STEP]
        assert healthy == [[0, 0] if name.startswith("ddp") else [1, 32]] * 3


def test_bad_step_costs_the_same_with_more_ranks(counts: Counts) -> None:
    for wrap in ("manual", "ddp"):
        for layers in (2, 60):
            pair, four = (counts[f"{wrap}-{layers}-{ranks}"][BAD_STEP] for ranks in (2, 4))
            assert pair == four


def test_bad_step_costs_no_more_with_more_parameters(counts: Counts) -> None:
    for name, steps in counts.items():
        calls, size = steps[BAD_STEP]
        assert calls == (6 if name.startswith("ddp") else 7)
        assert size < MOST_BYTES
