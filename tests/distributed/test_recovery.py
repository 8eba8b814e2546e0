"""Two real processes rewind together, save together, and get back what each had."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from distributed.launch import Case, of_all, on_ranks, run_cases
from distributed.runs import LOOPS, NO_COPY, Run, own_batch
from pairwise import pairwise
from scenes import difference
from settings_of import config_of
from stepguard import Guard
from stepguard._errors import StepguardError, StoreError
from stepguard.checkpoints import Store
from stepguard.journal import read_run
from stepguard.ledger import read_ledger
from stepguard.report.phrases import next_commands

FEATURES, STEPS, HARM_AT, STOP_AT, BAD_RANK = 6, 20, 14, 9, 1
BOTH = list(product(LOOPS, ("ddp", "manual")))
SETTINGS: dict[str, Any] = {
    "locate": False,
    "snapshot_every": 4,
    "probation": 6,
    "policy": NO_COPY,
}


def made(loop: str, wrap: str, **settings: Any) -> Run:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Linear(FEATURES, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(dist.get_rank() + 7)  # each rank drops out elements of its own
    if wrap == "ddp":
        model = DistributedDataParallel(model)
    return Run(loop, model, optimizer, by_hand=wrap == "manual", **{**SETTINGS, **settings})


@torch.no_grad()
def damage(model: nn.Module) -> None:
    if dist.get_rank() == BAD_RANK:
        next(iter(model.parameters()))[0, 0] = torch.nan


def train(run: Run, steps: range, harm: int = -1) -> None:
    for step in steps:
        if step == harm:
            damage(run.model)
        run.step(own_batch(step, 4, FEATURES))


@cache
def never(wrap: str) -> dict[str, Any]:
    with made("bare", wrap) as run:
        train(run, range(STEPS))
    return run.state()


@on_ranks(2)
@pytest.mark.parametrize(("loop", "wrap"), BOTH)
def test_ranks_rewind_together_and_end_with_the_same_weights(loop: str, wrap: str) -> None:
    with made(loop, wrap) as run:
        train(run, range(STEPS), HARM_AT)
    (incident,) = run.incidents
    decision = incident.decision
    assert decision is not None and decision.action == "rewind" and run.armed
    told, state = (decision.action, decision.rewound_to, decision.data), run.state()
    first = of_all((told, state))[0]
    assert told == first[0] and difference(state, first[1]) == ""
    if loop == "step":
        # the steps since are run again, as they were
        assert decision.data == "repeat"
        assert difference(state, never(wrap)) == ""


@on_ranks(2)
@pytest.mark.parametrize(("loop", "wrap"), [("step", "manual"), ("watch", "ddp")])
def test_ranks_with_different_clocks_share_snapshots_of_the_same_steps(
    loop: str, wrap: str
) -> None:
    """Copying takes far longer on one rank than on the other, which keeps snapshots more often."""
    harm = 132
    with made(loop, wrap, snapshot_every="auto", probation=20) as run:
        cadence = run.guard._rewinder.snapshots.cadence
        took = cadence.took

        def paced_took(step: int, seconds: float) -> None:
            took(step, seconds)
            cadence._width = 64 if dist.get_rank() == BAD_RANK else 8

        cadence.took = paced_took  # type: ignore[method-assign]
        train(run, range(harm + 6), harm)
        del cadence.took
    (incident,) = run.incidents
    assert incident.decision is not None and run.armed
    # the newest one on the grids of 8 and of 64 steps
    assert (incident.decision.action, incident.decision.rewound_to) == ("rewind", 128)
    assert difference(run.state(), of_all(run.state())[0]) == ""


@on_ranks(2)
@pytest.mark.parametrize(("loop", "wrap"), BOTH)
def test_resumed_ranks_end_where_ranks_that_never_stopped_end(
    loop: str, wrap: str, folder: Path
) -> None:
    with made(loop, wrap, run_dir=folder) as run:
        train(run, range(STOP_AT))
        path = run.guard.save()
    assert path is not None and of_all(path) == [path, path]
    with made(loop, wrap, run_dir=folder) as run:
        torch.manual_seed(99)
        assert run.guard.restore() == STOP_AT
        train(run, range(STOP_AT, STEPS))
    assert run.armed and difference(run.state(), never(wrap)) == ""


@on_ranks(2)
@pytest.mark.parametrize(("loop", "wrap"), BOTH)
def test_state_that_is_bad_on_one_rank_is_not_saved(loop: str, wrap: str, folder: Path) -> None:
    with made(loop, wrap, run_dir=folder) as run:
        train(run, range(4))
        damage(run.model)
        saved = run.guard.save()
        for parameter in run.model.parameters():
            torch.nan_to_num_(parameter.data)
    if wrap == "manual" or dist.get_rank() == BAD_RANK:
        assert saved is None
    else:
        # the other replica is whole
        assert saved is not None
        opened = Store(saved.parent).open()
        assert opened.step == 4 and opened.health.missing == "random numbers of rank 1"
        assert all(tensor.isfinite().all() for tensor in opened.tensors.values())


@on_ranks(2)
@pytest.mark.parametrize(("loop", "wrap"), BOTH)
def test_checkpoints_taken_by_themselves_hold_every_ranks_random_numbers(
    loop: str, wrap: str, folder: Path
) -> None:
    with made(loop, wrap, run_dir=folder, checkpoint_every=7) as run:
        train(run, range(STEPS))
    dist.barrier()
    with made(loop, wrap, run_dir=folder) as run:
        done = run.guard.restore()
        assert done in (7, 14)
        train(run, range(done, STEPS))
    assert run.armed and difference(run.state(), never(wrap)) == ""


@on_ranks(2)
@pytest.mark.parametrize(("loop", "wrap"), BOTH)
def test_damage_that_comes_back_stops_all_ranks_together(loop: str, wrap: str) -> None:
    with made(loop, wrap) as run:
        for step in range(STEPS + 20):
            train(run, range(step, step + 1), step if step >= HARM_AT else -1)
    rewinds = run.guard._context.budget.rewinds
    assert run.halted is not None and 1 <= rewinds <= 3
    assert of_all((run.halted, rewinds)) == [(run.halted, rewinds)] * 2


# --- ranks with weights of their own: each gets back what it had, or all are refused

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


SHAPES: dict[str, Shape] = {"expert": expert, "stage": stage, "replica": replica}


def run_through(model: Any, x: Tensor) -> Tensor:
    for part in list(model.values()) if isinstance(model, nn.ModuleDict) else [model]:
        x = part(x)
    return x.square().mean()


def started(model: nn.Module, folder: Path, loop: str = "step", **settings: Any) -> Run:
    same = isinstance(model, DistributedDataParallel)
    rate = 0.01 if same else 0.01 * (1 + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    settings = {"locate": False, "snapshot_every": 2, "probation": 2, **settings}
    return Run(loop, model, optimizer, run_through, run_dir=folder, **settings)


def state_now(run: Run) -> dict[str, Any]:
    return {**run.state(), "lr": run.optimizer.param_groups[0]["lr"]}


def notes(folder: Path, words: str) -> list[str]:
    """What the journal says about this."""
    said = [str(note.get("summary", "")) for note in read_run(folder).notes]
    return [note for note in said if words in note]


@on_ranks(2)
@pytest.mark.parametrize(
    ("shape", "loop", "how"),
    [
        *pairwise(product(["expert", "stage"], LOOPS, ["asked", "scheduled"])),
        ("replica", "step", "asked"),
        ("replica", "watch", "scheduled"),
    ],
)
def test_every_rank_gets_its_own_weights_back_and_replicas_are_kept_once(
    shape: str, loop: str, how: str, folder: Path
) -> None:
    rank = dist.get_rank()
    every = 4 if how == "scheduled" else None
    with started(SHAPES[shape](rank), folder, loop, checkpoint_every=every) as run:
        for step in range(7):
            if step == 4:
                then = state_now(run)
                assert how == "scheduled" or run.guard.save() is not None
            run.step(own_batch(step, 6, 4))
    dist.barrier()
    fresh = SHAPES[shape](rank)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    with started(fresh, folder, loop) as run:
        assert run.guard.restore() == 4
        back = state_now(run)
    assert run.armed
    dist.barrier()
    kept = Store(folder / "checkpoints").open("last-good").tensors
    own = [name for name in kept if name.startswith("rank/")]
    if shape == "replica":
        assert own == []
        if rank == 0:
            assert difference(then, back) == ""
        return
    assert own and difference(then, back) == ""
    first, second = of_all(back)
    assert difference(first, second) != ""
    (told,) = notes(folder, "the ranks hold different values")
    assert "model/" in told


@on_ranks(2)
def test_nothing_to_restore_is_the_documented_error_on_every_rank(folder: Path) -> None:
    with started(replica(0), folder) as run:
        with pytest.raises(StoreError) as raised:
            run.guard.restore()
        for step in range(2):
            run.step(own_batch(step, 6, 4))
    assert run.armed and len(set(of_all(str(raised.value)))) == 1


@on_ranks(2)
def test_state_that_fits_one_rank_only_is_loaded_by_none(folder: Path) -> None:
    with started(nn.Sequential(nn.Linear(4, 4)), folder) as run:
        for step in range(3):
            run.step(own_batch(step, 6, 4))
        run.guard.save()
    dist.barrier()
    more = [nn.Linear(4, 4)] if dist.get_rank() else []
    with started(nn.Sequential(nn.Linear(4, 4), *more), folder) as run:
        before = state_now(run)
        with pytest.raises(StepguardError) as raised:
            run.guard.restore()
        assert difference(before, state_now(run)) == ""
    first, second = of_all(str(raised.value))
    assert first == f"rank 1: {second}"


# --- places in the data


def rows_seen(folder: str, rank: int, size: int, until: int | None) -> list[Any]:
    """Train on the rows of this rank: up to a save, or from where the checkpoint left off."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)  # the ranks stay equal
    config = config_of(terminal="quiet", locate=False, run_dir=Path(folder))
    data = TensorDataset(torch.arange(24.0))
    sampler: Any = DistributedSampler(data, size, rank, shuffle=False)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    seen: list[Any] = []
    with Guard(model, optimizer, config=config, loader=loader) as guard:
        if until is None:
            guard.restore()
        for (batch,) in guard.loader:
            guard.step(lambda x: model(x[:, None]).square().mean(), batch)
            seen.append(batch.tolist())
            if len(seen) == until:
                guard.save()
                break
    return seen


