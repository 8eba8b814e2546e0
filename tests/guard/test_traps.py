"""The traps others fell into, one regression test each (house style, last paragraph)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.opaque import DRIVERS, driven
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

import stepguard
from scenes import (
    INF,
    LOOPS,
    NAN,
    QUIET,
    Scene,
    bare,
    batches,
    calm_net,
    difference,
    grouped,
    plain_net,
    plain_step,
    poisoned,
    quiet,
    state_of,
    stepped,
    watched,
)
from stepguard import Guard, GuardConfig, Probes, TrainingHalted
from stepguard._errors import StoreError
from stepguard.checkpoints import Health, Store
from stepguard.journal import read_run
from stepguard.records import Incident
from stepguard.records.codec import to_plain

DATA = batches(12)


def _scene(*, fused: bool = False, scaled: bool = False) -> Scene:
    model = calm_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return Scene(model, optimizer, scheduler, GradScaler("cpu", init_scale=8.0) if scaled else None)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_trap_state_dict_that_does_not_load_back(loop: str, fused: bool) -> None:
    steps = grouped([DATA[0], poisoned(DATA[1]), DATA[2]], 1)
    guarded, resumed = _scene(fused=fused, scaled=True), _scene(fused=fused, scaled=True)
    LOOPS[loop](guarded, steps)
    for part in ("model", "optimizer", "scheduler", "scaler"):
        getattr(resumed, part).load_state_dict(copy.deepcopy(getattr(guarded, part).state_dict()))
    assert difference(state_of(resumed), state_of(guarded)) == ""
    for scene in (guarded, resumed):
        LOOPS[loop](scene, grouped(DATA[3:6], 1))
    assert difference(state_of(resumed), state_of(guarded)) == ""


def test_trap_incident_that_does_not_read_back(tmp_path: Path) -> None:
    found = stepped(
        _scene(), [(DATA[0], DATA[1]), (DATA[2], poisoned(DATA[3]))], quiet(run_dir=tmp_path)
    )
    record = read_run(tmp_path)
    assert record.torn == 0
    read_back = [to_plain(incident) for incident in record.incidents]
    assert difference(repr(read_back), repr([to_plain(found[1].incident)])) == ""
    assert math.isnan(record.incidents[0].reading.micro_losses[1])


def test_trap_nan_that_enters_the_running_statistics_and_blinds_them(tmp_path: Path) -> None:
    model = plain_net()
    scene = Scene(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05),
        loss=lambda s, b: s.model(b[0]).square().mean(),
    )
    with Guard(model, scene.optimizer, config=quiet(run_dir=tmp_path)) as guard:
        for index in range(60):
            guard.step(scene.loss_fn, poisoned(DATA[0]) if index % 3 == 2 else DATA[0])
        history = guard._context.history
        assert len(history.losses) == 40 and all(
            map(math.isfinite, [*history.losses, history.spread, history.level])
        )
        with torch.no_grad():
            model[2].weight.mul_(100)
        guard.step(scene.loss_fn, DATA[0])
        assert [note["kind"] for note in read_run(tmp_path).notes] == [
            "spike"
        ]  # a blinded detector would pass it


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_trap_finite_gradients_with_an_infinite_norm(loop: str, fused: bool) -> None:
    scene, reference = _scene(fused=fused), _scene(fused=fused)
    scene.clip_norm = (
        1.0  # clipping by an infinite norm would zero every gradient, and Adam would still move
    )
    large = (DATA[1][0], DATA[1][1], 1e25)

    def loss(scene: Scene, batch: Any) -> Tensor:
        scale = batch[2] if len(batch) > 2 else 1.0
        return nn.functional.cross_entropy(scene.model(batch[0]), batch[1]) * scale

    scene.loss = reference.loss = loss
    reference.clip_norm = 1.0
    LOOPS[loop](scene, [(DATA[0],), (large,), (DATA[2],)])
    bare(reference, [(DATA[0],), (DATA[2],)])
    assert difference(state_of(scene), state_of(reference)) == ""


def test_trap_finite_fp16_gradients_whose_fp16_norm_is_infinite() -> None:
    model = nn.Linear(64, 64, bias=False).half()
    nn.init.zeros_(model.weight)
    scene = Scene(model, torch.optim.SGD(model.parameters(), lr=1.0), clip_norm=64.0)
    scene.loss = lambda s, b: (s.model(b) * 2000.0).sum()
    result = stepped(scene, [(torch.ones(1, 64).half(),)])[0]
    assert result.committed and result.grad_norm == 128_000.0  # twice what fp16 can hold
    assert torch.equal(
        model.weight, torch.full((64, 64), -1.0).half()
    )  # clipped to 64, not to nothing


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("value", [NAN, INF])
def test_trap_batchnorm_buffers_after_a_skipped_step(value: float, loop: str, fused: bool) -> None:
    scene = _scene(fused=fused)
    plain_step(scene, (DATA[0],))
    before = {name: buffer.clone() for name, buffer in scene.model.named_buffers()}
    LOOPS[loop](scene, [(poisoned(DATA[1], value),)])
    assert difference(dict(scene.model.named_buffers()), before) == ""


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_trap_gradients_dropped_before_the_scaler_steps(fused: bool, unscale: bool) -> None:
    scene, reference = _scene(fused=fused, scaled=True), _scene(fused=fused, scaled=True)
    scene.clip_norm = reference.clip_norm = 100.0 if unscale else None
    scene.loss = lambda s, b: nn.functional.cross_entropy(s.model(b[0]), b[1])
    labels = (
        DATA[1][0],
        torch.full_like(DATA[1][1], -100),
    )  # the loss is NaN, the gradients are not
    watched(
        scene, [(DATA[0],), (labels,), (DATA[2],)]
    )  # "No inf checks were recorded" would be raised here
    bare(reference, [(DATA[0],), (DATA[2],)])
    assert difference(state_of(scene), state_of(reference)) == ""


def test_trap_optimizer_hook_that_runs_before_backward() -> None:
    """Lightning calls optimizer.step(closure) and runs forward and backward inside."""
    scene, reference = _scene(), _scene()
    scene.scheduler = reference.scheduler = None
    with stepguard.watch(scene.model, scene.optimizer, config=QUIET) as guard:
        for batch in (DATA[0], poisoned(DATA[1]), DATA[2]):

            def closure(batch: Any = batch) -> Tensor:
                loss: Tensor = scene.loss_fn(batch)
                scene.optimizer.zero_grad()
                loss.backward()
                return loss

            scene.optimizer.step(closure=closure)
        assert [i.step for i in guard.incidents] == [1]
    bare(reference, [(DATA[0],), (DATA[2],)])
    assert difference(state_of(scene), state_of(reference)) == ""


class Wrapped(Optimizer):
    """Stands for accelerate's AcceleratedOptimizer: an Optimizer by type, without hook lists of its
    own.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


