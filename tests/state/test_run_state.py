"""The state of a run is saved and restored, in place, by name; a misfit is named or refused."""

from __future__ import annotations

import copy
import json
import os
import random
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer, lr_scheduler

import forked
import stepguard
from guard.judging import held
from guard.optimizers import OPTIMIZERS as PUBLIC
from scenes import batches, calm_net, difference, generators, noisy_net, plain_net, quiet
from stepguard import Guard
from stepguard._errors import StateError
from stepguard.state.buffers import fill_module, module_misfit, module_tensors, why_not_kept
from stepguard.state.rng import capture_rng, restore_rng
from stepguard.state.run_state import Ownership, RunState, SavedState
from stepguard.state.sharded import sharded_part

DATA = batches(40)
TORCH: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
    "adam-amsgrad": lambda ps: torch.optim.Adam(ps, 0.01, amsgrad=True),
    "adamw-tensor-lr": lambda ps: torch.optim.AdamW(ps, torch.tensor(0.01)),
    "adamw-fused": lambda ps: torch.optim.AdamW(ps, 0.01, fused=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, 0.05),
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, 0.01, momentum=0.9, centered=True),
    "rprop": torch.optim.Rprop,
    "adafactor": lambda ps: torch.optim.Adafactor(ps, 0.01),
    "muon": lambda ps: torch.optim.Muon(ps, 0.01),
    "lbfgs": lambda ps: torch.optim.LBFGS(ps, 0.1, max_iter=3),
}