def rows_of_two(where: str, until: int | None) -> list[Any]:
    return rows_seen(where, dist.get_rank(), 2, until)


def test_data_goes_on_with_more_ranks_and_with_fewer(tmp_path: Path) -> None:
    one, two = str(tmp_path / "of_one"), str(tmp_path / "of_two")
    rows_seen(one, 0, 1, 3)
    written = Case("written", "rows_of_two", {"where": two, "until": 3})
    grown = Case("grown", "rows_of_two", {"where": one, "until": None})
    ends, said = run_cases("distributed.test_recovery", [written, grown], 2, tmp_path)
    assert not any(why for end in ends for why, _ in end), (ends, said)
    # a rank without a place in the data goes on where the others do
    first, second = (seen for _, seen in ends[1])
    assert first[0] == [12.0, 14.0] and second[0] == [13.0, 15.0]
    assert len(first) == len(second) == 3
    (told,) = notes(tmp_path / "of_one", "positions in the data for 1 rank;")
    assert "on rank 1 the data continues at batch 3 of pass 0" in told
    # fewer ranks than places
    assert rows_seen(two, 0, 1, None)[0] == [6.0, 7.0]
    (told,) = notes(tmp_path / "of_two", "positions in the data for 2 ranks; this run has 1")
    assert "some samples come twice" in told


