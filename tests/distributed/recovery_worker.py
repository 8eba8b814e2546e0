"""Two ranks that are damaged, rewound, saved and resumed; what came of it goes into a file a rank.

torchrun --standalone --nproc-per-node 2 recovery_worker.py OUT scenario ...
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worker import BAD_RANK, CLASSES, FEATURES, _average_one, bare_step, batch, end, loss_of

import stepguard
from process_group import gloo
from settings_of import config_of
from stepguard import Guard, Policy, TrainingHalted

STEPS, HARM_AT, STOP_AT = 20, 14, 9
SETTINGS: dict[str, Any] = {
    "locate": False,
    "terminal": "quiet",
    "snapshot_every": 4,
    "probation": 6,
    # the other rank holds a copy, which would heal a damaged one (heal_worker.py)
    "policy": Policy(actions=("retry", "leave_out", "skip", "rewind", "stop")),
}


def build(wrap: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Linear(FEATURES, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, CLASSES)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(dist.get_rank() + 7)  # each rank drops out elements of its own
    return DistributedDataParallel(model) if wrap else model, optimizer


@torch.no_grad()
def damage(model: nn.Module) -> None:
    next(iter(model.parameters()))[0, 0] = torch.nan


def train(
    guard: Guard | None,
    model: nn.Module,
    optimizer: Any,
    loop: str,
    steps: range,
    harm: int = -1,
    by_hand: bool = False,
) -> None:
    rank = dist.get_rank()
    for step in steps:
        if step == harm and rank == BAD_RANK:
            damage(model)
        data = batch(rank, step)
        if guard is not None and loop == "step":
            guard.step(lambda b: loss_of(model, b), data)
        else:
            bare_step(model, optimizer, data, by_hand=by_hand)


def made(loop: str, wrap: bool, **settings: Any) -> tuple[Guard, nn.Module, Any, list[Any]]:
    model, optimizer = build(wrap)
    hooks: list[Any] = []
    if loop == "step" and not wrap:
        hooks = [p.register_post_accumulate_grad_hook(_average_one) for p in model.parameters()]
    make = stepguard.watch if loop == "watch" else Guard
    return (
        make(model, optimizer, config=config_of(**{**SETTINGS, **settings})),
        model,
        optimizer,
        hooks,
    )


def never(wrap: bool) -> dict[str, Any]:
    model, optimizer = build(wrap)
    train(None, model, optimizer, "bare", range(STEPS), by_hand=not wrap)
    return end(model, optimizer)


def rewound(loop: str, wrap: str, out: Path) -> dict[str, Any]:
    """The weights of one rank are damaged."""
    guard, model, optimizer, hooks = made(loop, wrap == "ddp")
    with guard:
        train(guard, model, optimizer, loop, range(STEPS), HARM_AT, by_hand=wrap != "ddp")
        found = [i.decision for i in guard.incidents]
    for hook in hooks:
        hook.remove()
    told = [(d.action, d.rewound_to, d.data) for d in found if d is not None]
    return {
        "guarded": end(model, optimizer),
        "never": never(wrap == "ddp"),
        "told": told,
        "armed": guard.armed,
    }


def paced(loop: str, wrap: str, out: Path) -> dict[str, Any]:
    """Copying takes far longer on one rank than on the other, which keeps snapshots more often."""
    guard, model, optimizer, hooks = made(loop, wrap == "ddp", snapshot_every="auto", probation=20)
    cadence = guard._rewinder.snapshots.cadence
    took = cadence.took
    slow = dist.get_rank() == BAD_RANK

    def paced_took(step: int, seconds: float) -> None:
        took(step, seconds)
        cadence._width = 64 if slow else 8

    cadence.took = paced_took  # type: ignore[method-assign]
    harm = 260
    with guard:
        train(guard, model, optimizer, loop, range(harm + 6), harm, by_hand=wrap != "ddp")
        found = [i.decision for i in guard.incidents]
    del cadence.took
    for hook in hooks:
        hook.remove()
    told = [(d.action, d.rewound_to) for d in found if d is not None]
    return {"guarded": end(model, optimizer), "told": told, "armed": guard.armed}


def resumed(loop: str, wrap: str, out: Path) -> dict[str, Any]:
    """Saved by all, written by one, restored by all."""
    folder = out / f"resumed-{loop}-{wrap}"
    for steps in (range(STOP_AT), range(STOP_AT, STEPS)):
        guard, model, optimizer, hooks = made(loop, wrap == "ddp", run_dir=folder)
        with guard:
            if steps.start:
                torch.manual_seed(99)
                assert guard.restore() == STOP_AT
            train(guard, model, optimizer, loop, steps, by_hand=wrap != "ddp")
            path = guard.save()
        for hook in hooks:
            hook.remove()
    return {
        "guarded": end(model, optimizer),
        "never": never(wrap == "ddp"),
        "path": str(path),
        "armed": guard.armed,
    }


def refused(loop: str, wrap: str, out: Path) -> dict[str, Any]:
    """What is wrong on one rank is refused by all."""
    guard, model, optimizer, hooks = made(
        loop, wrap == "ddp", run_dir=out / f"refused-{loop}-{wrap}"
    )
    with guard:
        train(guard, model, optimizer, loop, range(4), by_hand=wrap != "ddp")
        if dist.get_rank() == BAD_RANK:
            damage(model)
        saved = guard.save()
        for parameter in model.parameters():
            torch.nan_to_num_(parameter.data)
    for hook in hooks:
        hook.remove()
    return {"saved": saved, "armed": guard.armed}


def automatic(loop: str, wrap: str, out: Path) -> dict[str, Any]:
    """Checkpoints by themselves, from snapshots of all ranks."""
    folder = out / f"automatic-{loop}-{wrap}"
    guard, model, optimizer, hooks = made(loop, wrap == "ddp", run_dir=folder, checkpoint_every=7)
    with guard:
        train(guard, model, optimizer, loop, range(STEPS), by_hand=wrap != "ddp")
    for hook in hooks:
        hook.remove()
    dist.barrier()
    guard, model, optimizer, hooks = made(loop, wrap == "ddp", run_dir=folder)
    with guard:
        done = guard.restore()
        train(guard, model, optimizer, loop, range(done, STEPS), by_hand=wrap != "ddp")
    for hook in hooks:
        hook.remove()
    return {
        "guarded": end(model, optimizer),
        "never": never(wrap == "ddp"),
        "done": done,
        "armed": guard.armed,
    }


def hopeless(loop: str, wrap: str, out: Path) -> dict[str, Any]:
    """One rank is damaged again and again: all stop together."""
    guard, model, optimizer, hooks = made(loop, wrap == "ddp")
    halted = None
    try:
        with guard:
            for step in range(STEPS + 20):
                train(
                    guard,
                    model,
                    optimizer,
                    loop,
                    range(step, step + 1),
                    step if step >= HARM_AT else -1,
                    wrap != "ddp",
                )
    except TrainingHalted as halt:
        halted = halt.incident.step
    for hook in hooks:
        hook.remove()
    return {"halted": halted, "rewinds": guard._context.budget.rewinds, "armed": guard.armed}


SCENARIOS: dict[str, Callable[..., dict[str, Any]]] = {
    function.__name__: function
    for function in (rewound, paced, resumed, refused, automatic, hopeless)
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
