"""What ranks do that do not all come: one sees what the others do not, or one alone asks.

torchrun --standalone --nproc-per-node N apart_worker.py OUT scenario ...
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import stepguard
from process_group import gloo
from settings_of import changed
from stepguard import Guard, GuardConfig, Ranks, StoreError
from stepguard.checkpoints import Store, read_seal
from stepguard.engine.protect import GuardDisarmed
from stepguard.ranks import agreement as rank_agreement

FEATURES, STEPS, BAD_STEP, BAD_RANK = 4, 6, 2, 1
WRITING = ("rank0_save", "rank0_save_bad", "rank0_restore")
"""Scenarios that need a folder."""
ALL_COME = GuardConfig(terminal="quiet", ranks=Ranks(timeout=30.0))
NOT_ALL_COME = GuardConfig(terminal="quiet", ranks=Ranks(timeout=0.5))


class Noted(nn.Module):
    """A linear layer that keeps a plain buffer of what it has seen, and perhaps a sentinel."""

    def __init__(self, *, sentinel: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 1)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("least", torch.full((), torch.inf if sentinel else 1.0))
        self.spoil = False

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.mul_(torch.nan if self.spoil else 0.5)  # type: ignore[operator]
            self.least.mul_(1.0)  # type: ignore[operator]
        out: Tensor = self.linear(inputs)
        return out


def data(step: int, *, bad: bool = False) -> Tensor:
    source = torch.Generator().manual_seed(100 * step + dist.get_rank())
    inputs = torch.randn(3, FEATURES, generator=source)
    if bad:
        inputs[0, 0] = torch.nan
    return inputs


def here(step: int) -> bool:
    return dist.get_rank() == BAD_RANK and step == BAD_STEP


def built(
    *, wrap: str = "ddp", fused: bool = False, group: Any = None, sentinel: bool = False
) -> Any:
    torch.manual_seed(0)
    model = Noted(sentinel=sentinel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    if wrap == "ddp":
        return DistributedDataParallel(
            model, broadcast_buffers=False, process_group=group
        ), optimizer
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_average)
    return model, optimizer


def _average(parameter: Tensor) -> None:
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()


class Loop:
    """The same few steps by `guard.step`, by `watch`, or without a guard."""

    def __init__(self, loop: str, model: nn.Module, optimizer: Any, config: GuardConfig) -> None:
        self.model = model
        self.optimizer = optimizer
        self.guard: Guard | None = None
        self.loop = loop
        if loop != "bare":
            make = stepguard.watch if loop == "watch" else Guard
            self.guard = make(model, optimizer, config=config)

    def step(self, inputs: Tensor) -> Any:
        if self.loop == "step" and self.guard is not None:
            return self.guard.step(lambda batch: self.model(batch).square().mean(), inputs)
        self.optimizer.zero_grad()
        self.model(inputs).square().mean().backward()
        self.optimizer.step()
        return None

    def end(self) -> dict[str, Any]:
        if self.guard is not None:
            self.guard.close()
        return self.outcome()

    def outcome(self) -> dict[str, Any]:
        weights = [p.detach().clone() for p in self.model.parameters()]
        out: dict[str, Any] = {"weights": weights, "steps": int(_steps(self.optimizer))}
        if self.guard is not None:
            found = self.guard._context.incidents
            out["armed"] = self.guard.armed
            out["incidents"] = [
                (i.step, i.verdict.kind, i.reading.bad_ranks, i.decision and i.decision.action)
                for i in found
            ]
        return out


def _steps(optimizer: Any) -> float:
    counts = [float(state.get("step", 0)) for state in optimizer.state.values()]
    return max(counts, default=0.0)


def own_trouble(kind: str, loop: str, wrap: str) -> dict[str, Any]:
    """A plain buffer or a learning rate turns NaN on one rank; nothing, as a control."""
    model, optimizer = built(wrap=wrap, sentinel=True)
    running = Loop(loop, model, optimizer, ALL_COME)
    inner = model.module if wrap == "ddp" else model
    for step in range(STEPS):
        if kind == "buffer":
            inner.spoil = here(step)
        if kind == "rate" and here(step):
            optimizer.param_groups[0]["lr"] = torch.nan
        running.step(data(step))
        optimizer.param_groups[0]["lr"] = 0.01
    return running.end()


def last_look(loop: str, wrap: str, who: str) -> dict[str, Any]:
    """The weights turn NaN after the last step."""
    model, optimizer = built(wrap=wrap)
    running = Loop(loop, model, optimizer, ALL_COME if who == "all" else NOT_ALL_COME)
    for step in range(STEPS):
        running.step(data(step))
    if who == "all" or dist.get_rank() == BAD_RANK:
        with torch.no_grad():
            next(model.parameters()).fill_(torch.nan)
    return running.end()


def born(loop: str) -> dict[str, Any]:
    """A half-precision weight of one rank overflows in the update, as one shard of many may."""
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 1, bias=False).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    running = Loop(loop, model, optimizer, ALL_COME)
    before: list[Tensor] = []
    for step in range(STEPS):
        if here(step):
            with torch.no_grad():
                model.weight.fill_(65504.0)
        if step == BAD_STEP:
            before = [p.detach().clone() for p in model.parameters()]
        scale = -60000.0 if here(step) else 0.0

        def loss_of(batch: Tensor, scale: float = scale) -> Tensor:
            return (model.weight.float() * scale).sum()

        if loop == "step":
            assert running.guard is not None
            running.guard.step(loss_of, data(step))
        else:
            optimizer.zero_grad()
            loss_of(data(step)).backward()
            optimizer.step()
    out = running.end()
    return {**out, "before": before}


def overflow(loop: str, who: str, kind: str) -> dict[str, Any]:
    """Losses in float16, of one rank or of all, overflow in their sum; each gradient is finite."""
    ends = []
    for guarded in ("bare", loop):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(FEATURES, FEATURES).half())
        make = torch.optim.AdamW if kind == "fused" else torch.optim.SGD
        optimizer = make(model.parameters(), lr=1e-3, fused=kind == "fused")
        running = Loop(guarded, model, optimizer, ALL_COME)
        source = torch.Generator().manual_seed(dist.get_rank())
        infinite = 0
        for _ in range(STEPS):
            inputs = torch.randn(64, FEATURES, generator=source)
            large = 40.0 if who == "all" or dist.get_rank() == BAD_RANK else 1.0

            def loss_of(batch: Tensor, model: nn.Module = model, large: float = large) -> Tensor:
                error: Tensor = model(batch.half()) - (batch * large).half()
                return error.square().sum()

            if guarded == "step":
                assert running.guard is not None
                loss = running.guard.step(loss_of, inputs).loss
            else:
                optimizer.zero_grad()
                error = loss_of(inputs)
                error.backward()
                optimizer.step()
                loss = error.item()
            infinite += loss == torch.inf
        ends.append(running.end())
    return {**ends[1], "bare": ends[0]["weights"], "infinite": infinite}


SPOILED_UPDATE: dict[str, bool] = {}
"""Not an attribute of the optimizer, which going back would restore."""


class OneRankFails(torch.optim.SGD):
    """Its update makes NaN of finite gradients on one rank, once."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if SPOILED_UPDATE.pop("now", False):
            with torch.no_grad():
                self.param_groups[0]["params"][0].fill_(torch.nan)
        return loss


