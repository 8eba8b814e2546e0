"""Every wrapper of torch around a model or an optimizer, pipeline stages and experts."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import stepguard
from distributed.launch import of_all, on_ranks, warned
from distributed.matrix import cell, refused
from distributed.runs import NO_COPY, Run, average, disarmings, is_finite, own_batch, state_of
from forked import FULL
from scenes import difference
from stepguard import Guard, GuardConfig, watch
from stepguard._errors import ConfigError

KEEPS_GROUP = True
WIDTH, STEPS, BAD_STEP, CLIP, DAMAGED_AT, SAVED_AT = 16, 8, 5, 0.05, 2, 3
KINDS = {
    "plain": "DDP",
    "static": "DDP, static graph",
    "unused": "DDP, unused parameters",
    "no_sync": "DDP, accumulation under `no_sync`",
    "compiled": "DDP, compiled",
    "inner": "DDP, guard on `ddp.module`",
    "bf16": "DDP, bf16 hook",
    "fp16": "DDP, fp16 hook",
    "powersgd": "DDP, PowerSGD hook",
    "zero": "`ZeroRedundancyOptimizer`",
    "gpipe": "pipeline (GPipe, 1F1B), `watch` on each stage",
    "1f1b": "pipeline (GPipe, 1F1B), `watch` on each stage",
    "expert": "expert parallel",
}
REFUSED = {
    "join": ("DDP, uneven inputs (`Join`)", "torch's Join"),
    "hook": ("post-local SGD (hook, `PostLocalSGDOptimizer`)", "post_localSGD_hook"),
    "average": ("post-local SGD (hook, `PostLocalSGDOptimizer`)", "PostLocalSGDOptimizer"),
}
"""Under these the ranks make steps of their own, or stop before the others."""


class Net(nn.Module):
    """A matrix that is worth compressing, a norm with statistics, a part that may go unused."""

    def __init__(self, *, unused: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, 1)
        self.spare = nn.Linear(WIDTH, 1) if unused else None

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.norm(self.first(inputs))))
        return out


def _bf16(state: Any, bucket: Any) -> Any:
    """torch's own hook, which DDP refuses by its name without CUDA, though it works."""
    return default_hooks.bf16_compress_hook(state, bucket)


# DDP reads the annotations as objects, and here they are text
_bf16.__annotations__ = dict(default_hooks.bf16_compress_hook.__annotations__)


class Wrapped:
    """One wrapper: what the loss goes through, what is stepped, what the guard is given."""

    fed_by = 1
    """The rank with the bad batch."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.kind = kind
        self.net: Any = Net(unused=kind == "unused")
        self.ddp = DistributedDataParallel(
            self.net, static_graph=kind == "static", find_unused_parameters=kind == "unused"
        )
        self.model: Any = self.ddp
        if kind == "compiled":
            self.model = torch.compile(self.ddp, backend="eager")
        self.optimizer = self._optimizer()
        self._add_hook()
        self.guarded = self.net if kind == "inner" else self.model

    def _optimizer(self) -> Any:
        parameters = self.net.parameters()
        if self.kind == "zero":
            from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns

            return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.01)
        inner = torch.optim.AdamW(parameters, lr=0.01)
        if self.kind == "average":
            from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
            from torch.distributed.optim import PostLocalSGDOptimizer

            return PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=2, warmup_steps=3))
        return inner

    def _add_hook(self) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

        if self.kind == "powersgd":
            memory = power_sgd.PowerSGDState(None, start_powerSGD_iter=2)
            self.ddp.register_comm_hook(memory, power_sgd.powerSGD_hook)
        elif self.kind == "hook":
            state = local_sgd.PostLocalSGDState(
                None, None, start_localSGD_iter=3, post_local_gradient_allreduce=False
            )
            self.ddp.register_comm_hook(state, local_sgd.post_localSGD_hook)
        elif self.kind in ("fp16", "bf16"):
            hook = default_hooks.fp16_compress_hook if self.kind == "fp16" else _bf16
            self.ddp.register_comm_hook(None, hook)

    def loss(self, model: Any, batch: tuple[Tensor, bool]) -> Tensor:
        inputs, reduced = batch
        with nullcontext() if reduced else self.ddp.no_sync():
            out: Tensor = model(inputs).square().mean()
        return out

    def batches(self, step: int, *, bad: bool) -> list[Any]:
        inputs = own_batch(step, 4, WIDTH)
        if bad:
            inputs[2, 0] = torch.nan
        if self.kind == "no_sync":
            return [(inputs[:2], False), (inputs[2:], True)]
        return [(inputs, True)]

    def run(self, loop: str, **settings: Any) -> Run:
        return Run(loop, self.model, self.optimizer, self.loss, guarded=self.guarded, **settings)

    def weight(self) -> Tensor:
        """The one that turns NaN."""
        weight: Tensor = self.net.last.weight
        return weight

    def state(self) -> dict[str, Any]:
        state = state_of(self.net, self.optimizer)
        for _, memory in self.ddp._comm_hooks:
            for name in ("error_dict", "p_memory_dict", "q_memory_dict"):
                for key, value in getattr(memory, name, {}).items():
                    state[f"hook {name} {key}"] = value.clone()
        return state


def square_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class ScheduledRun(Run):
    """A schedule of a pipeline runs the backward passes itself."""

    schedule: Any

    def step(self, *batches: Any) -> None:
        ((inputs, target),) = batches
        self.optimizer.zero_grad()
        if dist.get_rank() == 0:
            self.schedule.step(inputs)
        else:
            self.schedule.step(target=target)
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()


class Mixture(nn.Module):
    """A router that all ranks share and one expert on each; half of the rows go to each expert."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(4, 4)
        torch.manual_seed(10 + dist.get_rank())
        self.expert = nn.Linear(4, 4)
        for parameter in self.router.parameters():
            parameter.register_post_accumulate_grad_hook(average)

    def forward(self, inputs: Tensor) -> Tensor:
        from torch.distributed.nn.functional import all_to_all_single

        routed = self.router(inputs)
        here = all_to_all_single(torch.empty_like(routed), routed)
        out: Tensor = all_to_all_single(torch.empty_like(here), torch.tanh(self.expert(here)))
        return out