BAD_ROWS = (17, 19, 25)
"""All on rank 1: ranks take every second row."""


def pass_over_rows(folder: Path, *, again: bool) -> tuple[list[int], list[Any]]:
    """The first row of each batch, and the rows of each incident."""
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    x[list(BAD_ROWS)] = math.nan
    rows = TensorDataset(x, torch.arange(64))
    loader = DataLoader(rows, 4, sampler=DistributedSampler(rows, shuffle=False))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    starts: list[int] = []
    with Run(
        "step",
        model,
        optimizer,
        lambda net, batch: net(batch[0]).square().mean(),
        loader=loader,
        run_dir=folder,
        probation=2,
    ) as run:
        if again:
            run.guard.restore()
        for x, numbers in run.guard.loader:
            starts.append(int(numbers[0]))
            run.step((x, numbers))
            if run.guard.steps == 1 and not again:
                assert run.guard.save() is not None
    assert run.armed
    return starts, [incident.origin and list(incident.origin.rows) for incident in run.incidents]


@on_ranks(2)
def test_every_rank_has_its_own_ledger_and_both_pass_over_the_same_batches(folder: Path) -> None:
    rank = dist.get_rank()
    _, rows = pass_over_rows(folder, again=False)
    # known on both; only one of them is to blame
    assert rows == [["row 17", "row 19"], ["row 25"]]
    starts, rows = pass_over_rows(folder, again=True)
    assert rows == []
    assert starts == [8 + rank, *(start + rank for start in (32, 40, 48, 56))]
    lost = [(17, 19), (25,)] if rank else [(16, 18, 20, 22), (24, 26, 28, 30)]
    entries = [(e.batch, e.indices, e.innocent, e.left_out) for e in read_ledger(folder, rank)[0]]
    assert entries == [(2 + n, each, not rank, "step") for n, each in enumerate(lost)]
    said = [str(note.get("summary")) for note in read_run(folder, rank).notes]
    skipped = "skipping batches 2-3 of pass 0: dropped before as SG101"
    assert [note for note in said if "skipping batch" in note] == [skipped]