def late(kind: str, loop: str) -> dict[str, Any]:
    """One rank finds out by itself, after DDP has exchanged the gradients."""
    model, optimizer = built(fused=kind == "fused_rate")
    if kind == "update":
        optimizer = OneRankFails(model.parameters(), lr=0.01)
    running = Loop(loop, model, optimizer, changed(ALL_COME, snapshot_every=1))
    for step in range(STEPS):
        spoil = here(step)
        if kind == "update":
            SPOILED_UPDATE["now"] = spoil
            running.step(data(step))
            continue
        optimizer.zero_grad()
        model(data(step)).square().mean().backward()
        if spoil and kind == "gradient":
            next(p for p in model.parameters() if p.grad is not None).grad.view(-1)[0] = torch.nan
        elif spoil:
            optimizer.param_groups[0]["lr"] = torch.nan
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.01
    return running.end()


def rank0(what: str, wrap: str) -> dict[str, Any]:
    """Only rank 0 has a guard, or keeps it, and a step is bad."""
    model, optimizer = built(wrap=wrap)
    guarded = what == "closed" or dist.get_rank() == 0
    running = Loop("watch" if guarded else "bare", model, optimizer, NOT_ALL_COME)
    for step in range(STEPS):
        if what == "closed" and step == 1 and dist.get_rank() == BAD_RANK:
            assert running.guard is not None
            running.guard.close()
        bad = step == BAD_STEP and dist.get_rank() == 0
        running.step(data(step, bad=bad))
    return running.end()


