"""Two ranks that hold different weights, save and restore; what came of it into a file a rank.

torchrun --standalone --nproc-per-node 2 rank_state_worker.py OUT scenario ...
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import stepguard
from process_group import gloo
from settings_of import config_of
from stepguard import Guard
from stepguard._errors import StepguardError, StoreError
from stepguard.checkpoints import Store
from stepguard.journal import read_run

SETTINGS: dict[str, Any] = {
    "locate": False,
    "terminal": "quiet",
    "snapshot_every": 2,
    "probation": 2,
}
Shape = Callable[[int], nn.Module]


def expert(rank: int) -> nn.Module:
    """The same names and shapes on every rank, other values: a router and an expert."""
    torch.manual_seed(0)
    router = nn.Linear(4, 4)
    torch.manual_seed(10 + rank)
    return nn.Sequential(router, nn.BatchNorm1d(4), nn.Linear(4, 4))


def stage(rank: int) -> nn.Module:
    """Other names and shapes on every rank."""
    torch.manual_seed(20 + rank)
    if rank == 0:
        return nn.ModuleDict({"first": nn.Linear(4, 8)})
    return nn.ModuleDict({"second": nn.Linear(4, 2), "norm": nn.LayerNorm(2)})


def replica(rank: int) -> nn.Module:
    """Every rank the same weights; running statistics of its own data until DDP sends rank 0's."""
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))


def by_rank(rank: int) -> nn.Module:
    """A layer more on one rank: its guard cannot take what the others can."""
    return nn.Sequential(nn.Linear(4, 4), *([nn.Linear(4, 4)] if rank else []))


SHAPES: dict[str, Shape] = {"expert": expert, "stage": stage, "replica": replica}


def run_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    parts = list(model.values()) if isinstance(model, nn.ModuleDict) else [model]
    for part in parts:
        x = part(x)
    return x.square().mean()


