"""Ranks that do not all come: nobody hangs, and guarded weights stay finite."""

from __future__ import annotations

import time
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from distributed.launch import of_all, on_ranks, warned
from distributed.runs import LOOPS, Run, average, disarmings, is_finite, own_batch
from pairwise import pairwise
from scenes import difference
from stepguard import StoreError
from stepguard.checkpoints import Store, read_seal
from stepguard.ranks import agreement as rank_agreement

FEATURES, STEPS, BAD_STEP, BAD_RANK = 4, 6, 2, 1
WRAPS = ("ddp", "manual")
BOTH = list(product(LOOPS, WRAPS))
SHORT = {"agree_timeout": 0.5}
"""Where not all ranks come."""


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
    inputs = own_batch(step, 3, FEATURES)
    if bad:
        inputs[0, 0] = torch.nan
    return inputs


def here(step: int) -> bool:
    return dist.get_rank() == BAD_RANK and step == BAD_STEP


def built(
    wrap: str = "ddp", *, fused: bool = False, group: Any = None, sentinel: bool = False
) -> Any:
    torch.manual_seed(0)
    model = Noted(sentinel=sentinel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    if wrap == "ddp":
        return DistributedDataParallel(
            model, broadcast_buffers=False, process_group=group
        ), optimizer
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)
    return model, optimizer


def updates(optimizer: Any) -> int:
    return int(max(float(state["step"]) for state in optimizer.state.values()))


def assert_same_weights(run: Run) -> None:
    assert difference(run.weights(), of_all(run.weights())[0]) == ""


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "loop", "wrap"), pairwise(product(["none", "buffer", "rate"], LOOPS, WRAPS))
)
def test_what_one_rank_sees_is_an_incident_on_all(kind: str, loop: str, wrap: str) -> None:
    """A plain buffer or a learning rate turns NaN; one that is infinite on purpose does not."""
    model, optimizer = built(wrap, sentinel=True)
    inner = model.module if wrap == "ddp" else model
    with Run(loop, model, optimizer) as run:
        for step in range(STEPS):
            inner.spoil = kind == "buffer" and here(step)
            if kind == "rate" and here(step):
                optimizer.param_groups[0]["lr"] = torch.nan
            run.step(data(step))
            optimizer.param_groups[0]["lr"] = 0.01
    kinds = {"buffer": "nonfinite_buffer", "rate": "lr_mismatch"}
    expected = [] if kind == "none" else [(BAD_STEP, kinds[kind], (BAD_RANK,))]
    assert [told[:3] for told in run.told] == expected
    assert updates(optimizer) == STEPS - len(expected) and run.armed
    assert_same_weights(run)


@on_ranks(2)
@pytest.mark.parametrize(
    ("loop", "wrap", "who"), [*((*both, "one") for both in BOTH), ("step", "ddp", "all")]
)
def test_weights_that_turn_nan_after_the_last_step(loop: str, wrap: str, who: str) -> None:
    model, optimizer = built(wrap)
    bad = who == "all" or dist.get_rank() == BAD_RANK
    with Run(loop, model, optimizer, **({} if who == "all" else SHORT)) as run:
        for step in range(STEPS):
            run.step(data(step))
        if bad:
            with torch.no_grad():
                next(model.parameters()).fill_(torch.nan)
    if who == "all":
        assert [told[3] for told in run.told] == ["rewind"] and is_finite(run.weights())
    else:
        # told by that rank alone: the other one waits for nobody
        assert [told[1] for told in run.told] == (["nonfinite_parameter"] if bad else [])
        assert run.armed


@on_ranks(2)
@pytest.mark.parametrize("loop", LOOPS)
def test_update_that_makes_nan_on_one_rank_is_undone_on_all(loop: str) -> None:
    """A half-precision weight of one rank overflows in the update, as one shard of many may."""
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 1, bias=False).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before: dict[str, Tensor] = {}

    def loss_of(net: Any, scale: Tensor) -> Tensor:
        return (net.weight.float() * scale).sum()

    with Run(loop, model, optimizer, loss_of) as run:
        for step in range(STEPS):
            if here(step):
                with torch.no_grad():
                    model.weight.fill_(65504.0)
            if step == BAD_STEP:
                before = run.weights()
            run.step(torch.tensor(-60000.0 if here(step) else 0.0))
    assert run.told == [(BAD_STEP, "nonfinite_parameter", (BAD_RANK,), "undo")] and run.armed
    assert difference(run.weights(), before) == ""