class Remembering(Optimizer):
    """Memory in every place at once, each of which counts for the next update."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.norms: deque[float] = deque(maxlen=3)
        self.by_parameter: dict[Tensor, Tensor] = {}
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.noise = torch.Generator().manual_seed(3)
        self.average: Tensor | None = None
        self.program = "a setting that never moves"
        self.function = len

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        shared = self.state["global"]
        shared["step"] = shared.get("step", 0) + 1
        shared.setdefault("seen", {"least": [1e9]})["least"].append(float(shared["step"]))
        self.counts["updates"] += 1
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        self.norms.append(float(norm))
        self.average = norm if self.average is None else 0.9 * self.average + 0.1 * norm
        limit = sum(self.norms) / len(self.norms) * float(self.average) / shared["step"]
        for p in params:
            momentum = self.by_parameter.setdefault(p, torch.zeros_like(p))
            momentum.mul_(0.9).add_(p.grad, alpha=limit)
            p.sub_(momentum * self.param_groups[0]["lr"] * torch.rand((), generator=self.noise))


EVERY: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    **{f"torch-{name}": make for name, make in TORCH.items()},
    **PUBLIC,
    "remembering": Remembering,
}
KEPT = [name for name in EVERY if name != "galore"]  # which is refused, see below
STEPPED = [name for name in KEPT if name != "sam"]  # which evaluates twice
SLOW_IMPORT = "adamw-8bit"


def _loss(model: nn.Module) -> Callable[[Any], Tensor]:
    return lambda batch: nn.functional.cross_entropy(model(batch[0]), batch[1])


def _train(model: nn.Module, optimizer: Any, data: Any, scheduler: Any = None) -> None:
    def closure(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = _loss(model)(batch)
        loss.backward()
        return loss

    for batch in data:
        closure(batch)
        closes = type(optimizer).__name__ in ("LBFGS", "SAM")
        optimizer.step(*[partial(closure, batch)] * closes)
        if scheduler is not None:
            scheduler.step(*[1.0] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))


def _everything(model: nn.Module, optimizer: Optimizer, scheduler: Any = None) -> dict[str, Any]:
    """Attributes included, which `state_dict` says nothing about."""
    order = {
        id(p): str(i)
        for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])
    }
    stored = {order.get(id(key), str(key)): held(item) for key, item in optimizer.state.items()}
    own = {
        key: held(value)
        for key, value in vars(optimizer).items()
        if isinstance(value, int | float | list | deque | Tensor)
        and key not in ("param_groups", "_params")
    }
    return {
        "parameters": held(dict(model.named_parameters())),
        "buffers": held(dict(model.named_buffers())),
        "state": {key: stored[key] for key in sorted(stored)},
        "own": own,
        "scheduler": copy.deepcopy(scheduler.state_dict()) if scheduler is not None else None,
    }


def _frozen(state: SavedState) -> SavedState:
    """A copy that has been through JSON, as one from disk has."""
    return SavedState(
        {name: t.clone() for name, t in state.tensors.items()}, json.loads(json.dumps(state.facts))
    )


def _tensors(optimizer: Optimizer) -> set[int]:
    states = [state for state in optimizer.state.values() if isinstance(state, dict)]
    return {id(v) for state in states for v in state.values() if isinstance(v, Tensor)}


# --- every optimizer


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name == SLOW_IMPORT else []) for name in KEPT],
)
def test_state_put_back_in_place_or_into_fresh_objects_goes_on_bit_for_bit(name: str) -> None:
    model = calm_net()
    optimizer = EVERY[name](model.parameters())
    whole = RunState({"": model}, optimizer)
    _train(model, optimizer, DATA[:4])
    state, before = _frozen(whole.gather()), _everything(model, optimizer)
    tensors = _tensors(optimizer)
    _train(model, optimizer, DATA[4:10])
    then = _everything(model, optimizer)
    assert difference(then, before) != ""
    whole.put_back(state, own_only=True)
    assert difference(_everything(model, optimizer), before) == ""
    if name.startswith("torch-") and name != "torch-lbfgs":  # which replaces its own tensors
        assert _tensors(optimizer) == tensors
    other = calm_net()
    fresh = EVERY[name](other.parameters())
    assert RunState({"": other}, fresh).put_back(state) == []
    for goes_on in ((model, optimizer), (other, fresh)):
        _train(*goes_on, DATA[4:10])
        assert difference(_everything(*goes_on), then) == ""


WAYS = ("resumed", "rewound")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way"),
    [
        (name, way)
        for number, name in enumerate(STEPPED)
        for way in (WAYS if forked.FULL else WAYS[number % 2 :][:1])
    ],
)
def test_run_that_was_resumed_or_rewound_equals_one_that_never_was(
    name: str, way: str, tmp_path: Path
) -> None:
    def run(
        upto: int, *, folder: Path | None = None, resume: bool = False, damage: int | None = None
    ) -> tuple[nn.Module, Optimizer, Guard]:
        model = calm_net()
        optimizer = EVERY[name](model.parameters())
        kept: dict[str, Any] = {"snapshots": 0} if folder else {"snapshot_every": 4, "probation": 4}
        config = quiet(run_dir=folder, on_signal="off", **kept)
        with Guard(model, optimizer, config=config) as guard:
            for index in range(guard.restore() if resume else 0, upto):
                if index == damage:
                    with torch.no_grad():
                        next(model.parameters())[0, 0] = float("nan")
                guard.step(_loss(model), DATA[index])
            assert folder is None or resume or guard.save() is not None
        return model, optimizer, guard

    if way == "resumed":
        run(6, folder=tmp_path)
        *found, guard = run(14, folder=tmp_path, resume=True)
        assert guard.incidents == ()
    else:
        *found, guard = run(20, damage=14)
        decision = guard.incidents[0].decision
        assert decision is not None and (decision.action, decision.data) == ("rewind", "repeat")
    *never, _ = run(14 if way == "resumed" else 20)
    assert difference(_everything(*found), _everything(*never)) == ""


RESUME = """
import sys, torch
from torch import nn
from guard.optimizers import OPTIMIZERS
from scenes import batches, calm_net, quiet
from stepguard import Guard
folder, upto, resume = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "resume"
model = calm_net()
optimizer = OPTIMIZERS["lookahead"](model.parameters())
with Guard(model, optimizer, config=quiet(run_dir=folder, on_signal="off")) as guard:
    start = guard.restore() if resume else 0
    for batch in batches(40)[start:upto]:
        guard.step(lambda b: nn.functional.cross_entropy(model(b[0]), b[1]), batch)
    guard.save()
