"""What two ranks do whose model is sharded: torch's own FSDP2, FSDP1 and tensor parallelism.

torchrun --standalone --nproc-per-node 2 sharded_worker.py OUT scenario-loop-engine-trouble ...
"""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

import stepguard
from distributed.sharded_models import CLASSES, FEATURES, RATE, build, data_rank
from distributed.worker import counted
from settings_of import changed
from stepguard import Guard, GuardConfig, TrainingHalted
from stepguard.engine.drivers import step as step_end
from stepguard.records import Origin

STEPS, BAD_STEP, BAD_RANK = 6, 2, 1
LONG = 40
"""Steps after which the usual level of the loss is known."""
CLIP = 0.7
"""Below the norm of most steps."""
CONFIG = GuardConfig(terminal="quiet")
Batch = tuple[Tensor, Tensor, str, bool | None]
"""Inputs, targets, what is wrong with it, and where gradients are accumulated: is it the last?"""
ACCUMULATED = 2


def has_trouble(engine: str) -> bool:
    """The second rank, or the second pair where pairs share their data."""
    return data_rank(engine) == BAD_RANK if engine == "both" else dist.get_rank() == BAD_RANK


def batch(engine: str, step: int, trouble: str, last: bool | None = None) -> Batch:
    """Each rank has its own data, but for ranks that compute one batch together."""
    part = 0 if last is None else int(last)
    seed = 100 * step + 10 * part + data_rank(engine)
    source = torch.Generator().manual_seed(seed)
    inputs = torch.randn(4, FEATURES, generator=source)
    targets = torch.randint(CLASSES, (4,), generator=source)
    if trouble == "two":
        # each rank has a cause of its own
        trouble = "input" if has_trouble(engine) else "labels"
    elif not has_trouble(engine):
        trouble = ""
    if trouble == "input":
        inputs[2, 0] = torch.nan
    if trouble == "labels":
        targets.fill_(-100)
    return inputs, targets, trouble, last


def micro_batches(engine: str, step: int, trouble: str) -> list[Batch]:
    if engine != "accumulate":
        return [batch(engine, step, trouble)]
    return [batch(engine, step, trouble, last=False), batch(engine, step, "", last=True)]


def loss_of(model: Any, data: Batch) -> Tensor:
    inputs, targets, trouble, last = data
    if last is not None:
        model.set_requires_gradient_sync(last)
    out = model(inputs)
    loss = nn.functional.cross_entropy(out, targets)
    if hasattr(model, "plain"):
        # the same on every rank, as its gradient is not exchanged by anybody
        loss = loss + (model.plain * model.plain).sum() / 10
    if trouble == "backward":
        return loss + torch.sqrt((out * 0.0).sum())
    if trouble == "forward":
        return loss + torch.log(-out.detach().abs().sum() - 1.0)
    if trouble == "buffer":
        for buffer in model.buffers():
            buffer.fill_(torch.nan)
    if trouble == "transient":
        out.register_hook(hit_once)
    return loss + 50.0 if trouble == "spike" else loss


FIRED = Counter[str]()


def hit_once(grad: Tensor) -> Tensor:
    """What a failing device would do: it does not happen again."""
    FIRED["hits"] += 1
    return grad * torch.nan if FIRED["hits"] == 1 else grad


def set_rate(trouble: str, engine: str, optimizer: torch.optim.Optimizer) -> None:
    """One rank's learning rate is NaN while there is this trouble."""
    bad = trouble == "rate" and has_trouble(engine)
    for group in optimizer.param_groups:
        group["lr"] = math.nan if bad else RATE


def clip_by_torch(model: nn.Module, most: float = CLIP) -> float:
    """What a loop of this engine calls."""
    if isinstance(model, FullyShardedDataParallel):
        return float(model.clip_grad_norm_(most))
    if hasattr(model, "plain"):
        return clip_by_hand(model, most)
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), most)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def clip_by_hand(model: nn.Module, most: float) -> float:
    """torch refuses to clip gradients of several meshes together."""
    squares = 0.0
    for parameter in model.parameters():
        grad: Any = parameter.grad
        full = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        squares += float(full.double().square().sum())
    norm = math.sqrt(squares)
    for parameter in model.parameters():
        local_part(parameter.grad).mul_(min(1.0, most / (norm + 1e-6)))
    return norm