class OwnWeights:
    """Pipeline stages or experts: each rank has weights of its own."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.fed_by = 1 if kind == "expert" else 0
        torch.manual_seed(10 + dist.get_rank())
        stage = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.net: nn.Module = Mixture() if kind == "expert" else stage
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)

    def run(self, loop: str, **settings: Any) -> Run:
        if self.kind == "expert":
            loss = lambda model, batch: square_error(model(batch[0]), batch[1])  # noqa: E731
            return Run(loop, self.net, self.optimizer, loss, **settings)
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        run = ScheduledRun(loop, self.net, self.optimizer, **settings)
        stage = PipelineStage(self.net, dist.get_rank(), 2, torch.device("cpu"))
        make = ScheduleGPipe if self.kind == "gpipe" else Schedule1F1B
        run.schedule = make(stage, n_microbatches=2, loss_fn=square_error)
        return run

    def batches(self, step: int, *, bad: bool) -> list[Any]:
        # the data of a pipeline is the same on both ranks: one feeds it, the other compares
        rank = dist.get_rank() if self.kind == "expert" else 0
        inputs, target = own_batch(step, 8, 4, rank=rank).chunk(2)
        if bad:
            inputs[3, 0] = torch.nan
        return [(inputs, target)]

    def weight(self) -> Tensor:
        return list(self.net.parameters())[-1]

    def state(self) -> dict[str, Any]:
        return state_of(self.net, self.optimizer)


def engine(kind: str) -> Wrapped | OwnWeights:
    return OwnWeights(kind) if kind in ("gpipe", "1f1b", "expert") else Wrapped(kind)


def trained(kind: str, loop: str, *, bad: bool = False, **settings: Any) -> tuple[Any, Run]:
    """One rank's batch is bad; bare, the same run without that step."""
    made = engine(kind)
    with warned() as said, made.run(loop, **settings) as run:
        for step in range(STEPS):
            if loop == "bare" and bad and step == BAD_STEP:
                continue
            here = bad and dist.get_rank() == made.fed_by and step == BAD_STEP
            run.step(*made.batches(step, bad=here))
    assert loop == "bare" or (run.armed and disarmings(said) == [])
    return made, run


@cache
def bare_state(kind: str, *, bad: bool = False, clip: float | None = None) -> dict[str, Any]:
    """Where the loop ends without a guard."""
    made, _ = trained(kind, "bare", bad=bad, clip=clip)
    state: dict[str, Any] = made.state()
    return state


def cells(*columns: str, loops: tuple[str, ...] = ("step", "watch")) -> list[Any]:
    """One case for each wrapper, with the next of the loops; with both if STEPGUARD_FULL=1."""
    cases: list[Any] = []
    for number, (kind, title) in enumerate(KINDS.items(), columns == ("NaN",)):
        turn = loops if FULL else (loops[number % len(loops)],)
        marks = [cell(title, column) for column in columns]
        for loop in ("watch",) if kind in ("gpipe", "1f1b") else turn:
            cases.append(pytest.param(kind, loop, marks=marks, id=f"{kind}-{loop}"))
    return cases


STEPPED = ("step",)
"""One loop is enough: the two share this code."""


@on_ranks(2)
@pytest.mark.parametrize(("kind", "loop"), cells("healthy"))
def test_healthy_run_is_bit_identical_to_bare(kind: str, loop: str) -> None:
    made, run = trained(kind, loop)
    assert difference(made.state(), bare_state(kind)) == ""
    assert run.told == []


@on_ranks(2)
@pytest.mark.parametrize(("kind", "loop"), cells("NaN"))
def test_bad_batch_of_one_rank_costs_that_step_only(kind: str, loop: str) -> None:
    made, run = trained(kind, loop, bad=True)
    assert difference(made.state(), bare_state(kind, bad=True)) == ""
    (incident,) = run.incidents
    assert incident.step == BAD_STEP
    assert incident.decision is not None and incident.decision.action == "skip"
    assert incident.origin is not None and incident.origin.rank == made.fed_by
    if isinstance(made, Wrapped):
        assert incident.reading.bad_ranks == (1,)
    else:
        assert incident.origin.phase == "input"