print([p.double().sum().item().hex() for p in model.parameters()])
"""


def test_a_new_process_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def run(folder: str, upto: int, how: str) -> str:
        words = ["-c", RESUME, str(tmp_path / folder), str(upto), how]
        known = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        ended = forked.python(words, variables=known)
        ended.check_returncode()
        return ended.stdout

    never = run("a", 12, "fresh")
    run("b", 6, "fresh")
    assert run("b", 12, "resume") == never


def test_memory_that_is_no_plain_value_is_refused_once_with_the_reason_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = calm_net()
    optimizer = EVERY["galore"](model.parameters())
    config = quiet(run_dir=tmp_path, on_signal="off", snapshot_every=2, terminal="auto")
    with Guard(model, optimizer, config=config) as guard:
        for batch in DATA[:12]:
            guard.step(_loss(model), batch)
        assert guard.save() is None
        assert guard.armed and guard.incidents == ()
    lines = capsys.readouterr().err.splitlines()
    (said,) = [line for line in lines if "projector" in line and "no snapshots" in line]
    assert "is a Projector; only tensors, containers and plain values can be kept" in said


class HidesTensors(torch.optim.SGD):
    """An attribute of the user's own kind that holds tensors."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, 0.1)
        self.helper = type("Preconditioner", (), {})()
        self.helper.factors = [torch.eye(2)]