def rank0_save(out: Path, wrap: str) -> dict[str, Any]:
    """`if rank == 0: guard.save()`, then all ranks save, and rank 0 alone restores."""
    model, optimizer = built(wrap=wrap)
    folder = out / f"run-{wrap}"
    config = replace(NOT_ALL_COME, run_dir=folder)
    running = Loop("step", model, optimizer, config)
    guard = running.guard
    assert guard is not None
    inner = model.module if wrap == "ddp" else model
    inner.seen.fill_(1.0 + dist.get_rank())
    running.step(data(0))
    with mock.patch.object(rank_agreement.time, "sleep", wraps=time.sleep) as waits:
        alone = guard.save() if dist.get_rank() == 0 else None
    for step in range(1, STEPS):
        running.step(data(step))
    saved = guard.save()
    drawn, seen = torch.get_rng_state(), inner.seen.clone()
    dist.barrier()
    held = Store(folder / "checkpoints").open().facts
    # made by one rank, loaded by all
    restored = guard.restore(folder / "checkpoints" / "step-1") if wrap == "ddp" else 0
    refused = ""
    try:
        if dist.get_rank() == 0:
            guard.restore()
    except StoreError as why:
        refused = str(why)
    dist.barrier()
    told = (folder / "journal.jsonl").read_text()
    missing = read_seal(alone).health.missing if alone else ""
    facts = {"saved": saved is not None, "missing": missing, "restored": restored, "journal": told}
    facts |= {"waits": waits.call_count, "held": held}
    found = {**running.end(), "alone": alone, "refused": refused, **facts}
    if wrap == "ddp":
        torch.manual_seed(1)
        model, optimizer = built(wrap=wrap)
        again = Loop("step", model, optimizer, config)
        assert again.guard is not None
        found["done"] = again.guard.restore()
        found["drawn"] = torch.equal(torch.get_rng_state(), drawn)
        found["seen"] = torch.equal(model.module.seen, seen)
        again.end()
    return found


def rank0_restore(out: Path, loop: str) -> dict[str, Any]:
    """Only rank 0 restores before the first step; rank 1 begins to train."""
    model, optimizer = built()
    running = Loop(loop, model, optimizer, replace(ALL_COME, run_dir=out / "rank0_restore"))
    refused = ""
    try:
        if dist.get_rank() == 0:
            assert running.guard is not None
            running.guard.restore()
    except StoreError as why:
        refused = str(why)
    for step in range(STEPS):
        running.step(data(step))
    return {**running.end(), "refused": refused}


def rank0_save_bad(out: Path, loop: str) -> dict[str, Any]:
    """Only rank 0 has a folder, and saves right after a fused step that was bad."""
    model, optimizer = built(fused=True)
    folder = out / f"rank0_save_bad-{loop}" if dist.get_rank() == 0 else None
    running = Loop(loop, model, optimizer, replace(ALL_COME, run_dir=folder))
    assert running.guard is not None
    saved = []
    for step in range(STEPS):
        running.step(data(step, bad=here(step)))
        if dist.get_rank() == 0 and step in (BAD_STEP, STEPS - 1):
            saved.append(running.guard.save())
        dist.barrier()
    return {**running.end(), "saved": saved}


def rank0_reads() -> dict[str, Any]:
    """A fused step is bad, and only rank 0 looks at its result; then all reduce a metric."""
    model, optimizer = built(fused=True)
    running = Loop("step", model, optimizer, ALL_COME)
    assert running.guard is not None
    seen = []
    for step in range(STEPS):
        result = running.step(data(step, bad=here(step)))
        if dist.get_rank() == 0:
            seen.append((result.committed, len(running.guard.incidents)))
        dist.all_reduce(torch.ones(()))
    return {**running.end(), "seen": seen}


def joined(loop: str) -> dict[str, Any]:
    """Rank 1 has more batches than rank 0, and the last of them is bad."""
    model, optimizer = built()
    running = Loop(loop, model, optimizer, NOT_ALL_COME)
    steps = STEPS if dist.get_rank() == BAD_RANK else 3
    with Join([model]):
        for step in range(steps):
            running.step(data(step, bad=step == 4))
    return running.end()


def local_step(loop: str) -> dict[str, Any]:
    """No exchange in backward; one rank has a bad step."""
    model, optimizer = built()
    running = Loop(loop, model, optimizer, NOT_ALL_COME)
    for step in range(STEPS):
        with model.no_sync() if step else nullcontext():
            running.step(data(step, bad=here(step)))
    return running.end()


def subgroup(loop: str) -> dict[str, Any]:
    """Two pairs of ranks train two models; a step of the second pair is bad."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    model, optimizer = built(group=pairs[mine])
    running = Loop(loop, model, optimizer, ALL_COME)
    for step in range(STEPS):
        bad = dist.get_rank() == 3 and step == BAD_STEP
        running.step(data(step, bad=bad))
    out = running.end()
    del model, running, pairs
    return out


SCENARIOS: dict[str, Callable[..., dict[str, Any]]] = {
    function.__name__: function
    for function in (
        *(own_trouble, last_look, born, overflow, late, rank0, rank0_save, rank0_restore),
        *(rank0_save_bad, rank0_reads, joined, local_step, subgroup),
    )
}


def main(out: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    with gloo(60):
        for name in names:
            kind, *arguments = name.split("-")
            given: list[Any] = [out, *arguments] if kind in WRITING else list(arguments)
            began = time.monotonic()
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                found = SCENARIOS[kind](*given)
            found["told"] = [str(w.message) for w in said if issubclass(w.category, GuardDisarmed)]
            found["seconds"] = time.monotonic() - began
            torch.save(found, out / f"{name}.{dist.get_rank()}.pt")
            dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
