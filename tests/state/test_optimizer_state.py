"""Everything an optimizer remembers is saved, restored and rewound exactly, or refused with the
reason.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import forked
from guard.optimizers import OPTIMIZERS as PUBLIC
from scenes import batches, calm_net, difference, plain_net, quiet
from stepguard import Guard
from stepguard._errors import StateError
from stepguard.state.run_state import RunState, SavedState

pytestmark = pytest.mark.slow

DATA = batches(40)
REFUSED = ("galore",)
NEEDS_TWO_EVALUATIONS = ("sam",)

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
        norm = torch.stack([p.grad.norm() for p in self._all() if p.grad is not None]).norm()
        self.norms.append(float(norm))
        self.average = norm if self.average is None else 0.9 * self.average + 0.1 * norm
        limit = sum(self.norms) / len(self.norms) * float(self.average) / shared["step"]
        for p in self._all():
            if p.grad is None:
                continue
            held = self.by_parameter.setdefault(p, torch.zeros_like(p))
            held.mul_(0.9).add_(p.grad, alpha=limit)
            p.sub_(held * self.param_groups[0]["lr"] * torch.rand((), generator=self.noise))

    def _all(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]


EVERY: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    **{f"torch-{name}": make for name, make in TORCH.items()},
    **PUBLIC,
    "remembering": Remembering,
}
KEPT = [name for name in EVERY if name not in REFUSED]
STEPPED = [name for name in KEPT if name not in NEEDS_TWO_EVALUATIONS]


def _train(model: nn.Module, optimizer: Optimizer, data: Any) -> None:
    def closure(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return loss

    for batch in data:
        if not isinstance(optimizer, torch.optim.LBFGS) and type(optimizer).__name__ != "SAM":
            closure(batch)
            optimizer.step()
        else:
            closure(batch)
            optimizer.step(partial(closure, batch))


def _everything(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Attributes included, which `state_dict` says nothing about."""
    own = {
        key: value
        for key, value in vars(optimizer).items()
        if isinstance(value, int | float | list | deque | Tensor)
        and key not in ("param_groups", "_params")
    }
    plain = {key: list(value) if isinstance(value, deque) else value for key, value in own.items()}
    order = {
        id(p): str(i)
        for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])
    }
    stored = {order.get(id(key), str(key)): value for key, value in optimizer.state.items()}
    stored = {key: stored[key] for key in sorted(stored)}
    return copy.deepcopy({"model": model.state_dict(), "state": stored, "own": plain})


def _through_a_file(state: SavedState) -> SavedState:
    return SavedState(
        {name: t.clone() for name, t in state.tensors.items()}, json.loads(json.dumps(state.facts))
    )


@pytest.mark.parametrize("name", KEPT)
def test_state_put_into_fresh_objects_goes_on_bit_for_bit(name: str) -> None:
    model = calm_net()
    optimizer = EVERY[name](model.parameters())
    whole = RunState({"": model}, optimizer)
    _train(model, optimizer, DATA[:7])
    state = _through_a_file(whole.gather())
    _train(model, optimizer, DATA[7:14])
    other = calm_net()
    fresh = EVERY[name](other.parameters())
    assert RunState({"": other}, fresh).put_back(state) == []
    _train(other, fresh, DATA[7:14])
    assert difference(_everything(other, fresh), _everything(model, optimizer)) == ""


@pytest.mark.parametrize("name", KEPT)
def test_going_back_in_place_goes_on_bit_for_bit(name: str) -> None:
    model = calm_net()
    optimizer = EVERY[name](model.parameters())
    whole = RunState({"": model}, optimizer)
    _train(model, optimizer, DATA[:4])
    state = _through_a_file(whole.gather())
    _train(model, optimizer, DATA[4:10])
    then = _everything(model, optimizer)
    _train(model, optimizer, DATA[10:13])
    whole.put_back(state, own_only=True)
    _train(model, optimizer, DATA[4:10])
    assert difference(_everything(model, optimizer), then) == ""


@pytest.mark.parametrize("name", STEPPED)
def test_run_saved_and_resumed_equals_one_that_never_stopped(name: str, tmp_path: Path) -> None:
    def run(
        folder: Path, upto: int, *, resume: bool = False, save: bool = False
    ) -> tuple[nn.Module, Optimizer]:
        model = calm_net()
        optimizer = EVERY[name](model.parameters())
        config = quiet(run_dir=folder, on_signal="off", snapshots=0)
        with Guard(model, optimizer, config=config) as guard:
            start = guard.restore() if resume else 0
            for batch in DATA[start:upto]:
                guard.step(lambda b: nn.functional.cross_entropy(model(b[0]), b[1]), batch)
            assert not save or guard.save() is not None
            assert guard.incidents == ()
        return model, optimizer

    never = run(tmp_path / "a", 12)
    run(tmp_path / "b", 6, save=True)
    resumed = run(tmp_path / "b", 12, resume=True)
    assert difference(_everything(*resumed), _everything(*never)) == ""