@on_ranks(2)
@pytest.mark.parametrize(("kind", "loop"), cells("clip", loops=STEPPED))
def test_clipping_is_that_of_a_bare_loop(kind: str, loop: str) -> None:
    made, _ = trained(kind, loop, clip=CLIP)
    assert difference(made.state(), bare_state(kind, clip=CLIP)) == ""


@on_ranks(2)
@pytest.mark.parametrize(("kind", "loop"), cells("save", "restore", loops=STEPPED))
def test_restored_run_goes_on_as_the_one_that_was_saved(kind: str, loop: str, folder: Path) -> None:
    first = engine(kind)
    with first.run(loop, run_dir=folder, locate=False) as run:
        for step in range(STEPS):
            if step == SAVED_AT:
                path = run.guard.save()
                assert path is not None and of_all(path) == [path, path]
            run.step(*first.batches(step, bad=False))
    assert run.armed
    again = engine(kind)
    with again.run(loop, run_dir=folder, locate=False) as run:
        with torch.no_grad():
            for parameter in again.net.parameters():
                parameter.zero_()
        if kind == "powersgd":
            # its buckets are rebuilt after the first step, and keep no memory before that
            run.step(*again.batches(0, bad=False))
        assert run.guard.restore() == SAVED_AT
        for step in range(SAVED_AT, STEPS):
            run.step(*again.batches(step, bad=False))
    assert difference(again.state(), first.state()) == ""


@on_ranks(2)
@pytest.mark.parametrize(("kind", "loop"), cells("rewind", loops=STEPPED))
def test_nan_in_a_weight_of_one_rank_is_undone_on_all(kind: str, loop: str) -> None:
    made = engine(kind)
    settings: dict[str, Any] = {"snapshot_every": 1, "probation": 1}
    if isinstance(made, Wrapped):
        settings["policy"] = NO_COPY
    with made.run(loop, **settings) as run:
        for step in range(STEPS):
            if step == DAMAGED_AT and dist.get_rank() == 1:
                with torch.no_grad():
                    made.weight().fill_(torch.nan)
            run.step(*made.batches(step, bad=False))
    (incident,) = run.incidents
    assert incident.step == DAMAGED_AT and run.armed
    assert incident.decision is not None and incident.decision.action == "rewind"
    assert incident.origin is not None and incident.origin.rank == 1
    if isinstance(made, Wrapped):
        assert incident.origin.tensor == "param:last.weight"
        assert difference(made.state(), bare_state(kind)) == ""
    else:
        assert str(incident.origin.tensor).startswith("param:") and is_finite(made.state())


@on_ranks(2)
@pytest.mark.parametrize(("kind", "loop"), cells("signal", loops=STEPPED))
def test_sigterm_ends_all_ranks_with_a_whole_checkpoint(kind: str, loop: str, folder: Path) -> None:
    made = engine(kind)
    with (
        pytest.raises(SystemExit) as ended,
        made.run(loop, run_dir=folder, locate=False) as run,
    ):
        for step in range(STEPS):
            if step == 2:
                run.guard.save()
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            run.step(*made.batches(step, bad=False))
        # the loop is shorter than ranks take to agree on a step: then it acts at the end
    dist.barrier()
    assert ended.value.code == 143 and stepguard.verify(folder / "checkpoints").ok


@on_ranks(2)
def test_model_that_is_wrapped_after_its_guard_was_built_is_refused() -> None:
    net = Net(unused=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Guard(net, optimizer, config=GuardConfig(terminal="quiet")) as guard:
        wrapper = DistributedDataParallel(net)
        with pytest.raises(ConfigError, match="after its guard was built; wrap it first"):
            guard.step(lambda x: wrapper(x).square().mean(), torch.ones(2, WIDTH))


@on_ranks(2)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=refused(title)) for kind, (title, _) in REFUSED.items()]
)
def test_ranks_that_do_not_make_every_step_together_are_refused(kind: str) -> None:
    wrapped = Wrapped(kind)
    with (
        Join([wrapped.ddp]) if kind == "join" else nullcontext(),
        pytest.raises(ConfigError) as raised,
    ):
        Guard(wrapped.guarded, wrapped.optimizer, config=GuardConfig(terminal="quiet"))
    assert REFUSED[kind][1] in str(raised.value)


@pytest.mark.parametrize(
    ("package", "name"),
    [
        pytest.param("deepspeed", "DeepSpeed", marks=refused("DeepSpeed")),
        pytest.param("megatron", "Megatron", marks=refused("Megatron")),
    ],
)
@pytest.mark.parametrize("make", [Guard, watch])
def test_engine_with_an_update_of_its_own_is_refused(make: Any, package: str, name: str) -> None:
    # the packages need a GPU; a guard tells them by the package of their classes
    kind = type(f"{name}Engine", (nn.Linear,), {"__module__": f"{package}.runtime"})
    model = kind(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=f"{name}Engine is {name}'s: .*stepguard.verify"):
        make(model, optimizer)