def local_part(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def local(tensor: Any) -> Any:
    if not isinstance(tensor, Tensor):
        return tensor
    return local_part(tensor).detach().clone()


def end(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """This rank's part of it all."""
    slots = [
        {name: local(value) for name, value in optimizer.state[parameter].items()}
        for parameter in model.parameters()
        if parameter in optimizer.state
    ]
    return {"model": [local(p) for p in model.parameters()], "optimizer": slots}


def bare_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: list[Batch],
    *,
    clips: bool,
    measures: bool = False,
) -> tuple[float, float | None]:
    optimizer.zero_grad()
    total = 0.0
    for part in data:
        loss = loss_of(model, part)
        loss.backward()
        total += float(loss.detach())
    norm = clip_by_torch(model) if clips else None
    if measures and not clips:
        norm = clip_by_torch(model, most=math.inf)
    optimizer.step()
    return total, norm


def reference(
    engine: str, troubles: dict[int, str], *, skip: bool, clips: bool, steps: int = STEPS
) -> dict[str, Any]:
    """Bare; with `skip` no rank sees a troubled step."""
    model, optimizer = build(engine)
    said = []
    for step in range(steps):
        if skip and step in troubles:
            if engine == "dropout":
                # a skipped step has drawn its random numbers all the same
                model(batch(engine, step, "")[0]).sum().backward()
            continue
        data = micro_batches(engine, step, troubles.get(step, ""))
        said.append(bare_step(model, optimizer, data, clips=clips, measures=True))
    return {"said": said, **end(model, optimizer)}


def spoil(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put a NaN into one rank's shard."""
    if dist.get_rank() != BAD_RANK:
        return
    for parameter in model.parameters():
        if not parameter.numel():
            continue
        held: Any = (
            parameter.detach() if kind == "weight" else optimizer.state[parameter]["exp_avg"]
        )
        part = local_part(held)
        if part.numel():
            part.view(-1)[0] = torch.nan
            return


def guarded(
    loop: str,
    engine: str,
    troubles: dict[int, str],
    config: GuardConfig,
    *,
    clips: bool = False,
    steps: int = STEPS,
) -> dict[str, Any]:
    """The same under a guard; only one rank has the trouble."""
    model, optimizer = build(engine)
    out: dict[str, Any] = {"halted": None, "said": []}
    by_guard = clips and loop == "step"
    config = replace(config, clip_norm=CLIP if by_guard else None)
    make = stepguard.watch if loop == "watch" else Guard
    guard = make(model, optimizer, config=config)
    try:
        with guard:
            for step in range(steps):
                trouble = troubles.get(step, "")
                if trouble in ("weight", "slot"):
                    spoil(trouble, model, optimizer)
                set_rate(trouble, engine, optimizer)
                data = micro_batches(engine, step, trouble)
                if loop == "watch":
                    out["said"].append(bare_step(model, optimizer, data, clips=clips))
                else:
                    result = guard.step(lambda b: loss_of(model, b), *data)
                    out["said"].append((result.loss, result.grad_norm))
    except TrainingHalted as halt:
        out["halted"] = halt.incident.step
    out["armed"] = guard.armed
    out["norms"] = list(guard._context.history.norms)
    out["incidents"] = [
        {
            "step": i.step,
            "kind": i.verdict.kind,
            "ranks": i.reading.bad_ranks,
            "action": i.decision.action if i.decision else None,
            "state": i.reading.bad_state,
            "tensor": i.origin.tensor if i.origin else None,
            "rank": i.origin.rank if i.origin else None,
            "place": place(i.origin) if i.origin else None,
        }
        for i in guard._context.incidents
    ]
    return {**out, **end(model, optimizer)}


def place(origin: Origin) -> dict[str, Any]:
    """What a replay says of it."""
    return {
        "phase": origin.phase,
        "op": origin.op,
        "module": origin.module,
        "samples": origin.samples,
        "reproduced": origin.reproduced,
        "remarks": origin.remarks,
    }


def trouble(loop: str, engine: str, kind: str) -> dict[str, Any]:
    # a second bad step in a row asks whether the weights are to blame
    troubles = dict.fromkeys((BAD_STEP, BAD_STEP + 1), kind)
    return {
        "guarded": guarded(loop, engine, troubles, CONFIG),
        "reference": reference(engine, troubles, skip=True, clips=False),
    }


def transient(loop: str, engine: str, kind: str) -> dict[str, Any]:
    """A gradient of one rank is hit once, before ranks exchange it."""
    FIRED.clear()
    skipped = {BAD_STEP: kind}
    return {
        "guarded": guarded(loop, engine, skipped, CONFIG),
        "reference": reference(engine, {}, skip=False, clips=False),
        "without": reference(engine, skipped, skip=True, clips=False),
    }


def healthy(loop: str, engine: str, clipping: str) -> dict[str, Any]:
    clips = clipping == "clip"
    with counted() as collectives:
        run = guarded(loop, engine, {}, CONFIG, clips=clips)
    return {
        "guarded": {**run, "collectives": dict(collectives)},
        "reference": reference(engine, {}, skip=False, clips=clips),
    }


def spike(loop: str, engine: str, anomalies: Any) -> dict[str, Any]:
    """The loss jumps on one rank, with finite gradients: the run goes on as it would have."""
    troubles = dict.fromkeys((LONG - 5, LONG - 4), "spike")
    config = changed(CONFIG, anomalies=anomalies)
    return {
        "guarded": guarded(loop, engine, troubles, config, steps=LONG),
        "reference": reference(engine, troubles, skip=False, clips=False, steps=LONG),
    }


def damage(loop: str, engine: str, kind: str) -> dict[str, Any]:
    return {
        "guarded": guarded(loop, engine, {BAD_STEP: kind}, CONFIG),
        "reference": reference(engine, {}, skip=False, clips=False),
    }


def fault(loop: str, engine: str, clipping: str) -> dict[str, Any]:
    """The guard of one rank fails in the middle of a healthy run."""
    original, calls = step_end.add_to_history, Counter[str]()

    def failing(*args: Any) -> None:
        calls["committed"] += 1
        if dist.get_rank() == BAD_RANK and calls["committed"] == 2:
            raise OSError("the disk of one rank is full")
        original(*args)

    step_end.add_to_history = failing
    try:
        return healthy(loop, engine, clipping)
    finally:
        step_end.add_to_history = original


def midway(engine: str) -> dict[str, Any]:
    """The guard is attached while the model computes, when FSDP2 has plain, whole parameters."""
    model, optimizer = build(engine)
    guards: list[Guard] = []

    def attach(*_: Any) -> None:
        if not guards:
            guards.append(stepguard.watch(model, optimizer, config=CONFIG))

    handle = model.get_submodule("0").register_forward_hook(attach)
    said = [
        bare_step(model, optimizer, [batch(engine, step, "")], clips=True) for step in range(STEPS)
    ]
    handle.remove()
    with guards[0] as guard:
        seen = {"armed": guard.armed, "incidents": guard.incidents, "said": said}
    return {
        "guarded": {**seen, **end(model, optimizer)},
        "reference": reference(engine, {}, skip=False, clips=True),
    }


def refused() -> dict[str, Any]:
    """FSDP1 can only clip through a root, and here it has two."""
    parts = [FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")) for _ in "ab"]
    model = nn.Sequential(*parts)
    try:
        Guard(model, torch.optim.SGD(model.parameters()), config=replace(CONFIG, clip_norm=CLIP))
    except stepguard.ConfigError as error:
        return {"why": str(error)}
    return {"why": ""}


SCENARIOS: dict[str, Callable[..., dict[str, Any]]] = {
    function.__name__: function
    for function in (trouble, transient, healthy, spike, damage, fault, midway, refused)
}


def main(out: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    for name in names:
        kind, *arguments = name.split("-")
        torch.save(SCENARIOS[kind](*arguments), out / f"{name}.{dist.get_rank()}.pt")
        dist.barrier()
    # torch keeps meshes, and through them the group, in caches of DTensor; a thread of gloo that
    # outlives Python may abort it (process_group.py)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