@pytest.mark.parametrize("name", STEPPED)
def test_rewound_run_equals_one_that_was_never_damaged(name: str) -> None:
    def run(damage: int | None) -> tuple[nn.Module, Optimizer, Guard]:
        model = calm_net()
        optimizer = EVERY[name](model.parameters())
        with Guard(model, optimizer, config=quiet(snapshot_every=4, probation=4)) as guard:
            for index, batch in enumerate(DATA[:20]):
                if index == damage:
                    with torch.no_grad():
                        next(model.parameters())[0, 0] = float("nan")
                guard.step(lambda b: nn.functional.cross_entropy(model(b[0]), b[1]), batch)
        return model, optimizer, guard

    model, optimizer, guard = run(14)
    decision = guard.incidents[0].decision
    assert decision is not None and (decision.action, decision.data) == ("rewind", "repeat")
    bare_model, bare_optimizer, _ = run(None)
    assert difference(_everything(model, optimizer), _everything(bare_model, bare_optimizer)) == ""


RESUME = """
import sys, torch
from pathlib import Path
from torch import nn
from guard.optimizers import OPTIMIZERS
from scenes import batches, calm_net, quiet
from stepguard import Guard
name, folder, upto, resume = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "resume"
model = calm_net()
optimizer = OPTIMIZERS[name](model.parameters())
with Guard(model, optimizer, config=quiet(run_dir=folder, on_signal="off")) as guard:
    start = guard.restore() if resume else 0
    for batch in batches(40)[start:upto]:
        guard.step(lambda b: nn.functional.cross_entropy(model(b[0]), b[1]), batch)
    guard.save()
print([p.double().sum().item().hex() for p in model.parameters()])
"""


@pytest.mark.parametrize("name", ["madgrad", "lookahead"])
def test_a_new_process_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    def run(folder: str, upto: int, how: str) -> str:
        words = ["-c", RESUME, name, str(tmp_path / folder), str(upto), how]
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
            guard.step(lambda b: nn.functional.cross_entropy(model(b[0]), b[1]), batch)
        assert guard.save() is None
        assert guard.armed and guard.incidents == ()
    said = [
        line
        for line in capsys.readouterr().err.splitlines()
        if "projector" in line and "no snapshots" in line
    ]
    assert len(said) == 1
    assert "is a Projector; only tensors, containers and plain values can be kept" in said[0]


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
        super().load_state_dict(
            {key: value for key, value in state_dict.items() if key != "factors"}
        )
        self.helper.factors = [f.clone() for f in factors]


def test_attribute_that_hides_tensors_is_refused_by_name() -> None:
    model = plain_net()
    with pytest.raises(
        StateError, match=r"HidesTensors\.helper is a Preconditioner that holds tensors"
    ):
        RunState({"": model}, HidesTensors(model.parameters())).gather()


def test_own_state_dict_is_asked_for_what_nothing_else_shows() -> None:
    model = plain_net()
    optimizer = HidesAndTells(model.parameters())
    optimizer.helper.factors[0].fill_(3.0)
    state = _through_a_file(RunState({"": model}, optimizer).gather())
    groups = optimizer.param_groups
    optimizer.helper.factors[0].fill_(4.0)
    assert RunState({"": model}, optimizer).put_back(state) == []
    assert optimizer.helper.factors[0].tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert optimizer.param_groups is groups  # schedulers and optimizers around it hold on to them


class DoesNotLoadBack(HidesAndTells):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise KeyError("factors_v2")


def test_state_dict_that_does_not_load_back_is_told_and_the_rest_is_back() -> None:
    model = plain_net()
    optimizer = DoesNotLoadBack(model.parameters())
    _train(model, optimizer, DATA[:3])
    whole = RunState({"": model}, optimizer)
    state, then = _through_a_file(whole.gather()), copy.deepcopy(model.state_dict())
    _train(model, optimizer, DATA[3:6])
    (told,) = whole.put_back(state)
    assert "DoesNotLoadBack.load_state_dict did not take back" in told and "factors_v2" in told
    assert difference(dict(model.state_dict()), dict(then)) == ""


def test_setting_that_never_moved_stays_the_program_s_own() -> None:
    model = plain_net()
    old = EVERY["sophia"](model.parameters())
    state = _through_a_file(RunState({"": model}, old).gather())
    new: Any = EVERY["sophia"](model.parameters())
    new.every = 7
    RunState({"": model}, new).put_back(state)
    assert new.every == 7


def test_state_of_a_parameter_that_left_the_optimizer_is_refused() -> None:
    model = plain_net()
    optimizer = TORCH["sgd"](model.parameters())
    _train(model, optimizer, DATA[:2])
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(StateError, match="keeps state of a parameter"):
        RunState({"": nn.Sequential(model[0])}, optimizer).gather()
