"""Odd but ordinary objects never crash or disarm the guard, and healthy runs stay as they are."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import stepguard
from scenes import CLASSES, FEATURES, Batch, batches, difference, plain_net, poisoned, quiet
from stepguard import Guard
from stepguard.journal import read_run

DATA = batches(40)
LOOPS = ["step", "watch"]


def _loss(model: nn.Module) -> Callable[[Batch], Tensor]:
    return lambda b: nn.functional.cross_entropy(model(b[0]), b[1])


def _run(
    model: nn.Module, optimizer: Optimizer, how: str, data: Iterable[Batch], **settings: Any
) -> Guard:
    """A guarded loop that must stay armed; warnings are errors here."""
    make = stepguard.watch if how == "watch" else Guard
    with make(model, optimizer, config=quiet(**settings)) as guard:
        for batch in data:
            if how == "step":
                guard.step(_loss(model), batch)
            else:
                optimizer.zero_grad()
                _loss(model)(batch).backward()
                optimizer.step()
        assert guard.armed
    return guard


def _bare(model: nn.Module, optimizer: Optimizer, data: Iterable[Batch]) -> None:
    for batch in data:
        optimizer.zero_grad()
        _loss(model)(batch).backward()
        optimizer.step()


class WithBuffers(nn.Module):
    """Buffers of every kind that people keep."""

    def __init__(self) -> None:
        super().__init__()
        self.net = plain_net()
        self.register_buffer("moving", torch.zeros(4))
        for name in (
            "float8_e4m3fn",
            "float8_e5m2",
            "float8_e4m3fnuz",
            "float8_e5m2fnuz",
            "float8_e8m0fnu",
        ):
            self.register_buffer(name, torch.ones(4).to(getattr(torch, name)))
        self.register_buffer("whole", torch.arange(4))
        self.register_buffer("small", torch.ones(4).to(torch.uint16))
        self.register_buffer("flags", torch.ones(4, dtype=torch.bool))
        self.register_buffer("waves", torch.ones(4, dtype=torch.complex64))
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("nothing8", torch.zeros(0).to(torch.float8_e4m3fn))
        self.register_buffer("expanded", torch.ones(1).expand(4))
        self.register_buffer("missing", None)

    def forward(self, inputs: Tensor) -> Tensor:
        self.moving += 1
        self.float8_e4m3fn.copy_(self.moving.to(torch.float8_e4m3fn))
        return self.net(inputs)


@pytest.mark.parametrize("how", LOOPS)
def test_buffers_of_every_dtype_are_guarded_vetoed_saved_and_rewound(
    how: str, tmp_path: Path
) -> None:
    model = WithBuffers()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    data = [poisoned(b) if i == 9 else b for i, b in enumerate(DATA[:14])]
    guard = _run(
        model,
        optimizer,
        how,
        data,
        snapshot_every=4,
        probation=4,
        run_dir=tmp_path,
        on_signal="off",
    )
    assert [i.step for i in guard.incidents] == [9]
    assert model.moving.tolist() == [13.0] * 4  # the vetoed step did not count
    assert not [n for n in read_run(tmp_path).notes if "no snapshots" in str(n.get("summary"))]


def test_eight_bit_buffers_come_back_from_a_checkpoint(tmp_path: Path) -> None:
    model = WithBuffers()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with Guard(model, optimizer, config=quiet(run_dir=tmp_path, on_signal="off")) as guard:
        for batch in DATA[:6]:
            guard.step(_loss(model), batch)
        assert guard.save() is not None
        model.float8_e4m3fn.zero_()
        guard.restore()
    assert model.float8_e4m3fn.float().tolist() == [6.0] * 4


def test_nan_in_an_eight_bit_statistic_is_seen() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = plain_net()
            self.register_buffer("scale", torch.ones(4).to(torch.float8_e4m3fn))
            self.bad = False

        def forward(self, inputs: Tensor) -> Tensor:
            if self.bad:
                self.scale.copy_(torch.full((4,), math.nan).to(torch.float8_e4m3fn))
            return self.net(inputs)

    model = Scaled()
    with Guard(model, torch.optim.SGD(model.parameters(), 0.1), config=quiet()) as guard:
        for index, batch in enumerate(DATA[:6]):
            model.bad = index == 4
            guard.step(_loss(model), batch)
    assert [i.reading.bad_state for i in guard.incidents] == [("buffer:scale",)]


@pytest.mark.parametrize("kind", ["sparse", "csr", "quantized", "nested", "meta"])
@pytest.mark.parametrize("how", LOOPS)
def test_buffer_that_cannot_be_kept_costs_the_snapshots_and_nothing_else(
    kind: str, how: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    made = {
        "sparse": lambda: torch.eye(3).to_sparse(),
        "csr": lambda: torch.eye(3).to_sparse_csr(),
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "meta": lambda: torch.ones(4, device="meta"),
    }
    model = plain_net()
    model.register_buffer("odd", made[kind]())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    data = [poisoned(b) if i == 9 else b for i, b in enumerate(DATA[:14])]
    guard = _run(
        model,
        optimizer,
        how,
        data,
        snapshot_every=4,
        run_dir=tmp_path,
        on_signal="off",
        locate=True,
    )
    assert [i.step for i in guard.incidents] == [9]
    origin = guard.incidents[0].origin
    assert origin is not None and origin.phase == "input" and origin.samples == (0,)
    told = [
        str(n.get("summary"))
        for n in read_run(tmp_path).notes
        if "no snapshots" in str(n.get("summary"))
    ]
    assert len(told) == 1 and "model/odd is" in told[0]


def _lazy_net() -> nn.Module:
    return nn.Sequential(
        nn.LazyLinear(8, bias=False), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(CLASSES)
    )


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("how", LOOPS)
def test_lazy_model_is_guarded_from_before_its_first_call(how: str, tmp_path: Path) -> None:
    def built() -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        model = _lazy_net()
        return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    model, optimizer = built()
    guard = _run(
        model, optimizer, how, DATA[:12], snapshot_every=4, run_dir=tmp_path, on_signal="off"
    )
    assert guard.incidents == ()
    bare_model, bare_optimizer = built()
    _bare(bare_model, bare_optimizer, DATA[:12])
    assert difference(dict(model.state_dict()), dict(bare_model.state_dict())) == ""


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_checkpoint_goes_into_a_lazy_model_that_was_never_called(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = _lazy_net()
    config = quiet(run_dir=tmp_path, on_signal="off")
    with Guard(model, torch.optim.SGD(model.parameters(), 0.1), config=config) as guard:
        for batch in DATA[:5]:
            guard.step(_loss(model), batch)
        assert guard.save() is not None
    fresh = _lazy_net()
    with Guard(fresh, torch.optim.SGD(fresh.parameters(), 0.1), config=config) as guard:
        assert guard.restore() == 5
        guard.step(_loss(fresh), DATA[5])
    _bare(model, torch.optim.SGD(model.parameters(), 0.1), DATA[5:6])
    assert difference(dict(fresh.state_dict()), dict(model.state_dict())) == ""


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_save_before_a_lazy_model_was_called_is_refused_with_the_reason(tmp_path: Path) -> None:
    model = _lazy_net()
    config = quiet(run_dir=tmp_path, on_signal="off")
    with Guard(model, torch.optim.SGD(model.parameters(), 0.1), config=config) as guard:
        assert guard.save() is None
    told = [str(note.get("summary")) for note in read_run(tmp_path).notes]
    assert any("no shape before the model is called" in line for line in told)


class WithoutRate(Optimizer):
    """Finds its own step size: no `lr` in its groups."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"decay": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    held = self.state[p].setdefault("sum", torch.zeros_like(p))
                    held.mul_(group["decay"]).addcmul_(p.grad, p.grad)
                    p.sub_(0.01 * p.grad / (held.sqrt() + 1e-8))