@pytest.mark.parametrize("loop", LOOPS)
def test_trap_wrapper_without_hooks(loop: str) -> None:
    scene, reference = _scene(), _scene()
    scene.scheduler = reference.scheduler = None
    scene.optimizer = Wrapped(scene.optimizer)
    assert not hasattr(scene.optimizer, "_optimizer_step_pre_hooks")
    LOOPS[loop](scene, [(DATA[0],), (poisoned(DATA[1]),), (DATA[2],)])
    bare(reference, [(DATA[0],), (DATA[2],)])
    assert difference(state_of(scene), state_of(reference)) == ""


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("masked", "kinds"),
    [
        (lambda e, known: torch.where(known, e, 0.0), []),
        (lambda e, known: e * known, ["nonfinite_loss"]),
    ],
    ids=["where", "times-zero"],
)
def test_trap_where_replaced_by_a_multiplication_with_zero(
    masked: Callable[[Tensor, Tensor], Tensor], kinds: list[str], loop: str
) -> None:
    error = torch.tensor([1.0, NAN, 0.5, 0.25])  # of targets that are not known everywhere

    def loss(scene: Scene, batch: Any) -> Tensor:
        return (scene.model(batch[0])[:, 0] * masked(error, error.isfinite())).mean()

    model = plain_net()
    scene = Scene(model, torch.optim.SGD(model.parameters(), lr=0.01), loss=loss)
    found = LOOPS[loop](scene, grouped(DATA[:1], 1))
    incidents = (
        list(found) if loop == "watch" else [r.incident for r in found if r.incident is not None]
    )
    assert [i.verdict.kind for i in incidents] == kinds


@pytest.mark.parametrize("loop", LOOPS)
def test_trap_skips_that_are_silent(loop: str, capsys: pytest.CaptureFixture[str]) -> None:
    LOOPS[loop](
        _scene(),
        [(DATA[0],), (poisoned(DATA[1]),), (poisoned(DATA[2]),)],
        GuardConfig(probes=Probes(locate_budget=0)),
    )
    said = capsys.readouterr().err
    assert "step 1" in said and "step 2" in said and "2 in a row" in said