@on_ranks(2)
@pytest.mark.parametrize(
    ("loop", "who", "kind"), pairwise(product(LOOPS, ["one", "all"], ["plain", "fused"]))
)
def test_loss_that_overflows_in_its_last_sum_is_a_step(loop: str, who: str, kind: str) -> None:
    """Losses in float16 overflow in their sum; each gradient is finite."""
    large = 40.0 if who == "all" or dist.get_rank() == BAD_RANK else 1.0

    def loss_of(model: Any, batch: Tensor) -> Tensor:
        return (model(batch.half()) - (batch * large).half()).square().sum()

    ends = []
    for how in ("bare", loop):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(FEATURES, FEATURES).half())
        make = torch.optim.AdamW if kind == "fused" else torch.optim.SGD
        optimizer = make(model.parameters(), lr=1e-3, fused=kind == "fused")
        with Run(how, model, optimizer, loss_of) as run:
            for step in range(STEPS):
                run.step(own_batch(step, 64, FEATURES))
        ends.append(run)
    bare, run = ends
    assert run.losses.count(torch.inf) == (0 if large == 1.0 else STEPS)
    assert run.told == [] and run.armed
    assert difference(run.weights(), bare.weights()) == ""
    assert_same_weights(run)


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


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "loop"),
    [
        *(("update", loop) for loop in LOOPS),
        *((kind, "watch") for kind in ("rate", "fused_rate", "gradient")),
    ],
)
def test_what_one_rank_finds_after_the_exchange_takes_all_of_them_back(
    kind: str, loop: str
) -> None:
    model, optimizer = built(fused=kind == "fused_rate")
    if kind == "update":
        optimizer = OneRankFails(model.parameters(), lr=0.01)
    with Run(loop, model, optimizer, snapshot_every=1) as run:
        for step in range(STEPS):
            if kind == "update":
                SPOILED_UPDATE["now"] = here(step)
                run.step(data(step))
                continue
            optimizer.zero_grad()
            model(data(step)).square().mean().backward()
            if here(step) and kind == "gradient":
                grad = next(p.grad for p in model.parameters() if p.grad is not None)
                grad.view(-1)[0] = torch.nan
            elif here(step):
                optimizer.param_groups[0]["lr"] = torch.nan
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.01
    assert run.armed and is_finite(run.weights())
    last, _, ranks, action = run.told[-1]
    assert (last, ranks, action) == (BAD_STEP + 1, (BAD_RANK,), "rewind")
    own = [BAD_STEP] if dist.get_rank() == BAD_RANK else []
    assert [told[0] for told in run.told] == [*own, BAD_STEP + 1]
    assert_same_weights(run)


@on_ranks(2)
@pytest.mark.parametrize(("what", "wrap"), list(product(["closed", "guard"], WRAPS)))
def test_guard_that_is_left_alone_says_so_and_takes_no_nan(what: str, wrap: str) -> None:
    """Only rank 0 has a guard, or keeps it, and a step is bad; the next guards are not shifted."""
    rank = dist.get_rank()
    model, optimizer = built(wrap)
    loop = "watch" if what == "closed" or rank == 0 else "bare"
    with warned() as said, Run(loop, model, optimizer, **SHORT) as run:
        for step in range(STEPS):
            if what == "closed" and step == 1 and rank == BAD_RANK:
                run.guard.close()
            run.step(data(step, bad=step == BAD_STEP and rank == 0))
    if rank == 0:
        assert is_finite(run.weights()) and not run.armed
        (told,) = disarmings(said)
        assert "rank 1" in told
        assert any(
            word in told for word in ("did not arrive", "did not join", "has closed its guard")
        )
    if (what, wrap) == ("guard", "manual"):
        with Run("step", *built(wrap)) as run:
            for step in range(BAD_STEP + 1):
                run.step(data(step, bad=here(step)))
        assert [told[2] for told in run.told] == [(BAD_RANK,)] and run.armed


@on_ranks(2)
@pytest.mark.parametrize(("how", "loop"), list(product(["joined", "local"], LOOPS)))
def test_ranks_that_make_steps_of_their_own_are_not_guarded(how: str, loop: str) -> None:
    """Rank 1 has more batches than rank 0, the last one bad; or backward exchanges nothing."""
    model, optimizer = built()
    steps = 3 if how == "joined" and dist.get_rank() != BAD_RANK else STEPS
    with (
        warned() as said,
        Run(loop, model, optimizer, **SHORT) as run,
        Join([model]) if how == "joined" else nullcontext(),
    ):
        for step in range(steps):
            with model.no_sync() if how == "local" and step else nullcontext():
                bad = step == 4 if how == "joined" else here(step)
                run.step(data(step, bad=bad))
    assert not run.armed and is_finite(run.weights())
    why = "torch's Join" if how == "joined" else "reduced no gradients (no_sync, local SGD)"
    assert any(why in told for told in disarmings(said))


# --- one rank asks: `if rank == 0: guard.save()`


def refused_restore(run: Run) -> str:
    try:
        run.guard.restore()
    except StoreError as why:
        return str(why)
    return ""