class HidesAndTells(HidesTensors):
    """The same with a `state_dict` of its own that says what is in there."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "factors": [f.clone() for f in self.helper.factors]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        factors = state_dict["factors"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "factors"})
        self.helper.factors = [f.clone() for f in factors]


def test_attribute_that_hides_tensors_is_refused_by_name() -> None:
    model = plain_net()
    hides = r"HidesTensors\.helper is a Preconditioner that holds tensors"
    with pytest.raises(StateError, match=hides):
        RunState({"": model}, HidesTensors(model.parameters())).gather()


class DoesNotLoadBack(HidesAndTells):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise KeyError("factors_v2")


@pytest.mark.parametrize("loads", [True, False])
def test_own_state_dict_is_asked_for_what_nothing_else_shows(loads: bool) -> None:
    model = plain_net()
    optimizer = (HidesAndTells if loads else DoesNotLoadBack)(model.parameters())
    optimizer.helper.factors[0].fill_(3.0)
    _train(model, optimizer, DATA[:3])
    whole = RunState({"": model}, optimizer)
    state, then = _frozen(whole.gather()), copy.deepcopy(model.state_dict())
    groups = optimizer.param_groups
    optimizer.helper.factors[0].fill_(4.0)
    _train(model, optimizer, DATA[3:6])
    told = whole.put_back(state)
    assert difference(dict(model.state_dict()), dict(then)) == ""
    assert optimizer.param_groups is groups  # schedulers and optimizers around it hold on to them
    if loads:
        assert told == [] and optimizer.helper.factors[0].tolist() == [[3.0, 3.0], [3.0, 3.0]]
    else:
        (said,) = told
        assert "DoesNotLoadBack.load_state_dict did not accept" in said and "factors_v2" in said


def test_settings_of_a_fresh_program_are_not_overwritten_by_an_old_state() -> None:
    model = Counting()
    old = EVERY["sophia"](model.parameters())
    state = _frozen(RunState({"": model}, old).gather())
    new: Any = EVERY["sophia"](model.parameters())
    new.every, model.width = 7, 99
    RunState({"": model}, new).put_back(state)
    assert (new.every, model.width) == (7, 99)
    plain = torch.optim.AdamW(model.parameters(), 0.01, foreach=False)
    fused = torch.optim.AdamW(model.parameters(), 0.01, fused=True)
    RunState({"": model}, fused).put_back(_frozen(RunState({"": model}, plain).gather()))
    assert fused.param_groups[0]["fused"] is True


def test_state_of_a_parameter_that_left_the_optimizer_is_refused() -> None:
    model = plain_net()
    optimizer = TORCH["sgd"](model.parameters())
    _train(model, optimizer, DATA[:2])
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(StateError, match="keeps state of a parameter"):
        RunState({"": nn.Sequential(model[0])}, optimizer).gather()


def test_parameters_are_known_by_name_and_a_rate_in_a_tensor_by_itself() -> None:
    model = plain_net()
    names = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(names.values(), 0.01)
    _train(model, optimizer, DATA[:3])
    state = _frozen(RunState({"": model}, optimizer).gather())
    rate = torch.tensor(0.5)
    turned = torch.optim.AdamW(reversed(list(names.values())), rate)
    RunState({"": model}, turned).put_back(state)
    for parameter in names.values():
        assert difference(dict(turned.state[parameter]), dict(optimizer.state[parameter])) == ""
    assert float(turned.param_groups[0]["lr"]) == pytest.approx(0.01)
    turned = torch.optim.AdamW(names.values(), rate)
    whole = RunState({"": model}, turned)
    state = _frozen(whole.gather())
    rate.fill_(9.0)
    whole.put_back(state)
    assert turned.param_groups[0]["lr"] is rate and float(rate) == pytest.approx(0.01)


# --- schedules, scalers, counters, further objects, random numbers

SCHEDULES: dict[str, Any] = {
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.5), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "plateau": lr_scheduler.ReduceLROnPlateau,
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_comes_back_and_goes_on_as_it_would_have(name: str) -> None:
    def built() -> tuple[nn.Module, Any, Any]:
        model = plain_net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return model, optimizer, SCHEDULES[name](optimizer)

    model, optimizer, scheduler = built()
    _train(model, optimizer, DATA[:3], scheduler)
    state = _frozen(RunState({"": model}, optimizer, scheduler=scheduler).gather())
    _train(model, optimizer, DATA[:2], scheduler)
    fresh = built()
    RunState({"": fresh[0]}, fresh[1], scheduler=fresh[2]).put_back(state)
    _train(fresh[0], fresh[1], DATA[:2], fresh[2])
    assert difference(_everything(*fresh), _everything(model, optimizer, scheduler)) == ""


class Counting(nn.Module):
    """A module with a number that moves and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls, self.width = noisy_net(), 0, 8
        self.register_buffer("table", torch.zeros(2), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        self.table += 1
        return self.net(inputs)


def test_counters_and_buffers_that_state_dict_leaves_out_come_back() -> None:
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    whole = RunState({"": model}, optimizer)
    whole.gather()
    _train(model, optimizer, DATA[:2])
    state = _frozen(whole.gather())
    _train(model, optimizer, DATA[:3])
    whole.put_back(state)
    assert (model.calls, model.width, model.table.tolist()) == (2, 8, [2.0, 2.0])
    assert [place for place, _ in state.facts["numbers"]["mapping"]] == ["model/:calls"]


def test_random_numbers_come_back_when_asked_for() -> None:
    model = plain_net()
    whole = RunState({"": model}, torch.optim.SGD(model.parameters(), 0.1))
    # python and numpy keep the second value of each pair they make
    random.gauss(0, 1), np.random.standard_normal()
    state, kept, then = _frozen(whole.gather()), capture_rng(), generators()

    def draw() -> tuple[Any, ...]:
        return torch.rand(3).tolist(), random.gauss(0, 1), np.random.standard_normal()

    first = draw()
    whole.put_back(state)
    assert difference(generators(), then) != ""
    for _ in range(2):
        restore_rng(kept)
        assert draw() == first
        whole.put_back_random_numbers(state)
        assert difference(generators(), then) == "" and draw() == first


def test_program_without_numpy_is_left_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy")
    state = capture_rng()
    assert state.numpy is None
    torch.rand(())
    restore_rng(state)
    assert "numpy" not in sys.modules
    assert torch.equal(torch.get_rng_state(), state.cpu)


def test_scaler_comes_back_also_into_one_that_has_not_been_used() -> None:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for batch in DATA[:3]:
        optimizer.zero_grad()
        scaler.scale(_loss(model)(batch)).backward()
        scaler.step(optimizer)
        scaler.update()
    state = _frozen(RunState({"": model}, optimizer, scaler=scaler).gather())
    saved = scaler.state_dict()
    fresh = GradScaler("cpu", init_scale=2.0, growth_interval=2)
    RunState({"": model}, optimizer, scaler=fresh).put_back(state)
    fresh.scale(torch.ones(()))
    assert fresh.state_dict() == saved
    scaler._scale.fill_(1.0)
    RunState({"": model}, optimizer, scaler=scaler).put_back(state)
    assert scaler.state_dict() == saved


class Shadow:
    """An EMA as people write it: a plain object that hands out and takes its tensors."""

    def __init__(self) -> None:
        self.values, self.updates = {"w": torch.zeros(3)}, 0

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values, self.updates = state["values"], state["updates"]


def test_further_objects_come_back_and_share_no_memory_with_the_copy() -> None:
    model = plain_net()
    shadow, average = Shadow(), torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    whole = RunState({"": model}, optimizer, extra={"ema": shadow, "swa": average})
    state = _frozen(whole.gather())
    shadow.values["w"] += 5
    shadow.updates = 7
    with torch.no_grad():
        average.module[0].weight.zero_()
    whole.put_back(state)
    shadow.values["w"] += 1
    assert shadow.updates == 0 and state.tensors["extra:ema/values/w"].tolist() == [0, 0, 0]
    assert torch.equal(average.module[0].weight, model[0].weight)
    shadow.values = {1, 2}  # type: ignore[assignment]
    with pytest.raises(StateError, match="extra:ema/values is a set"):
        whole.gather()


# --- tensors of modules


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda m: nn.Sequential(*m, nn.Linear(3, 3)),
            "model/3.weight is in the model and not in the saved state",
        ),
        (
            lambda m: nn.Sequential(m[0]),
            "model/2.weight is in the saved state and not in the model",
        ),
        (
            lambda m: nn.Sequential(nn.Linear(6, 9), m[1], m[2]),
            r"\[9, 6\] in the model and float32 \[8, 6\]",
        ),
    ],
)
def test_state_that_does_not_fit_is_refused_before_anything_is_touched(
    change: Any, said: str
) -> None:
    model = plain_net()
    state = _frozen(RunState({"": model}, torch.optim.SGD(model.parameters(), 0.1)).gather())
    other = change(plain_net())
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(StateError, match=said):
        RunState({"": other}, torch.optim.SGD(other.parameters(), 0.1)).put_back(state)
    assert difference(dict(other.state_dict()), dict(before)) == ""


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.lazy = nn.Linear(2, 2), nn.LazyLinear(2)
        self.register_buffer("late", None)
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.register_buffer("repeated", torch.zeros(1).expand(3))


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_buffers_made_or_resized_since_and_lazy_parameters_take_what_was_stored() -> None:
    model = Late()
    weight, lazy = (
        model.linear.weight,
        {"lazy.weight": torch.ones(2, 3), "lazy.bias": torch.ones(2)},
    )
    names = [name for name in module_tensors(model) if "lazy" not in name]
    assert names == ["linear.weight", "linear.bias", "hidden"]
    stored = {"linear.weight": torch.ones(2, 2), "linear.bias": torch.ones(2), **lazy}
    stored |= {"late": torch.ones(4), "hidden": torch.ones(5)}
    assert module_misfit("model/", model, stored, may_lack=False) == ""
    lacking = {name: t for name, t in stored.items() if name != "linear.bias"}
    why = "model/linear.bias is in the model and not in the saved state"
    assert module_misfit("model/", model, lacking, may_lack=False) == why
    assert module_misfit("model/", model, lacking, may_lack=True) == ""
    fill_module(model, stored)
    assert model.linear.weight is weight and weight.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert (model.late.shape, model.hidden.shape, model.lazy.weight.shape) == ((4,), (5,), (2, 3))
    assert "no data" in why_not_kept(torch.empty(1, device="meta"))
    assert "no shape" in why_not_kept(nn.LazyLinear(2).weight)
    assert "only dense ones" in why_not_kept(torch.eye(2).to_sparse())