def _transformers_adafactor(params: Iterable[Tensor]) -> Optimizer:
    return pytest.importorskip("transformers").optimization.Adafactor(params)


RATELESS: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    "no lr": WithoutRate,
    "lr None": _transformers_adafactor,
    "lr tensor": lambda ps: torch.optim.AdamW(ps, torch.tensor(1e-2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RATELESS)
@pytest.mark.parametrize("how", LOOPS)
def test_optimizer_without_a_plain_rate_is_guarded_vetoed_and_rewound(
    name: str, how: str, tmp_path: Path
) -> None:
    model = plain_net()
    optimizer = RATELESS[name](model.parameters())
    data = [poisoned(b) if i == 9 else b for i, b in enumerate(DATA[:24])]
    settings: dict[str, Any] = {
        "snapshot_every": 4,
        "probation": 4,
        "run_dir": tmp_path,
        "on_signal": "off",
    }
    guard = _run(model, optimizer, how, data, locate=True, **settings)
    assert [i.step for i in guard.incidents] == [9]
    assert guard.incidents[0].reading.lr == (pytest.approx((1e-2,)) if name == "lr tensor" else ())
    with torch.no_grad():
        next(model.parameters())[0, 0] = math.nan
    again = plain_net()
    other = RATELESS[name](again.parameters())
    with Guard(again, other, config=quiet(**{**settings, "run_dir": tmp_path / "b"})) as guard:
        for index, batch in enumerate(DATA[:20]):
            if index == 15:
                with torch.no_grad():
                    next(again.parameters())[0, 0] = math.nan
            guard.step(_loss(again), batch)
        assert guard.save() is not None
        assert guard.restore() == guard.steps
    assert [i.decision.action for i in guard.incidents if i.decision is not None] == ["rewind"]


def test_shared_frozen_and_empty_parameters_are_no_trouble() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Linear(FEATURES, FEATURES)
            self.second = nn.Linear(FEATURES, FEATURES)
            self.second.weight = self.first.weight
            self.head = nn.Linear(FEATURES, CLASSES)
            self.head.bias.requires_grad_(False)
            self.none = nn.Parameter(torch.zeros(0, 3))

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(self.second(self.first(inputs)).tanh())

    for how in LOOPS:
        model, bare = Tied(), Tied()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        guard = _run(model, optimizer, how, DATA[:12], snapshot_every=4, probation=4)
        _bare(bare, torch.optim.AdamW(bare.parameters(), 1e-2), DATA[:12])
        assert guard.incidents == ()
        assert difference(dict(model.state_dict()), dict(bare.state_dict())) == ""


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        self.extra: nn.Module | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.a(inputs))
        return self.b(hidden) + (self.extra(hidden) if self.extra is not None else 0.0)


