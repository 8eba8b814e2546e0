"""torchrun starts the ranks again: after a kill bit for bit as if never killed, after a stop of the
policy past the batches that led to it.
"""

from __future__ import annotations

from pathlib import Path

import torch

from distributed.elastic_worker import STEPS
from distributed.launch import launch
from scenes import difference

WORKER = Path(__file__).with_name("elastic_worker.py")
RESTARTS = ["--max-restarts", "3"]


def test_killed_rank_of_shards_is_restored_bit_for_bit(tmp_path: Path) -> None:
    code, said = launch(WORKER, tmp_path, ["kill"], 120, options=RESTARTS)
    assert code == 0, said[-4000:]
    for rank in (0, 1):
        ended = torch.load(tmp_path / f"kill.{rank}.pt", weights_only=False)
        never = torch.load(tmp_path / f"never.{rank}.pt", weights_only=False)
        assert ended["done"] in (2, 4, 6) and never["done"] == 0
        assert difference(ended["model"], never["model"]) == ""


def test_stop_of_the_policy_is_not_repeated_at_the_same_batches(tmp_path: Path) -> None:
    code, said = launch(WORKER, tmp_path, ["halt"], 120, options=RESTARTS)
    assert code == 0, said[-4000:]
    # one stop, and one start that goes past it: the third one is not needed
    assert (tmp_path / "halt.1.0").exists() and not (tmp_path / "halt.2.0").exists()
    assert "training halted at step 7" in said and "(exitcode: 3)" in said
    first, second = [torch.load(tmp_path / f"halt.{r}.pt", weights_only=False) for r in (0, 1)]
    assert difference(first["model"], second["model"]) == "" and first["done"] < STEPS
