"""Ranks that save and restore shards, with another number of ranks as well; a file of it a rank.

torchrun --standalone --nproc-per-node 4 shard_checkpoint_worker.py OUT scenario-engine ...
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from settings_of import config_of
from stepguard import Guard
from stepguard._errors import StoreError
from stepguard.journal import read_run

FEATURES, WIDTH = 6, 7
"""Seven rows are not the same number on every rank."""
STEPS, STOP_AT = 8, 5
SETTINGS: dict[str, Any] = {
    "terminal": "quiet",
    "snapshot_every": 2,
    "probation": 2,
    "agree_timeout": 20.0,
}


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
    config = config_of(**{**SETTINGS, **settings}, run_dir=folder)
    return Guard(model, optimizer, config=config)


def local(tensor: Any) -> Any:
    if not isinstance(tensor, Tensor):
        return tensor
    part = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]
    return part.detach().clone()


def whole(tensor: Any) -> Any:
    if hasattr(tensor, "full_tensor"):
        return tensor.full_tensor().detach().clone()
    return local(tensor)


def state(guard: Guard, part: Callable[[Any], Any] = local) -> dict[str, Any]:
    """What this rank holds of it all, or all of it."""
    slots = {}
    for name, parameter in guard.model.named_parameters():
        held = guard.optimizer.state.get(parameter, {})
        slots[name] = {key: part(value) for key, value in held.items()}
    tensors = {name: part(p) for name, p in guard.model.named_parameters()}
    if part is local:
        tensors |= {name: local(b) for name, b in guard.model.named_buffers()}
    return {"model": tensors, "optimizer": slots}


def notes(guard: Guard) -> list[str]:
    """What this rank was told."""
    journal = guard._context.outputs.journal
    assert journal is not None
    said = read_run(journal.path.parent)
    return [str(note.get("summary", "")) for note in said.notes]


# --- four ranks, two, and four again


def written(engine: str, out: Path) -> dict[str, Any]:
    with guarded(engine, out / f"of4-{engine}") as guard:
        train(guard, engine, range(STOP_AT))
        path = guard.save()
        return {"path": path, "whole": state(guard, whole), "armed": guard.armed}


def resharded(engine: str, out: Path) -> dict[str, Any]:
    """Restored by another number of ranks, and saved by them."""
    with guarded(engine, out / f"of4-{engine}") as guard:
        try:
            done = guard.restore()
        except StoreError as why:
            return {"refused": str(why)}
    with guarded(engine, out / f"of2-{engine}") as second:
        second.restore(out / f"of4-{engine}" / "checkpoints" / f"step-{STOP_AT}")
        path = second.save()
        return {"done": done, "path": path, "whole": state(second, whole), "refused": ""}


def back(engine: str, out: Path) -> dict[str, Any]:
    with guarded(engine, out / f"of2-{engine}") as guard:
        done = guard.restore()
        train(guard, engine, range(STOP_AT, STEPS))
        return {"done": done, "armed": guard.armed}


# --- one number of ranks


def resumed(engine: str, out: Path) -> dict[str, Any]:
    """Stopped and restored, beside a run that never stopped."""
    folder = out / f"resumed-{engine}"
    with guarded(engine, folder) as first:
        train(first, engine, range(STOP_AT))
        first.save()
    torch.manual_seed(99)
    with guarded(engine, folder) as second:
        done = second.restore()
        train(second, engine, range(STOP_AT, STEPS))
        ended = state(second)
    with guarded(engine, out / f"never-{engine}") as never:
        train(never, engine, range(STEPS))
        return {"done": done, "resumed": ended, "never": state(never)}


def scheduled(engine: str, out: Path) -> dict[str, Any]:
    """Written in the background, from snapshots that have proved good."""
    folder = out / f"scheduled-{engine}"
    with guarded(engine, folder, checkpoint_every=2) as guard:
        train(guard, engine, range(STEPS))
        armed = guard.armed
    dist.barrier()
    with guarded(engine, folder) as second:
        done = second.restore()
        train(second, engine, range(done, STEPS))
        return {"done": done, "armed": armed, "again": state(second), "once": state(guard)}


def signalled(engine: str, out: Path) -> dict[str, Any]:
    """One rank is told to end: all save the same step."""
    folder = out / f"signalled-{engine}"
    code = None
    with guarded(engine, folder) as guard:
        try:
            train(guard, engine, range(3))
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            train(guard, engine, range(3, 1000))
        except SystemExit as ended:
            code = ended.code
        return {"code": code, "steps": guard.steps, "folder": folder}


def poisoned(engine: str, out: Path) -> dict[str, Any]:
    """A NaN in one rank's shard: refused by all, with parameter and rank."""
    with guarded(engine, out / f"poisoned-{engine}") as guard:
        train(guard, engine, range(3))
        first = next(iter(guard.model.parameters())).detach()
        part = first.to_local() if hasattr(first, "to_local") else first  # type: ignore[operator]
        if dist.get_rank() == 1:
            part.view(-1)[0] = torch.nan
        path = guard.save()
        part.nan_to_num_()
        return {"path": path, "notes": notes(guard), "armed": guard.armed}


def full_disk(engine: str, out: Path) -> dict[str, Any]:
    """One rank cannot write: nothing is sealed, and all know why."""
    folder = out / f"full-{engine}"
    with guarded(engine, folder) as guard:
        train(guard, engine, range(3))
        before = guard.save()
        archive: Any = guard._saving._archive
        if dist.get_rank() == 1:

            def refuse(*_: Any) -> None:
                raise OSError(28, "No space left on device")

            archive.store._disk = type(archive.store._disk)()
            archive.store._disk.new_file = refuse
        train(guard, engine, range(3, 4))
        path = guard.save()
        names = sorted(entry.name for entry in (folder / "checkpoints").iterdir())
        return {"before": before, "path": path, "notes": notes(guard), "names": names}


def damaged(engine: str, out: Path) -> dict[str, Any]:
    """A shard of the newest checkpoint is damaged: all ranks take the one before."""
    folder = out / f"damaged-{engine}"
    with guarded(engine, folder) as guard:
        train(guard, engine, range(3))
        guard.save()
        train(guard, engine, range(3, STOP_AT))
        newest = guard.save()
    assert newest is not None
    if dist.get_rank() == 0:
        file = newest / "rank-00001-00000.safetensors"
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(content)
    dist.barrier()
    with guarded(engine, folder) as second:
        return {"done": second.restore(), "notes": notes(second)}


def nothing(engine: str, out: Path) -> dict[str, Any]:
    with guarded(engine, out / f"nothing-{engine}") as guard:
        try:
            guard.restore()
        except StoreError as why:
            return {"raised": str(why)}
    return {"raised": None}


SCENARIOS: dict[str, Callable[..., dict[str, Any]]] = {
    function.__name__: function
    for function in (
        written,
        resharded,
        back,
        resumed,
        scheduled,
        signalled,
        poisoned,
        full_disk,
        damaged,
        nothing,
    )
}


def main(out: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    for name in names:
        kind, engine = name.split("-")
        torch.save(SCENARIOS[kind](engine, out), out / f"{name}.{dist.get_rank()}.pt")
        dist.barrier()
    # as in sharded_worker.py: torch keeps meshes, and a thread of gloo may outlive Python
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
