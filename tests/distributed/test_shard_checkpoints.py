"""Real ranks that each write their shards: sealed by all or none, restored by any number."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import stepguard
from distributed.launch import Case, of_all, on_ranks, run_cases
from distributed.matrix import cell
from distributed.runs import local, state_of
from scenes import difference
from settings_of import config_of
from stepguard import Guard
from stepguard._errors import StoreError
from stepguard.checkpoints import Store
from stepguard.journal import read_run

KEEPS_GROUP = True
FEATURES, WIDTH = 6, 7
"""Seven rows are not the same number on every rank."""
STEPS, STOP_AT = 8, 5
WRAPPERS = {
    "fsdp2": "FSDP2",
    "hsdp": "HSDP",
    "tp": "tensor parallel",
    "2d": "FSDP2 and tensor parallel",
    "fsdp1": "FSDP1",
}


def engines(column: str, *names: str) -> pytest.MarkDecorator:
    """These or all engines; each shows its cell of the table."""
    shown = [
        pytest.param(name, marks=cell(WRAPPERS[name], column), id=name)
        for name in names or WRAPPERS
    ]
    return pytest.mark.parametrize("engine", shown)


def build(engine: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    width = 8 if engine in ("tp", "2d") else WIDTH
    layers = nn.Linear(FEATURES, width), nn.BatchNorm1d(width), nn.Dropout(0.2)
    model: nn.Module = nn.Sequential(*layers, nn.Linear(width, 3))
    size = dist.get_world_size()
    if engine == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    elif engine == "fsdp2":
        shard(model, init_device_mesh("cpu", (size,)))
    elif engine == "hsdp":
        names = ("copies", "shards")
        shard(model, init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=names))
    elif engine == "tp":
        divide(model, init_device_mesh("cpu", (size,)))
    elif engine == "2d":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "model"))
        divide(model, mesh["model"])
        shard(model, mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    torch.manual_seed(dist.get_rank() + 7)
    return model, optimizer


def shard(model: nn.Module, mesh: Any) -> None:
    fully_shard(model[0], mesh=mesh)  # type: ignore[index]
    fully_shard(model, mesh=mesh)


def divide(model: nn.Module, mesh: Any) -> None:
    # the norm layer in between sees the features of one rank only
    model[1] = nn.Identity()  # type: ignore[operator]
    model[2] = nn.Identity()  # type: ignore[operator]
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "3": RowwiseParallel()})


def batch(engine: str, step: int) -> Tensor:
    # ranks that divide a layer compute one batch
    rank = 0 if engine in ("tp", "2d") else dist.get_rank()
    return torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(100 * step + rank))


def train(guard: Guard, engine: str, steps: range) -> None:
    for step in steps:
        guard.step(lambda x: guard.model(x).square().mean(), batch(engine, step))


def guarded(engine: str, folder: Path, **settings: Any) -> Guard:
    model, optimizer = build(engine)
    usual = {"terminal": "quiet", "snapshot_every": 2, "probation": 2, "agree_timeout": 20.0}
    config = config_of(**{**usual, **settings}, run_dir=folder)
    return Guard(model, optimizer, config=config)


def whole(tensor: Any) -> Any:
    return local(tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor)


def state(guard: Guard, part: Callable[[Any], Any] = local) -> dict[str, Any]:
    """What this rank holds of it all."""
    return state_of(guard.model, guard.optimizer, part)


def trained_state(guard: Guard) -> dict[str, Any]:
    """Weights and slots, whole; the statistics of a norm layer are each rank's own."""
    buffers = {f"model.{name}" for name, _ in guard.model.named_buffers()}
    return {name: value for name, value in state(guard, whole).items() if name not in buffers}


def told(guard: Guard, words: str) -> list[str]:
    """What this rank was told with these words."""
    journal = guard._context.outputs.journal
    assert journal is not None
    said = [str(note.get("summary", "")) for note in read_run(journal.path.parent).notes]
    return [note for note in said if words in note]