# --- whom a bad step is put on


@on_ranks(2)
@pytest.mark.parametrize(("trouble", "loop"), list(product(["input", "transient"], LOOPS)))
def test_bad_step_is_put_on_the_rank_that_shows_it_again(
    trouble: str, loop: str, folder: Path
) -> None:
    bad_here = dist.get_rank() == BAD_RANK
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)))
    left = [trouble == "transient" and bad_here]

    def spoil(grad: Any) -> Any:
        # a hook of the tensor acts before the reduction; once: a replay does not show it
        now = left[0] and run.guard._context.step == 3
        left[0] = left[0] and not now
        return grad * torch.nan if now else grad

    hook = model.module[0].weight.register_hook(spoil)
    with started(model, folder, loop, locate=True, capsule="full") as run:
        for step in range(6):
            data = own_batch(step, 6, 4)
            if trouble == "input" and bad_here and step == 3:
                data[2] = torch.nan
            run.step(data)
    hook.remove()
    dist.barrier()
    (incident,) = run.incidents
    assert run.armed and incident.origin is not None
    if trouble == "transient":
        assert incident.origin.rank is None and incident.reading.bad_ranks == ()
        assert any("the rank it came from is not known" in text for text in incident.origin.remarks)
        assert difference(run.state(), of_all(run.state())[0]) == ""
        return
    assert incident.origin.rank == 1 and incident.reading.bad_ranks == (1,)
    if loop == "step":  # the guard does not run a watched step, so that has no capsule
        command = next_commands(incident)[0]
        assert command.startswith("stepguard replay ") and command.endswith("-rank1/capsule")
        assert Path(command.removeprefix("stepguard replay ")).is_dir()