class FullyShardedDataParallel(nn.Module):
    """Named like torch's wrapper, which needs a process group."""


def test_sharded_modules_are_known_by_their_class() -> None:
    assert sharded_part([nn.Linear(1, 1)]) == ""
    assert "FullyShardedDataParallel" in sharded_part([nn.Sequential(FullyShardedDataParallel())])


# --- a guard owns what its optimizer holds

STEPS = 24
DAMAGE = 17


class Judge(nn.Module):
    """Has a norm layer without parameters of its own, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8, affine=False), nn.Tanh(), nn.Linear(8, 1)
        )
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return self.net(inputs)


class Gan(nn.Module):
    """Both networks in one module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.maker = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
        self.judge = Judge()


def _judge_loss(gan: Gan, batch: Tensor) -> Tensor:
    return nn.functional.softplus(
        gan.judge(gan.maker(batch[:, :3]).detach()) - gan.judge(batch)
    ).mean()


def _maker_loss(gan: Gan, batch: Tensor) -> Tensor:
    return nn.functional.softplus(-gan.judge(gan.maker(batch[:, :3]))).mean()


def _data() -> Iterator[Tensor]:
    source = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield torch.randn(8, 4, generator=source)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["one module", "modules="])
@pytest.mark.parametrize("toggles", [False, True])
def test_rewind_of_one_network_leaves_the_other_one_s_weights_moments_statistics_and_numbers(
    shape: str, toggles: bool
) -> None:
    gan = Gan()
    for_maker = torch.optim.Adam(gan.maker.parameters(), 1e-3)
    for_judge = torch.optim.Adam(gan.judge.parameters(), 1e-3)
    config = quiet(snapshot_every=4, probation=4)
    if shape == "one module":
        makers, judges = Guard(gan, for_maker, config=config), Guard(gan, for_judge, config=config)
    else:
        makers = Guard(gan.maker, for_maker, modules={"judge": gan.judge}, config=config)
        judges = Guard(gan.judge, for_judge, modules={"maker": gan.maker}, config=config)
    with makers, judges:
        for index, batch in enumerate(_data()):
            judges.step(lambda b: _judge_loss(gan, b), batch)
            if index == DAMAGE:
                with torch.no_grad():
                    gan.maker[0].weight[0, 0] = float("nan")
            gan.judge.requires_grad_(not toggles)
            before = copy.deepcopy((dict(gan.judge.named_parameters()), for_judge.state_dict()))
            counted = gan.judge.calls
            makers.step(lambda b: _maker_loss(gan, b), batch)
            gan.judge.requires_grad_(True)
            if index == DAMAGE:
                after = (dict(gan.judge.named_parameters()), for_judge.state_dict())
                assert difference(dict(after[0]), dict(before[0])) == ""
                assert difference(after[1], before[1]) == ""
                assert gan.judge.calls >= counted
    decision = makers.incidents[0].decision
    assert decision is not None and decision.action == "rewind"
    assert judges.incidents == ()
    assert all(bool(p.isfinite().all()) for p in gan.parameters())