def guarded(model: nn.Module, folder: Path, loop: str = "step", **settings: Any) -> tuple[Any, Any]:
    same = isinstance(model, DistributedDataParallel)
    rate = 0.01 if same else 0.01 * (1 + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    make = stepguard.watch if loop == "watch" else Guard
    config = config_of(**{**SETTINGS, **settings}, run_dir=folder)
    return make(model, optimizer, config=config), optimizer


def train(guard: Any, optimizer: Any, model: nn.Module, loop: str, steps: range) -> None:
    for step in steps:
        source = torch.Generator().manual_seed(100 * step + dist.get_rank())
        data = torch.randn(6, 4, generator=source)
        if loop == "step":
            guard.step(lambda x: run_of(model, x), data)
        else:
            optimizer.zero_grad()
            run_of(model, data).backward()
            optimizer.step()


def state_now(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    slots = deepcopy(optimizer.state_dict())
    return {"model": state, "optimizer": slots["state"], "lr": slots["param_groups"][0]["lr"]}


def notes(folder: Path) -> list[str]:
    return [str(note.get("summary", "")) for note in read_run(folder).notes]


def saved(shape: str, loop: str, how: str, out: Path) -> dict[str, Any]:
    """Saved by all, restored by fresh objects of other values: each rank its own."""
    folder = out / f"saved-{shape}-{loop}-{how}"
    rank = dist.get_rank()
    model = SHAPES[shape](rank)
    every = 4 if how == "scheduled" else None
    guard, optimizer = guarded(model, folder, loop, checkpoint_every=every)
    with guard:
        train(guard, optimizer, model, loop, range(4))
        then = state_now(model, optimizer)
        path = guard.save() if how == "asked" else None
        train(guard, optimizer, model, loop, range(4, 7))
    dist.barrier()
    fresh = SHAPES[shape](rank)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    guard, optimizer = guarded(fresh, folder, loop)
    with guard:
        done = guard.restore()
        back = state_now(fresh, optimizer)
    dist.barrier()
    names = list(Store(folder / "checkpoints").open("last-good").tensors)
    return {
        "then": then,
        "back": back,
        "done": done,
        "path": path,
        "names": names,
        "notes": notes(folder),
        "armed": guard.armed,
    }


def nothing(out: Path) -> dict[str, Any]:
    """The first start of a run that restores where it can."""
    model = replica(0)
    guard, optimizer = guarded(model, out / "nothing")
    raised = None
    with guard:
        try:
            guard.restore()
        except StoreError as why:
            raised = str(why)
        train(guard, optimizer, model, "step", range(2))
    return {"raised": raised, "armed": guard.armed}


def misfit(out: Path) -> dict[str, Any]:
    """The checkpoint fits the objects of one rank only: no rank is changed."""
    folder = out / "misfit"
    model = by_rank(0)
    guard, optimizer = guarded(model, folder)
    with guard:
        train(guard, optimizer, model, "step", range(3))
        guard.save()
    dist.barrier()
    other = by_rank(dist.get_rank())
    guard, optimizer = guarded(other, folder)
    before = state_now(other, optimizer)
    raised = None
    with guard:
        try:
            guard.restore()
        except StepguardError as why:
            raised = str(why)
    return {"raised": raised, "before": before, "after": state_now(other, optimizer)}


def loader_of(rank: int, size: int) -> DataLoader[Any]:
    data = TensorDataset(torch.arange(24.0))
    sampler: Any = DistributedSampler(data, size, rank, shuffle=False)
    return DataLoader(data, batch_size=2, sampler=sampler)


def rows(folder: Path, rank: int, size: int, delivered: list[int], *, save: bool) -> list[Any]:
    """Train on the rows of this rank, from where the checkpoint left off; save on the way."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)  # the ranks stay equal
    config = config_of(**SETTINGS, run_dir=folder)
    seen: list[Any] = []
    with Guard(model, optimizer, config=config, loader=loader_of(rank, size)) as guard:
        if not save:
            guard.restore()
        for (batch,) in guard.loader:
            guard.step(lambda x: model(x[:, None]).square().mean(), batch)
            seen.append(batch.tolist())
            if save and len(seen) == delivered[rank]:
                break
        if save:
            guard.save()
    return seen


def data(name: str, out: Path) -> dict[str, Any]:
    """A checkpoint of one process, continued by two; one of two is continued by one later."""
    rank = dist.get_rank()
    if name == "written":
        return {"seen": rows(out / "of_two", rank, 2, [3, 3], save=True)}
    folder = out / "of_one"
    seen = rows(folder, rank, 2, [], save=False)
    dist.barrier()
    return {"seen": seen, "notes": notes(folder)}


def origin(trouble: str, loop: str, out: Path) -> dict[str, Any]:
    """One rank's input is bad, or its gradient once, before the reduction: whom is it put on?"""
    folder = out / f"origin-{trouble}-{loop}"
    bad_here = dist.get_rank() == 1
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)))
    spoilt = [trouble == "transient" and bad_here]

    def spoil(grad: Any) -> Any:
        # a hook of the tensor acts before the reduction; once: a replay does not show it
        now = spoilt[0] and guard._context.step == 3
        spoilt[0] = spoilt[0] and not now
        return grad * torch.nan if now else grad

    hook = model.module[0].weight.register_hook(spoil)
    guard, optimizer = guarded(model, folder, loop, locate=True, capsule="full")
    with guard:
        for step in range(6):
            data = torch.randn(6, 4, generator=torch.Generator().manual_seed(2 * step + bad_here))
            if trouble == "input" and bad_here and step == 3:
                data[2] = torch.nan
            if loop == "step":
                guard.step(lambda x: run_of(model, x), data)
            else:
                optimizer.zero_grad()
                run_of(model, data).backward()
                optimizer.step()
        found = list(guard.incidents)
    hook.remove()
    dist.barrier()
    return {"incidents": found, "armed": guard.armed, "weights": state_now(model, optimizer)}


SCENARIOS: dict[str, Callable[..., dict[str, Any]]] = {
    function.__name__: function for function in (saved, nothing, misfit, data, origin)
}


def main(out: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    with gloo():
        for name in names:
            kind, *arguments = name.split("-")
            torch.save(SCENARIOS[kind](*arguments, out), out / f"{name}.{dist.get_rank()}.pt")
            dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
