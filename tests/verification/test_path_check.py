"""Any path: what is planned, and what becomes of several checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import stepguard
from verification import saved


def test_progress_reaches_every_byte_of_the_plan(
    tmp_path: Path, everything: dict[str, Any]
) -> None:
    saved.save_trainer(tmp_path / "checkpoint-20", everything)
    saved.save_zip(tmp_path / "last.ckpt", everything)
    planned: list[int] = []
    done: list[int] = []
    stepguard.verify(tmp_path, plan=lambda count, size: planned.append(size), progress=done.append)
    assert sum(done) == sum(planned) > 0