def test_trap_rotation_that_deletes_the_last_healthy_checkpoint(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    good = Health(loss=1.0, level=1.0, steps_watched=50, incidents=0, good=True)
    ruined = Health(loss=9.0, level=1.0, steps_watched=60, incidents=1, good=False)
    weights = {"model/weight": torch.ones(4)}
    store.save(100, weights, {}, good)
    for step in range(110, 200, 10):
        store.save(step, {"model/weight": torch.full((4,), 1e30)}, {}, ruined)
        with pytest.raises(StoreError, match="not sealed"):
            store.save(step + 1, {"model/weight": torch.full((4,), NAN)}, {}, good)
    assert [entry.step for entry in store.list()] == [190, 180, 100]
    opened = store.open("last-good")
    assert (opened.step, opened.passed_over) == (100, ())
    assert torch.equal(opened.tensors["model/weight"], weights["model/weight"])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_trap_loss_that_is_finite_while_the_weights_are_nan(loop: str, fused: bool) -> None:
    scene = _scene(fused=fused)
    scene.loss = lambda s, b: nn.functional.cross_entropy(
        s.model(b[0]).nan_to_num(), b[1]
    )  # the seeds' cosmetic fix

    def steps() -> Any:
        yield (DATA[0],)
        with torch.no_grad():
            scene.model[3].weight[0, 0] = NAN
        yield (DATA[1],)
        yield (DATA[2],)

    with pytest.raises(TrainingHalted) as halted:
        LOOPS[loop](scene, steps())
    incident = halted.value.incident
    assert (
        "param:3.weight" in incident.reading.bad_state
        and incident.verdict.kind == "nonfinite_parameter"
    )


def test_trap_last_update_that_ruins_the_weights_after_the_last_reading() -> None:
    scene = _scene()
    with Guard(scene.model, scene.optimizer, config=QUIET) as guard:
        guard.step(scene.loss_fn, DATA[0])
        with torch.no_grad():
            scene.model[0].weight.fill_(NAN)
        assert guard.incidents == ()
    assert [i.verdict.kind for i in guard.incidents] == ["nonfinite_parameter"]


# --- causes are true under every driver: what was computed is no input, garbage is named


HERE = Path(__file__)
drivers = pytest.mark.parametrize("driver", DRIVERS)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    """Other tests compile in this process, and a process with compiled code is not traced."""
    torch._dynamo.utils.counters.clear()


def explained(incidents: list[Incident]) -> Incident:
    """The first incident with a cause: a watched loop is traced after the first bad step."""
    return next(incident for incident in incidents if incident.findings)


@drivers
def test_value_computed_before_the_model_is_not_an_input(driver: str) -> None:
    model = nn.Linear(3, 3)

    def loss_fn(x: Tensor) -> Tensor:
        signal = (x[:, :1] > 0).float()
        ratio = signal / (1 - signal)  # divided
        weight = ratio / (ratio + 1)
        return (weight * model(x)).square().mean()

    incident = explained(driven(driver, model, loss_fn, (torch.randn(8, 3) for _ in range(4))))
    number = next(
        n for n, text in enumerate(HERE.read_text().splitlines(), 1) if text.endswith("# divided")
    )
    origin, finding = incident.origin, incident.findings[0]
    assert origin is not None and origin.source is not None
    assert (origin.phase, origin.op, origin.module) == ("loss", "aten.div", None)
    assert origin.source.endswith(f"{HERE.name}:{number}")
    assert (finding.code, finding.certainty) == ("SG201", "certain")
    assert "SG101" not in [other.code for other in incident.findings]


class Rotary(nn.Module):
    """A buffer that nobody filled: `inv_freq` after `empty_like`."""

    inv_freq: Tensor
    mask: Tensor

    def __init__(self, largest: float) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.tensor([1e-38, largest, 1.0, 4e-30]))
        # A sentinel, which is not garbage.
        self.register_buffer("mask", torch.tensor([0.0, 0.0, torch.finfo(torch.float32).min, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cos(x * self.inv_freq) * (x + self.mask).softmax(-1)


class Model(nn.Module):
    def __init__(self, largest: float) -> None:
        super().__init__()
        self.inner, self.rotary, self.head = nn.Linear(4, 4), Rotary(largest), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.rotary(self.inner(x)))
        return out


@drivers
def test_finite_garbage_in_a_buffer_is_named_when_the_norm_overflows(driver: str) -> None:
    model = Model(3.2e21)

    def loss_fn(x: Tensor) -> Tensor:
        return (model(x) - x.sum(1, keepdim=True)).square().mean()

    incident = driven(driver, model, loss_fn, [torch.randn(8, 4)])[0]
    assert incident.verdict.kind == "infinite_norm" and incident.origin is not None
    assert (incident.origin.tensor, incident.origin.module) == ("buffer:rotary.inv_freq", "rotary")
    first = incident.findings[0]
    assert (first.code, first.certainty) == ("SG602", "likely")
    assert (
        "`buffer:rotary.inv_freq` is finite but absurdly large, up to 3.2e+21" in first.evidence[0]
    )


@drivers
def test_norm_that_overflows_by_a_factor_of_the_loss_blames_no_buffer(driver: str) -> None:
    model = Model(1.0)

    def loss_fn(x: Tensor) -> Tensor:
        return (model(x) - x.sum(1, keepdim=True)).square().mean() * 1e22

    incident = driven(driver, model, loss_fn, [torch.randn(8, 4)])[0]
    assert incident.origin is not None and incident.origin.tensor is None
    assert incident.findings[0].code == "SG501"


def test_finite_garbage_in_a_buffer_is_named_when_the_forward_overflows() -> None:
    model = Model(3.2e21)

    def loss_fn(x: Tensor) -> Tensor:
        return (model.inner(x) * model.rotary.inv_freq).square().mean()

    incident = driven("step", model, loss_fn, [torch.randn(8, 4)])[0]
    assert incident.origin is not None and incident.origin.op == "aten.pow"
    assert incident.origin.evidence.huge_buffer == "buffer:rotary.inv_freq"
    assert "SG602" in [finding.code for finding in incident.findings]