def told_once(guard: Guard, words: str) -> str:
    (first,) = of_all(told(guard, words))[0]
    return str(first)


# --- written by four ranks, restored and written by two, restored by four


def written(engine: str, run: str) -> dict[str, Any]:
    with guarded(engine, Path(run)) as guard:
        train(guard, engine, range(STOP_AT))
        path = guard.save()
        assert path is not None and of_all(path) == [path] * dist.get_world_size()
        return {"path": path, "whole": trained_state(guard)}


def rewritten(engine: str, source: str, run: str) -> dict[str, Any]:
    with guarded(engine, Path(source)) as guard:
        if engine == "fsdp1":
            with pytest.raises(StoreError, match="restore it with 4"):
                guard.restore()
            return {}
        assert guard.restore() == STOP_AT
    with guarded(engine, Path(run)) as second:
        second.restore(Path(source) / "checkpoints" / f"step-{STOP_AT}")
        assert second.save() is not None
        return {"whole": trained_state(second)}


def goes_on(engine: str, run: str) -> dict[str, Any]:
    with guarded(engine, Path(run)) as guard:
        assert guard.restore() == STOP_AT
        found = trained_state(guard)
        train(guard, engine, range(STOP_AT, STEPS))
        assert guard.armed
        return {"whole": found}


@pytest.fixture(scope="module")
def moves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[Any]]]:
    """By engine, what four, two and four ranks had, each by rank."""
    out = tmp_path_factory.mktemp("shards")
    found: dict[str, list[list[Any]]] = {engine: [] for engine in WRAPPERS}
    for number, (ranks, function) in enumerate(((4, written), (2, rewritten), (4, goes_on))):
        (out / str(number)).mkdir()
        cases = []
        for engine in WRAPPERS if number < 2 else [name for name in WRAPPERS if name != "fsdp1"]:
            four, two = f"{out}/of4-{engine}", f"{out}/of2-{engine}"
            folders = [{"run": four}, {"source": four, "run": two}, {"run": two}]
            values = {"engine": engine, **folders[number]}
            cases.append(Case(engine, function.__name__, values))
        module = "distributed.test_shard_checkpoints"
        ends, said = run_cases(module, cases, ranks, out / str(number))
        for case, by_rank in zip(cases, ends, strict=True):
            assert not any(why for why, _ in by_rank), (case, by_rank, said[-2000:])
            found[case.name].append([held for _, held in by_rank])
    return found


@engines("save")
def test_every_rank_writes_its_shards_and_the_checkpoint_verifies_without_a_group(
    engine: str, moves: dict[str, list[list[Any]]]
) -> None:
    first = moves[engine][0][0]
    found = stepguard.verify(first["path"])
    assert found.ok and not found.problems, found.problems
    assert len(list(first["path"].glob("rank-*.safetensors"))) == 4
    if engine != "fsdp1":
        # one process opens whole tensors
        opened = Store(first["path"].parent).open().tensors
        for name, tensor in first["whole"].items():
            kind, _, parameter = name.partition(".")
            if kind in ("model", "exp_avg"):
                of_model = kind == "model"
                kept = f"model/{parameter}" if of_model else f"optimizer/{parameter}/exp_avg"
                assert torch.equal(opened[kept], tensor)


@engines("restore", "fsdp2", "hsdp", "tp", "2d")
def test_four_ranks_two_and_four_again_hold_the_same(
    engine: str, moves: dict[str, list[list[Any]]]
) -> None:
    four, two, again = moves[engine]
    for rank in (*two, *again):
        assert difference(rank["whole"], four[0]["whole"]) == ""


def test_flat_parameters_of_fsdp1_are_refused_with_another_number_of_ranks(
    moves: dict[str, list[list[Any]]],
) -> None:
    assert moves["fsdp1"][1] == [{}, {}]


# --- one number of ranks


