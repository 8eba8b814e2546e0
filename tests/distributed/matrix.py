"""Wrappers and parallelisms beside what a guard does with them; a test declares its cell.

`scripts/write_matrix.py` collects the cells from the tests into docs/distributed.md.
"""

from __future__ import annotations

from typing import Literal

import pytest

COLUMNS = ("healthy", "NaN", "clip", "save", "restore", "rewind", "signal")
Outcome = Literal["works", "alone", "stops", "refused"]
MEANING = {
    "works": "as in a run of one process: see the columns",
    "alone": "each rank decides about its own steps; nobody waits",
    "stops": "the run stops, with the reason and nothing bad in the weights",
    "refused": "refused in one sentence when the guard is built",
}


def cell(wrapper: str, column: str, outcome: Outcome = "works") -> pytest.MarkDecorator:
    """Mark a test as the one that shows what happens there."""
    assert column in COLUMNS, column
    return pytest.mark.matrix(wrapper, column, outcome)


def refused(wrapper: str) -> list[pytest.MarkDecorator]:
    """Mark a test as the one that shows a whole row to be refused."""
    return [cell(wrapper, column, "refused") for column in COLUMNS]


ROWS = (
    "DDP",
    "DDP, static graph",
    "DDP, unused parameters",
    "DDP, accumulation under `no_sync`",
    "DDP, uneven inputs (`Join`)",
    "DDP, compiled",
    "DDP, guard on `ddp.module`",
    "DDP, bf16 hook",
    "DDP, fp16 hook",
    "DDP, PowerSGD hook",
    "post-local SGD (hook, `PostLocalSGDOptimizer`)",
    "`ZeroRedundancyOptimizer`",
    "FSDP1",
    "FSDP2",
    "HSDP",
    "tensor parallel",
    "FSDP2 and tensor parallel",
    "pipeline (GPipe, 1F1B), `watch` on each stage",
    "expert parallel",
    "torchft (`guard.step`)",
    "Ray Train (`TorchTrainer`)",
    "DeepSpeed",
    "Megatron",
)
"""In the order of the table. A row that no test declares a cell of is there all the same."""
