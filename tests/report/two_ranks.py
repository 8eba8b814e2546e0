"""A real run of two ranks, in which a sample of rank 1 is to blame at step 5."""

from __future__ import annotations

from pathlib import Path

from distributed.launch import launch

WORKER = Path(__file__).parent / "story" / "ranks_worker.py"


def two_ranks(folder: Path) -> Path:
    """Train in two processes over gloo; both ranks write into the folder that is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    code, log = launch(WORKER, folder, [], 120)
    assert code == 0, log[-2000:]
    return folder / "run"