def test_restore_from_disk_puts_back_everything(tmp_path: Path) -> None:
    gan = Gan()
    optimizer = torch.optim.Adam(gan.maker.parameters(), 1e-3)
    with Guard(gan, optimizer, config=quiet(run_dir=tmp_path, on_signal="off")) as guard:
        for batch in _data():
            guard.step(lambda b: _maker_loss(gan, b), batch)
        guard.save()
        then = copy.deepcopy(gan.state_dict())
        with torch.no_grad():
            for parameter in gan.parameters():
                parameter.add_(1.0)
        guard.restore()
    assert difference(dict(gan.state_dict()), dict(then)) == ""


def test_other_network_that_goes_bad_is_data_and_rewinds_nothing() -> None:
    gan = Gan()
    optimizer = torch.optim.Adam(gan.maker.parameters(), 1e-3)
    with Guard(gan, optimizer, config=quiet(snapshot_every=4, probation=4, locate=True)) as guard:
        for index, batch in enumerate(_data()):
            if index == DAMAGE:
                before = copy.deepcopy(gan.maker.state_dict())
                with torch.no_grad():
                    gan.judge.net[0].weight[0, 0] = float("nan")
            guard.step(lambda b: _maker_loss(gan, b), batch)
            if index == DAMAGE:
                break
    (incident,) = guard.incidents
    assert incident.decision is not None and incident.decision.action != "rewind"
    assert incident.reading.bad_state == ()
    assert incident.origin is not None and incident.origin.tensor == "param:judge.net.0.weight"
    assert difference(dict(gan.maker.state_dict()), dict(before)) == ""


