"""What two ranks do: every scenario once, and what came of it into a file a rank.

torchrun --standalone --nproc-per-node 2 worker.py OUT scenario ...
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import stepguard
from process_group import gloo
from stepguard import Guard, GuardConfig, Probes, TrainingHalted
from stepguard.engine import transaction
from stepguard.engine.drivers import step as step_end
from stepguard.engine.protect import GuardDisarmed
from stepguard.engine.watch import live_tracing

FEATURES, CLASSES, STEPS, BAD_STEP, BAD_RANK = 6, 3, 6, 2, 1
QUIET = GuardConfig(probes=Probes(locate_budget=0), terminal="quiet")
LOCATING = GuardConfig(terminal="quiet")
Batch = tuple[Tensor, Tensor, str]
COUNTED = (
    "all_reduce",
    "all_gather",
    "all_gather_object",
    "broadcast",
    "broadcast_object_list",
    "reduce",
    "barrier",
)


def batch(rank: int, step: int, trouble: str = "") -> Batch:
    """Each rank has its own data; `trouble` says what is wrong with it."""
    source = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(4, FEATURES, generator=source)
    targets = torch.randint(CLASSES, (4,), generator=source)
    if trouble == "input":
        inputs[0, 0] = torch.nan
    if trouble == "labels":
        targets.fill_(-100)
    if trouble == "statistics":
        inputs *= 1e20
    return inputs, targets, trouble


def loss_of(model: nn.Module, data: Batch) -> Tensor:
    inputs, targets, trouble = data
    out = model(inputs).tanh()
    loss = nn.functional.cross_entropy(out, targets)
    if trouble == "backward":
        return loss + torch.sqrt((out * 0.0).sum())
    return loss + 50.0 if trouble == "spike" else loss


def build(*, wrap: bool, fused: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    return DistributedDataParallel(model) if wrap else model, optimizer


def average(model: nn.Module) -> None:
    """Data parallelism by hand."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def rate(optimizer: torch.optim.Optimizer, step: int, jump_at: int) -> None:
    """The learning rate jumps on all ranks at one step."""
    if step == jump_at:
        optimizer.param_groups[0]["lr"] *= 10


def bare_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Batch, *, by_hand: bool
) -> None:
    optimizer.zero_grad()
    loss_of(model, data).backward()
    if by_hand:
        average(model)
    optimizer.step()


