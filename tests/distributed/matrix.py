"""Wrappers and parallelisms beside what a guard does with them; a test declares its cell.

`scripts/write_matrix.py` collects the cells from the tests into docs/distributed.md.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

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


class Declared(NamedTuple):
    """Cells of tests whose cases are names: the one with `part` in its name shows the cell."""

    test: str
    part: str
    wrapper: str
    column: str
    outcome: Outcome


TWO_RANKS = {"fsdp1": "FSDP1", "fsdp2": "FSDP2", "tp": "tensor parallel"}
MESHES = {"hsdp": "HSDP", "both": "FSDP2 and tensor parallel"}
ENGINES = {**TWO_RANKS, "hsdp": "HSDP", "2d": "FSDP2 and tensor parallel"}
"""How cases are named in test_sharded.py, test_sharded_meshes.py, test_shard_checkpoints.py."""
HEALTHY = "test_healthy_ranks_are_the_same_as_bare_ones_also_where_the_guard_clips"
TROUBLED = "test_trouble_of_one_rank_is_vetoed_on_all_and_poisons_none"
DAMAGED = "test_bad_shard_of_one_rank_is_named_with_its_rank_and_all_go_back"
MESH_HEALTHY = "test_healthy_ranks_of_a_mesh_are_the_same_as_bare_ones_also_where_the_guard_clips"
MESH_TROUBLED = "test_trouble_of_some_ranks_of_a_mesh_is_vetoed_on_all"
MESH_DAMAGED = "test_bad_shard_of_a_mesh_is_named_with_its_rank_and_all_recover"
SAVED = "test_every_rank_writes_its_shards_and_the_checkpoint_verifies_without_a_group"
RESHARDED = "test_four_ranks_two_and_four_again_hold_the_same"
RESUMED = "test_resumed_run_of_shards_is_the_one_that_never_stopped"
SIGNALLED = "test_signal_to_one_rank_saves_the_same_step_of_all_shards"


def declared() -> list[Declared]:
    """Cells of the tests of sharded models."""
    found: list[Declared] = []
    for part, wrapper in TWO_RANKS.items():
        found.append(Declared(HEALTHY, f"-{part}-unclipped", wrapper, "healthy", "works"))
        found.append(Declared(HEALTHY, f"-{part}-clip", wrapper, "clip", "works"))
        found.append(Declared(TROUBLED, f"-{part}-", wrapper, "NaN", "works"))
        found.append(Declared(DAMAGED, f"-{part}-", wrapper, "rewind", "works"))
    for part, wrapper in MESHES.items():
        found.append(Declared(MESH_HEALTHY, f"-{part}-clip", wrapper, "healthy", "works"))
        found.append(Declared(MESH_HEALTHY, f"-{part}-clip", wrapper, "clip", "works"))
        found.append(Declared(MESH_TROUBLED, f"-{part}-", wrapper, "NaN", "works"))
        found.append(Declared(MESH_DAMAGED, f"-{part}-", wrapper, "rewind", "works"))
    for part, wrapper in ENGINES.items():
        found.append(Declared(SAVED, f"[{part}]", wrapper, "save", "works"))
        found.append(Declared(SIGNALLED, f"[{part}]", wrapper, "signal", "works"))
        # flat parameters are restored by as many ranks as wrote them
        restored = RESUMED if part == "fsdp1" else RESHARDED
        found.append(Declared(restored, f"[{part}]", wrapper, "restore", "works"))
    return found