class Taught(nn.Module):
    """A frozen teacher that the loop averages into."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student = nn.Linear(4, 4)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)


def test_teacher_that_no_optimizer_holds_goes_back_with_its_student() -> None:
    model = Taught()
    optimizer = torch.optim.SGD(model.student.parameters(), 0.1)
    whole = RunState({"": model}, optimizer)
    state = whole.gather()
    state.tensors = {name: tensor.clone() for name, tensor in state.tensors.items()}
    then = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    whole.put_back(state, own_only=True)
    assert difference(dict(model.state_dict()), dict(then)) == ""


def test_only_own_parameters_are_exchanged() -> None:
    gan = Gan()
    optimizer = torch.optim.SGD(gan.maker.parameters(), 0.1)
    whole = RunState({"": gan}, optimizer)
    state = whole.gather()
    state.tensors = {name: torch.zeros_like(tensor) for name, tensor in state.tensors.items()}
    with whole.parameters_from(state):
        assert not gan.maker[0].weight.any()
        assert gan.judge.net[0].weight.any()
    assert gan.maker[0].weight.any()


def test_parameter_of_another_guarded_optimizer_is_not_own_even_while_frozen() -> None:
    gan = Gan()
    gan.judge.requires_grad_(False)
    mine, theirs = (
        torch.optim.SGD(gan.maker.parameters(), 0.1),
        torch.optim.SGD(gan.judge.parameters(), 0.1),
    )
    assert Ownership({"": gan}, mine).elsewhere() == set()
    assert Ownership({"": gan}, mine, [mine, theirs]).elsewhere() == {
        id(p) for p in gan.judge.parameters()
    }


def test_damage_before_the_first_step_is_told_whosever_it_is() -> None:
    gan = Gan()
    with torch.no_grad():
        gan.judge.net[0].weight[0, 0] = float("nan")
    optimizer = torch.optim.Adam(gan.maker.parameters(), 1e-3)
    with Guard(gan, optimizer, config=quiet()) as guard, pytest.raises(stepguard.TrainingHalted):
        guard.step(lambda b: _maker_loss(gan, b), next(_data()))
    assert guard.incidents[0].reading.bad_state == ("param:judge.net.0.weight",)