@on_ranks(2)
@pytest.mark.parametrize("wrap", WRAPS)
def test_one_rank_saves_what_all_hold_and_says_what_is_missing(wrap: str, folder: Path) -> None:
    rank, run_dir = dist.get_rank(), folder / "run"
    model, optimizer = built(wrap)
    inner = model.module if wrap == "ddp" else model
    inner.seen.fill_(1.0 + rank)
    alone = None
    with Run("step", model, optimizer, run_dir=run_dir, agree_timeout=3.0) as run:
        run.step(data(0))
        with mock.patch.object(rank_agreement.time, "sleep", wraps=time.sleep) as waits:
            if rank == 0:
                alone = run.guard.save()
        for step in range(1, STEPS):
            run.step(data(step))
        assert run.guard.save() is not None and run.armed
        drawn, seen = torch.get_rng_state(), inner.seen.clone()
        dist.barrier()
        if wrap == "manual":
            # nothing keeps the weights of such ranks equal
            assert alone is None
            told = (run_dir / "journal.jsonl").read_text()
            assert "all ranks have to call guard.save(), because nothing keeps" in told
        else:
            held = Store(run_dir / "checkpoints").open().facts
            assert held["rng"].keys() == {"0", "1"}
            assert "model/seen" in held["ranks"]["1"]["has"]
            # made by one rank, loaded by all
            assert run.guard.restore(run_dir / "checkpoints" / "step-1") == 1
            assert_same_weights(run)
        if rank == 0 and wrap == "ddp":
            assert alone is not None and alone.name == "step-1" and waits.call_count == 0
            assert read_seal(alone).health.missing == "random numbers, buffers of rank 1"
        if rank == 0:
            assert "rank 1 did not arrive" in refused_restore(run)
        dist.barrier()
    if wrap == "ddp":
        torch.manual_seed(1)
        model, optimizer = built(wrap)
        with Run("step", model, optimizer, run_dir=run_dir) as again:
            assert again.guard.restore() == STEPS
            assert torch.equal(torch.get_rng_state(), drawn)
            assert torch.equal(model.module.seen, seen)


@on_ranks(2)
@pytest.mark.parametrize("loop", LOOPS)
def test_save_on_one_rank_leaves_a_bad_fused_step_to_all_of_them(loop: str, folder: Path) -> None:
    rank = dist.get_rank()
    model, optimizer = built(fused=True)
    saved = []
    with Run(loop, model, optimizer, run_dir=folder if rank == 0 else None) as run:
        for step in range(STEPS):
            run.step(data(step, bad=here(step)))
            if rank == 0 and step in (BAD_STEP, STEPS - 1):
                saved.append(run.guard.save())
            dist.barrier()
    if rank == 0:
        early, last = saved
        # a watched loop whose forward writes buffers has all ranks deal with it inside the step
        assert (early is None) == (loop == "step") and last.name == f"step-{STEPS}"
    assert run.told == [(BAD_STEP, "nonfinite_input", (BAD_RANK,), "skip")] and run.armed
    assert_same_weights(run)


@on_ranks(2)
@pytest.mark.parametrize("loop", LOOPS)
def test_restore_on_one_rank_is_refused_once_another_trains(loop: str, folder: Path) -> None:
    model, optimizer = built()
    with Run(loop, model, optimizer, run_dir=folder) as run:
        if dist.get_rank() == 0:
            assert "rank 1 has begun to train, so it did not arrive" in refused_restore(run)
        for step in range(STEPS):
            run.step(data(step))
    assert run.armed
    assert_same_weights(run)


@on_ranks(2)
def test_result_of_a_fused_step_may_be_read_on_one_rank() -> None:
    model, optimizer = built(fused=True)
    with Run("step", model, optimizer) as run:
        for step in range(STEPS):
            result = run.guard.step(lambda b: model(b).square().mean(), data(step, bad=here(step)))
            if dist.get_rank() == 0:
                assert result.committed == (step != BAD_STEP)
                assert len(run.guard.incidents) <= 1
            dist.all_reduce(torch.ones(()))
    assert [told[:3] for told in run.told] == [(BAD_STEP, "nonfinite_input", (BAD_RANK,))]
    assert run.armed
    assert_same_weights(run)


@on_ranks(4)
@pytest.mark.parametrize("loop", LOOPS)
def test_pairs_of_ranks_decide_for_themselves(loop: str) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank = dist.get_rank()
    model, optimizer = built(group=pairs[rank // 2])
    with Run(loop, model, optimizer) as run:
        for step in range(STEPS):
            run.step(data(step, bad=rank == 3 and step == BAD_STEP))
    expected = [(BAD_STEP, "nonfinite_input", (3,))] if rank > 1 else []
    assert [told[:3] for told in run.told] == expected and run.armed
    assert updates(optimizer) == STEPS - len(expected)
    weights = of_all(run.weights())
    assert difference(weights[rank], weights[rank - rank % 2]) == ""
