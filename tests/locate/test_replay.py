"""A replay runs the same step again, changes nothing, and counts only if it goes bad in the same
way: micro-batches, the model's part of a watched step, frames, buffers, exceptions, compiled code.
"""

from __future__ import annotations

import copy
import linecache
import math
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import forked
from process_group import part
from stepguard.locate import locate
from stepguard.locate.find_origin import frames_at_origin
from stepguard.locate.origins import (
    buffer_origin,
    place_exception,
    place_replayed_exception,
    traceback_origin,
)
from stepguard.locate.replay import (
    OUTSIDE_BACKWARD,
    OUTSIDE_BOTH,
    OUTSIDE_FORWARD,
    LocateBudget,
    ModelReplayer,
    Replayer,
)
from stepguard.records import Origin, Reading
from stepguard.state.batch import OUTPUT_GRADIENT, Step
from stepguard.state.buffers import BufferKeeper
from stepguard.state.isolation import untouched
from stepguard.state.rng import capture_rng

from .cases import BAD_GRADIENT, BAD_LOSS, noise, step_of, with_row
from .guarded import code, evidence, first_incident
from .guarded import noise as features
from .loop import Loop


class Busy(nn.Module):
    """Dropout, batch statistics, a counter, a power iteration: all that a forward can change."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8))
        self.bn = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.bn.train()
        return self.out(F.dropout(self.bn(self.fc(x)), 0.3))


def bad_step(scale: float = 1.0) -> tuple[Step, Reading]:
    torch.manual_seed(0)
    model = Busy()
    model.bn.eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.MSELoss()

    def loss_fn(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        batch["x"].mul_(1.0)
        return criterion(model(batch["x"]), batch["y"]) + random.random() * 0.0

    good = {"x": noise(6, 4), "y": noise(6, 1)}
    loss_fn(good).backward()
    optimizer.step()
    bad = {"x": noise(6, 4, seed=2), "y": noise(6, 1, seed=3)}
    bad["x"][2, 1] = math.nan
    model.bn.eval()
    keeper = BufferKeeper([model])
    keeper.remember()
    rng = capture_rng()
    optimizer.zero_grad()
    loss = loss_fn(bad)
    (loss * scale).backward()
    keeper.restore()
    model.bn.eval()
    step = Step(
        3, model, optimizer, {"criterion": criterion}, keeper, loss_fn, (bad,), [rng], scale
    )
    return step, Reading(step=3, loss=math.nan, micro_losses=(math.nan,), grads_finite=False)


def picture(step: Step) -> dict[str, Any]:
    """Everything that must not change, as bytes."""
    tensors = {f"p:{n}": p for n, p in step.model.named_parameters()}
    tensors |= {f"g:{n}": p.grad for n, p in step.model.named_parameters() if p.grad is not None}
    tensors |= {f"b:{n}": b for n, b in step.model.named_buffers()}
    tensors |= {f"x:{k}": v for k, v in step.micro_batches[0].items()}
    seen: dict[str, Any] = {
        k: t.detach().clone().view(torch.uint8).tolist() if t.dim() else t.item()
        for k, t in tensors.items()
    }
    seen["opt"] = str(copy.deepcopy(step.optimizer.state_dict()))
    seen["rng"] = torch.get_rng_state().tolist()
    seen["python"] = random.getstate()
    seen["training"] = [m.training for m in step.model.modules()]
    seen["grad objects"] = [id(p.grad) for p in step.model.parameters()]
    seen["buffer objects"] = [id(b) for b in step.model.buffers()]
    seen["autocast"] = torch.is_autocast_enabled("cpu")
    seen["grad mode"] = torch.is_grad_enabled()
    seen["hooks"] = [
        len(m._forward_hooks) + len(m._forward_pre_hooks) for m in step.model.modules()
    ]
    return seen


def test_locate_leaves_everything_bit_identical() -> None:
    step, reading = bad_step()
    before = picture(step)
    origin = locate(step, reading)
    assert origin.tensor == "batch:x" and origin.inputs[0].index == (2, 1)
    after = picture(step)
    assert [k for k in before if repr(before[k]) != repr(after[k])] == []


def test_global_module_hooks_are_gone_afterwards() -> None:
    from torch.nn.modules import module as registry

    before = len(registry._global_forward_hooks), len(registry._global_forward_pre_hooks)
    step, reading = bad_step()
    locate(step, reading)
    assert (len(registry._global_forward_hooks), len(registry._global_forward_pre_hooks)) == before


def test_an_optimizer_fused_into_the_backward_does_not_step_during_a_replay() -> None:
    step, reading = bad_step()
    fired = []
    for parameter in step.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: fired.append(p))
    locate(step, reading)
    assert fired == []
    next(step.model.parameters()).grad = None
    step.model.out(noise(2, 8)).sum().backward()
    assert len(fired) == 2, "the user's hooks work again"


def test_an_error_of_the_users_code_in_the_replay_gives_the_best_known_origin() -> None:
    step, reading = bad_step()

    def broken(batch: Any) -> torch.Tensor:
        raise KeyError("gone")

    step.loss_fn = broken
    before = picture(step)
    origin = locate(step, reading)
    assert origin.reproduced is None and origin.tensor == "batch:x"
    assert (origin.evidence.replay_error or "").startswith("KeyError")
    assert origin.remarks == (f"the replay failed: {origin.evidence.replay_error}",)
    assert repr(picture(step)) == repr(before)


def test_without_a_loss_function_the_scan_still_names_the_element() -> None:
    step, reading = bad_step()
    step.loss_fn = None
    origin = locate(step, reading)
    assert (origin.phase, origin.tensor, origin.reproduced, origin.method) == (
        "input",
        "batch:x",
        None,
        "scan",
    )
    assert origin.inputs[0].index == (2, 1)


def test_a_step_that_is_clean_when_replayed_is_not_reproduced() -> None:
    step, reading = bad_step()
    step.micro_batches[0]["x"].nan_to_num_(0.0)
    origin = locate(step, reading)
    assert origin.reproduced is False and origin.evidence.same_bits is True


def test_a_clean_step_that_does_not_repeat_itself_is_nondeterministic() -> None:
    step, reading = bad_step()
    step.micro_batches[0]["x"].nan_to_num_(0.0)
    steady: Any = step.loss_fn
    calls = iter(range(100))
    assert steady is not None
    step.loss_fn = lambda batch: steady(batch) * (1.0 + 1e-3 * next(calls))
    origin = locate(step, reading)
    assert origin.reproduced is False and origin.evidence.same_bits is False


def test_tests_of_the_guard_are_not_part_of_the_trace() -> None:
    model = nn.Linear(2, 1, bias=False)
    keeper = BufferKeeper([model])
    keeper.remember()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = Step(
        0,
        model,
        optimizer,
        {},
        keeper,
        lambda x: {"main": model(x).pow(2).mean()},
        (noise(3, 2),),
        [capture_rng()],
    )
    with untouched(step) as kept:
        traced = Replayer(step, kept).trace(0)
    calls = traced.calls
    assert traced.ran.clean and traced.ran.parts.keys() == {"main"}
    assert [c.op for c in calls if c.stage == "forward"] == ["aten.mm", "aten.pow", "aten.mean"]
    assert "aten.sum" not in {c.op for c in calls}


# --- the bad micro-batch, and steps that repeat their bits
# --------------------------------------------------------------------------------------------------


# --- the model's part of a watched step: made inside it, or came from outside
# --------------------------------------------------------------------------------------------------


BAD_WEIGHT = replace(BAD_GRADIENT, bad_grads=("weight",))


def watched(model: nn.Module, x: Tensor, gradient: Tensor | None) -> Step:
    """A step of which only the call `model(x)` is known, and the gradient of its output."""
    step = step_of(lambda batch: batch, model, x)
    step.loss_fn = None
    step.micro_batches = ({"x": x, OUTPUT_GRADIENT: {} if gradient is None else {"0": gradient}},)
    step.lines = ((__file__, 7),)

    def model_fn(batch: Any) -> tuple[list[Tensor], list[Tensor | None]]:
        return [model(batch["x"])], [batch[OUTPUT_GRADIENT].get("0")]

    step.model_fn = model_fn
    return step


def outside(step: Step, reading: Reading) -> Origin:
    with untouched(step) as keeper:
        return ModelReplayer(step, keeper).outside_model(reading)


def test_remarks_say_where_the_value_was_not_made() -> None:
    model = nn.Linear(3, 1)
    clean = watched(model, noise(2, 3), torch.ones(2, 1))
    assert outside(clean, BAD_LOSS).remarks == (OUTSIDE_FORWARD,)
    assert outside(clean, BAD_WEIGHT).remarks == (OUTSIDE_BOTH,)
    bad = watched(model, noise(2, 3), torch.full((2, 1), math.inf))
    assert outside(bad, BAD_WEIGHT).remarks == (OUTSIDE_BACKWARD,)


def test_caller_of_the_model_is_the_source_where_the_trace_has_none() -> None:
    step = watched(nn.Linear(3, 1), noise(2, 3), None)
    with untouched(step) as keeper:
        replayer = ModelReplayer(step, keeper)
        origin = replayer.with_caller(Origin(step=0, phase="input", tensor="batch:x"), 0)
        assert origin.source is not None and origin.source.endswith("test_replay.py:7")
        known = Origin(step=0, phase="forward", source="model.py:3")
        assert replayer.with_caller(known, 0) is known
        assert replayer.with_caller(Origin(step=0, phase="state"), 0).source is None


# --- a replay that stops where the first bad value is made
# --------------------------------------------------------------------------------------------------


def innermost(trace: TracebackType | None) -> TracebackType:
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def test_bad_gradient_stops_at_the_forward_line_behind_it() -> None:
    model = nn.Linear(3, 1, bias=False)

    def loss_fn(x: Tensor) -> Tensor:
        root = model(x).sum().sqrt()
        return root + model(x).pow(2).mean()

    step = step_of(loss_fn, model, torch.zeros(4, 3))
    stopped = innermost(frames_at_origin(step, BAD_GRADIENT))
    assert "root = " in linecache.getline(__file__, stopped.tb_lineno)


def test_clean_step_and_finite_reading_give_no_frames() -> None:
    model = nn.Linear(3, 1)
    step = step_of(lambda x: model(x).mean(), model, noise(4, 3))
    assert frames_at_origin(step, BAD_LOSS) is None
    finite = Reading(step=0, loss=1.0, micro_losses=(1.0,), grads_finite=True)
    assert frames_at_origin(step, finite) is None


# --- a buffer that the forward made bad
# --------------------------------------------------------------------------------------------------


class Averaging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 1)
        self.register_buffer("level", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.level.add_(x.min().log())
        return self.fc(x)


def reading(name: str) -> Reading:
    return Reading(step=0, loss=1.0, grads_finite=True, bad_state=(name,), state_born=True)


def test_operation_that_wrote_the_buffer_is_named() -> None:
    model = Averaging()
    x = noise(4, 3).abs()
    x[1, 2] = 0.0
    step = step_of(lambda batch: model(batch).pow(2).mean(), model, x)
    origin = buffer_origin(step, reading("buffer:level"))
    assert (origin.op, origin.tensor, origin.reproduced) == ("aten.log", "buffer:level", True)
    assert origin.output is not None and origin.output.neginf == 1
    assert float(model.level) == 0.0


def test_statistics_of_a_norm_layer_are_placed_at_the_layer() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    x = noise(4, 3)
    x[0, 0] = math.inf
    step = step_of(lambda batch: model(batch).nan_to_num(0.0).mean(), model, x)
    origin = buffer_origin(step, reading("buffer:0.running_mean"))
    assert origin.module == "0" and origin.op is not None and "batch_norm" in origin.op


def test_buffer_that_stays_fine_is_not_reproduced() -> None:
    model = Averaging()
    step = step_of(lambda batch: model(batch).pow(2).mean(), model, noise(4, 3).abs() + 1.0)
    origin = buffer_origin(step, reading("buffer:level"))
    assert origin.reproduced is False and origin.op is None


# --- exceptions of the user's code: read from the traceback, proven by replays
# --------------------------------------------------------------------------------------------------


class Strict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        if bool((x < 0).any()):
            raise ValueError("negative input")
        return self.fc(x)


def strict_step(*micro_batches: Tensor) -> Step:
    model = nn.Sequential(Strict())
    return step_of(lambda x: model(x).pow(2).mean(), model, *micro_batches)


def raised(step: Step, micro: int = 0) -> tuple[Exception, Origin]:
    assert step.loss_fn is not None
    with pytest.raises(Exception) as caught:
        step.loss_fn(step.micro_batches[micro])
    error = caught.value
    assert isinstance(error, Exception)
    return error, traceback_origin(error, 0, step.named_roots())


def test_exception_that_does_not_come_again_is_not_reproduced() -> None:
    step = strict_step(-noise(2, 3).abs())
    error, origin = raised(step)
    model = step.model
    step.loss_fn = lambda x: model(x.abs()).mean()
    placed = place_exception(origin, error, step, 0, LocateBudget(10.0))
    assert placed.reproduced is False and placed.samples == ()


def test_recorded_step_that_runs_now_is_not_reproduced() -> None:
    origin = place_replayed_exception(strict_step(noise(4, 3).abs()))
    assert origin.reproduced is False


# --- a replay reproduces a step only if it goes bad in the same way
# --------------------------------------------------------------------------------------------------


def mean_square(model: nn.Module, batch: Tensor | dict[str, Tensor]) -> Tensor:
    return model(batch["x"] if isinstance(batch, dict) else batch).pow(2).mean()


def test_minus_infinity_where_plus_infinity_was_seen_is_not_reproduced() -> None:
    model = nn.Linear(3, 1)
    signs: list[float] = []

    def loss_fn(batch: dict[str, Tensor]) -> Tensor:
        signs.append(1.0)
        return mean_square(model, batch) / batch["below"] * (-1.0) ** len(signs)

    incident = first_incident(
        model, loss_fn, lambda step: {"x": features(step), "below": torch.tensor(1.0 - step)}
    )
    assert incident.origin is not None
    assert incident.origin.reproduced is False
    said = next(finding for finding in incident.findings if finding.code == "SG702")
    assert "the loss was +inf and the replay gives -inf" in " ".join(said.evidence)


def test_infinity_where_nan_was_seen_is_not_reproduced() -> None:
    model = nn.Linear(3, 1)
    calls: list[int] = []

    def loss_fn(batch: Tensor) -> Tensor:
        calls.append(1)
        return mean_square(model, batch) * (
            math.nan if len(calls) == 2 else math.inf if len(calls) > 2 else 1.0
        )

    incident = first_incident(model, loss_fn, features)
    assert incident.origin is not None and incident.origin.reproduced is False


def test_another_part_of_the_loss_is_not_the_same_fault() -> None:
    model = nn.Linear(3, 1)
    calls: list[int] = []

    def loss_fn(batch: Tensor) -> dict[str, Tensor]:
        calls.append(1)
        one, other = mean_square(model, batch), model(batch).abs().mean()
        bad = torch.tensor(math.inf)
        return {
            "one": one * bad if len(calls) == 2 else one,
            "other": other * bad if len(calls) > 2 else other,
        }

    incident = first_incident(model, loss_fn, features)
    assert incident.origin is not None and incident.origin.reproduced is False
    assert "the loss part 'one' was +inf" in (incident.origin.evidence.departs or "")


def test_another_gradient_is_not_the_same_fault() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 1, bias=False), "b": nn.Linear(3, 1, bias=False)})
    calls: list[int] = []

    def loss_fn(batch: Tensor) -> Tensor:
        calls.append(1)
        broken = "a" if len(calls) == 2 else "b"
        total = mean_square(model["a"], batch) + mean_square(model["b"], batch)
        if len(calls) > 1:
            total = total + (model[broken].weight * 0).sum().sqrt()
        return total

    incident = first_incident(model, loss_fn, features)
    assert incident.origin is not None and incident.origin.reproduced is False
    assert "the gradient of a.weight was non-finite" in (incident.origin.evidence.departs or "")


def test_same_infinity_is_reproduced() -> None:
    model = nn.Linear(3, 1)
    incident = first_incident(
        model,
        lambda batch: -mean_square(model, batch) / batch["below"],
        lambda step: {"x": features(step), "below": torch.tensor(1.0 - step)},
    )
    assert incident.origin is not None and incident.origin.reproduced is True
    assert code(incident) == "SG201", evidence(incident)


# --- data-parallel and compiled models
# --------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.bn, self.out = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.bn(torch.exp(self.fc(x))))


def ranks_of_a_group() -> None:
    """Run by every rank of the test below."""
    dist.init_process_group("gloo")
    _locate_as(dist.get_rank())
    part()


def _locate_as(rank: int) -> None:
    model = DistributedDataParallel(Normed())

    def loss(x: Tensor) -> Tensor:
        value = model(x).pow(2).mean()
        count = torch.tensor(float(len(x)))
        dist.all_reduce(count)
        return value * len(x) / count

    loop = Loop(model, torch.optim.SGD(model.parameters(), lr=0.01), loss)
    attributes = set(vars(model))
    if rank == 0:
        origin = loop.step(0, [with_row(900.0, row=2)])
        assert origin is not None
        place = (origin.phase, origin.module, origin.op, origin.samples)
        assert place == ("forward", "", "aten.exp", (2,)), origin
    else:  # takes part in the step, and in nothing of the replay
        keeper = [p.detach().clone() for p in model.parameters()]
        loss(noise(4, 3)).backward()
        assert all(torch.equal(a, b) for a, b in zip(keeper, model.parameters(), strict=True))
    dist.barrier()
    assert set(vars(model)) == attributes
    model.zero_grad()
    loss(noise(4, 3, seed=rank)).backward()  # both ranks still agree afterwards
    grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    mine = grads.clone()
    dist.all_reduce(grads)
    assert torch.allclose(grads / 2, mine)


def test_one_rank_of_two_locates_without_the_other() -> None:
    code = "from locate.test_replay import ranks_of_a_group; ranks_of_a_group()"
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(forked.PATHS)}
    ended = forked.python(["-c", code], ranks=2, variables=variables, imports=("pytest",))
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_model_is_replayed_eagerly_and_named() -> None:
    model: Any = torch.compile(Normed(), backend="eager")
    loop = Loop(
        model, torch.optim.SGD(model.parameters(), lr=0.01), lambda x: model(x).pow(2).mean()
    )
    origin = loop.step(0, [with_row(900.0)])
    assert origin is not None
    assert (origin.phase, origin.module, origin.op, origin.samples) == (
        "forward",
        "",
        "aten.exp",
        (1,),
    )


def _wrong_backend(graph: Any, example: Any) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return [out * math.nan for out in graph.forward(*args)]

    return run


@pytest.mark.usefixtures("fresh_dynamo")
def test_fault_that_only_the_compiled_graph_has() -> None:
    inner = nn.Linear(3, 1)
    model: Any = torch.compile(inner, backend=_wrong_backend)
    loop = Loop(
        model, torch.optim.SGD(model.parameters(), lr=0.01), lambda x: model(x).pow(2).mean()
    )
    origin = loop.step(0, [noise(4, 3)])
    assert origin is not None
    assert origin.reproduced is True and origin.evidence.compiled_only
    assert (origin.phase, origin.module, origin.op) == ("forward", "", "torch.compile")