@on_ranks(4)
@engines("restore", "fsdp2", "hsdp", "fsdp1")
def test_resumed_run_of_shards_is_the_one_that_never_stopped(engine: str, folder: Path) -> None:
    with guarded(engine, folder / "run") as first:
        train(first, engine, range(STOP_AT))
        first.save()
    torch.manual_seed(99)
    with guarded(engine, folder / "run") as second:
        assert second.restore() == STOP_AT
        train(second, engine, range(STOP_AT, STEPS))
    with guarded(engine, folder / "never") as never:
        train(never, engine, range(STEPS))
    assert difference(state(second), state(never)) == ""


@on_ranks(4)
@engines("signal")
def test_signal_to_one_rank_saves_the_same_step_of_all_shards(engine: str, folder: Path) -> None:
    with guarded(engine, folder) as guard:
        train(guard, engine, range(3))
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit, match="143"):
            train(guard, engine, range(3, 1000))
    assert len(set(of_all(guard.steps))) == 1
    (entry,) = Store(folder / "checkpoints").list()
    assert guard.steps == entry.step and stepguard.verify(entry.path).ok


@on_ranks(4)
def test_checkpoints_on_schedule_are_written_by_all_ranks_in_the_background(folder: Path) -> None:
    with guarded("fsdp2", folder, checkpoint_every=2) as guard:
        train(guard, "fsdp2", range(STEPS))
        assert guard.armed
    dist.barrier()
    with guarded("fsdp2", folder) as second:
        done = second.restore()
        assert done in (2, 4, 6)
        train(second, "fsdp2", range(done, STEPS))
    assert difference(state(second), state(guard)) == ""


@on_ranks(4)
def test_nan_in_one_shard_is_refused_by_all_with_parameter_and_rank(folder: Path) -> None:
    with guarded("fsdp2", folder) as guard:
        train(guard, "fsdp2", range(3))
        first: Any = next(iter(guard.model.parameters())).detach()
        if dist.get_rank() == 1:
            first.to_local().view(-1)[0] = torch.nan
        assert guard.save() is None and guard.armed
        first.to_local().nan_to_num_()
        said = told_once(guard, "NOT saved")
    assert "rank 1: param:0.weight is not finite" in said


@on_ranks(4)
def test_rank_that_cannot_write_leaves_nothing_sealed(folder: Path) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with guarded("fsdp2", folder) as guard:
        train(guard, "fsdp2", range(3))
        assert guard.save() is not None
        archive: Any = guard._saving._archive
        if dist.get_rank() == 1:
            archive.store._disk = type(archive.store._disk)()
            archive.store._disk.new_file = refuse
        train(guard, "fsdp2", range(3, 4))
        assert guard.save() is None
        said = told_once(guard, "NOT saved")
    assert "rank 1" in said and "No space left" in said
    names = sorted(entry.name for entry in (folder / "checkpoints").iterdir())
    assert names == [".writer.lock", "last-good", "step-3"]


@on_ranks(4)
def test_damage_in_one_ranks_shard_makes_all_take_the_checkpoint_before(folder: Path) -> None:
    with guarded("fsdp2", folder) as guard:
        train(guard, "fsdp2", range(3))
        guard.save()
        train(guard, "fsdp2", range(3, STOP_AT))
        newest = guard.save()
    assert newest is not None
    if dist.get_rank() == 0:
        file = newest / "rank-00001-00000.safetensors"
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(content)
    dist.barrier()
    with guarded("fsdp2", folder) as second:
        assert second.restore() == 3
        said = told_once(second, "is skipped")
    assert "rank 1" in said and "step-5" in said


@on_ranks(4)
def test_nothing_to_restore_is_the_documented_error(folder: Path) -> None:
    with guarded("fsdp2", folder) as guard, pytest.raises(StoreError) as why:
        guard.restore()
    assert len(set(of_all(str(why.value)))) == 1