def _inject(model: Adapted, optimizer: Optimizer, what: str) -> list[Tensor]:
    if what == "group":
        alone = nn.Parameter(torch.zeros(3))
        optimizer.add_param_group({"params": [alone]})
        return [alone]
    model.extra = nn.Linear(8, CLASSES)
    new: list[Tensor] = list(model.extra.parameters())
    optimizer.add_param_group({"params": new, "lr": 1e-3})
    return new


@pytest.mark.parametrize("how", LOOPS)
def test_state_loaded_into_the_optimizer_in_mid_run_stays_right(how: str) -> None:
    def train(guarded: bool) -> nn.Module:
        model = plain_net()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        saved: list[Any] = []

        def data() -> Iterable[Batch]:
            for index, batch in enumerate(DATA[:16]):
                if index == 5:
                    saved.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
                if index == 10:
                    model.load_state_dict(saved[0][0])
                    optimizer.load_state_dict(saved[0][1])
                yield batch

        if guarded:
            assert (
                _run(model, optimizer, how, data(), snapshot_every=4, probation=4).incidents == ()
            )
        else:
            _bare(model, optimizer, data())
        return model

    assert difference(dict(train(True).state_dict()), dict(train(False).state_dict())) == ""


@pytest.mark.parametrize("what", ["module", "group"])
@pytest.mark.parametrize("hard", [None, 18])
def test_rewind_to_before_an_adapter_came_leaves_the_adapter_alone(
    what: str, hard: int | None
) -> None:
    model = Adapted()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    new: list[Tensor] = []
    with Guard(model, optimizer, config=quiet(snapshot_every=8, probation=4)) as guard:
        for index, batch in enumerate(DATA[:34]):
            inputs = batch[0] * 50 if index == hard else batch[0]
            if index == 26:
                new = _inject(model, optimizer, what)
            if index == 30:
                kept = copy.deepcopy([(p, optimizer.state.get(p)) for p in new])
                with torch.no_grad():
                    model.a.weight[0, 0] = math.nan
            guard.step(_loss(model), (inputs, batch[1]))
            if index == 30:
                assert difference([(p, optimizer.state.get(p)) for p in new], kept) == ""
        assert guard.armed
    (incident,) = guard.incidents
    assert incident.decision is not None
    assert (incident.decision.action, incident.decision.data) == ("rewind", "skip")
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_damaged_adapter_is_not_rewound_to_a_state_that_lacks_it() -> None:
    model = Adapted()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with Guard(model, optimizer, config=quiet(snapshot_every=8, probation=4)) as guard:
        for index, batch in enumerate(DATA[:27]):
            if index == 26:
                (weight, _) = _inject(model, optimizer, "module")
                before = copy.deepcopy(model.a.state_dict())
                with torch.no_grad():
                    weight[0, 0] = math.nan
            try:
                guard.step(_loss(model), batch)
            except stepguard.TrainingHalted:
                assert index == 26
    (incident,) = guard.incidents
    assert incident.decision is not None and incident.decision.action != "rewind"
    assert difference(dict(model.a.state_dict()), dict(before)) == ""