def end(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = {key: value.clone() for key, value in model.state_dict().items()}
    return {"model": state, "optimizer": optimizer.state_dict()["state"]}


def reference(
    troubles: dict[int, str], *, wrap: bool, fused: bool, skip: bool = True, jump_at: int = -1
) -> dict[str, Any]:
    """Bare, and no rank sees a troubled step; or, without `skip`, what becomes of those who have no
    guard.
    """
    model, optimizer = build(wrap=wrap, fused=fused)
    rank = dist.get_rank()
    for step in range(STEPS):
        if step not in troubles or not skip:
            rate(optimizer, step, jump_at)
            data = batch(rank, step, troubles.get(step, "") if rank == BAD_RANK else "")
            bare_step(model, optimizer, data, by_hand=not wrap)
    return end(model, optimizer)


def guarded(
    loop: str,
    troubles: dict[int, str],
    *,
    wrap: bool,
    fused: bool,
    before: Any = None,
    config: GuardConfig = QUIET,
    jump_at: int = -1,
    at_step: Callable[[int], None] = lambda step: None,
) -> dict[str, Any]:
    """The same under a guard; only one rank has the trouble."""
    rank = dist.get_rank()
    model, optimizer = build(wrap=wrap, fused=fused)
    if before is not None:
        before(model, optimizer, rank)
    handles = []
    if loop == "step" and not wrap:
        handles = [p.register_post_accumulate_grad_hook(_average_one) for p in model.parameters()]
    out: dict[str, Any] = {"halted": None}
    make = stepguard.watch if loop == "watch" else Guard
    guard = make(model, optimizer, config=config)
    try:
        with guard:
            for step in range(STEPS):
                at_step(step)
                rate(optimizer, step, jump_at)
                data = batch(rank, step, troubles.get(step, "") if rank == BAD_RANK else "")
                if loop == "watch":
                    bare_step(model, optimizer, data, by_hand=not wrap)
                else:
                    guard.step(lambda b: loss_of(model, b), data)
    except TrainingHalted as halt:
        out["halted"] = halt.incident.step
    for handle in handles:
        handle.remove()
    out["mode"] = guard._context.agreement.mode
    out["armed"] = guard.armed
    out["incidents"] = [
        (i.step, i.verdict.kind, i.reading.bad_ranks, i.decision.action if i.decision else None)
        for i in guard._context.incidents
    ]
    return {**out, **end(model, optimizer)}


def _average_one(parameter: Tensor) -> None:
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Collectives that Python code asks for; those of DistributedDataParallel itself are in C++."""
    seen: Counter[str] = Counter()
    originals = {name: getattr(dist, name) for name in COUNTED}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen[name] += 1
            return originals[name](*args, **kwargs)

        return call

    for name in COUNTED:
        setattr(dist, name, counting(name))
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def poison_one_rank(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """A resume that went wrong on one rank: every rank has optimizer state, one has NaN in it."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    if rank == BAD_RANK:
        optimizer.state[next(iter(model.parameters()))]["exp_avg"].fill_(torch.nan)


def trouble(name: str, loop: str, wrap: str, fused: str) -> dict[str, Any]:
    """One troubled step on one rank."""
    settings = {"wrap": wrap == "ddp", "fused": fused == "fused"}
    troubles = {BAD_STEP: name}
    return {
        "guarded": guarded(loop, troubles, **settings),
        "reference": reference(troubles, **settings),
    }


def healthy(loop: str, wrap: str, fused: str) -> dict[str, Any]:
    settings = {"wrap": wrap == "ddp", "fused": fused == "fused"}
    with counted() as bare:
        expected = reference({}, **settings)
    with counted() as seen:
        got = guarded(loop, {}, **settings)
    return {"guarded": got, "reference": expected, "added": dict(seen - bare)}


def suspicion(loop: str, wrap: str, why: str) -> dict[str, Any]:
    """A loss that jumps on one rank only, with finite gradients; the data did it, or the learning
    rate before it.
    """
    settings = {
        "wrap": wrap == "ddp",
        "fused": False,
        "jump_at": BAD_STEP - 1 if why == "lr" else -1,
    }
    jumps = dict.fromkeys((BAD_STEP, BAD_STEP + 1), "spike")
    return {
        "guarded": guarded(loop, jumps, **settings),
        "reference": reference(jumps, **settings, skip=False),
    }


def halting(loop: str, wrap: str) -> dict[str, Any]:
    troubles = dict.fromkeys(range(1, STEPS), "input")
    settings = {"wrap": wrap == "ddp", "fused": False}
    config = replace(QUIET, policy=stepguard.Policy(max_consecutive=3))
    return {
        "guarded": guarded(loop, troubles, **settings, config=config),
        "reference": reference(troubles, **settings),
    }


def fault(loop: str, wrap: str, troubled: str) -> dict[str, Any]:
    """The guard of one rank fails; later a batch of that rank is bad, and still no rank takes the
    update.
    """
    settings = {"wrap": wrap == "ddp", "fused": False}
    troubles = {BAD_STEP + 2: "input"} if troubled == "troubled" else {}
    original, calls = step_end.add_to_history, Counter[str]()

    def failing(*args: Any) -> None:
        calls["committed"] += 1
        if dist.get_rank() == BAD_RANK and calls["committed"] == 2:
            raise OSError("the disk of one rank is full")
        original(*args)

    step_end.add_to_history = failing
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            got = guarded(loop, troubles, **settings)
    finally:
        step_end.add_to_history = original
    told = [str(w.message) for w in said if issubclass(w.category, GuardDisarmed)]
    return {"guarded": got, "reference": reference(troubles, **settings), "told": told}


def located(loop: str, wrap: str) -> dict[str, Any]:
    """Looking for the origin fails on the rank that looks."""
    original = transaction.locate

    def failing(*args: Any) -> Any:
        raise OSError("a fault while locating")

    transaction.locate = live_tracing.locate = failing
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = guarded(
                loop, {BAD_STEP: "input"}, wrap=wrap == "ddp", fused=False, config=LOCATING
            )
    finally:
        transaction.locate = live_tracing.locate = original
    return {
        "guarded": got,
        "reference": reference({BAD_STEP: "input"}, wrap=wrap == "ddp", fused=False),
    }


def probe() -> dict[str, Any]:
    """After a bad step the user takes a gradient without the guard."""
    model, optimizer = build(wrap=True, fused=False)
    rank = dist.get_rank()
    with Guard(model, optimizer, config=QUIET) as guard:
        guard.step(
            lambda b: loss_of(model, b), batch(rank, 0, "labels" if rank == BAD_RANK else "")
        )
        optimizer.zero_grad()
        loss_of(model, batch(rank, 1)).backward()
    return {
        "finite": all(
            bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None
        )
    }


def bad_start(loop: str, wrap: str) -> dict[str, Any]:
    return {"guarded": guarded(loop, {}, wrap=wrap == "ddp", fused=False, before=poison_one_rank)}


def skipping_alone() -> dict[str, Any]:
    """The seeds' way: the rank with the bad loss goes on with its next batch, the others know
    nothing.
    """
    model, optimizer = build(wrap=True, fused=False)
    rank = dist.get_rank()
    for step in range(STEPS):
        data = batch(rank, step, "input" if (rank, step) == (BAD_RANK, BAD_STEP) else "")
        loss = loss_of(model, data)
        if not torch.isfinite(loss):
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {
        "guarded": end(model, optimizer),
        "reference": reference({BAD_STEP: "input"}, wrap=True, fused=False),
    }


def uncaught() -> dict[str, Any]:
    """A halt that nobody catches."""
    model, optimizer = build(wrap=True, fused=False)
    config = GuardConfig(
        probes=Probes(locate_budget=0), terminal="quiet", policy=stepguard.Policy(actions=("stop",))
    )
    with Guard(model, optimizer, config=config) as guard:
        for step in range(STEPS):
            bad = "input" if dist.get_rank() == BAD_RANK and step == BAD_STEP else ""
            guard.step(lambda b: loss_of(model, b), batch(dist.get_rank(), step, bad))
    return {}


SCENARIOS: dict[str, Callable[..., dict[str, Any]]] = {
    function.__name__: function
    for function in (
        trouble,
        healthy,
        suspicion,
        halting,
        fault,
        located,
        probe,
        bad_start,
        skipping_alone,
        uncaught,
    )
}


def main(out: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    seconds = 4 if names == ["skipping_alone"] else 60
    with gloo(seconds):
        for name in names:
            kind, *arguments = name.split("-")
            torch.save(SCENARIOS[kind](*arguments), out / f"{name}.{dist.get_rank()}.pt")
            dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
