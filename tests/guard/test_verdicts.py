"""Each kind of bad step gets its own verdict, and what is benign gets none."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

import stepguard
from guard.scenes import (
    CLASSES,
    FEATURES,
    INF,
    LOOPS,
    NAN,
    QUIET,
    Batch,
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
from stepguard import Guard, GuardConfig, Incident, TrainingHalted
from stepguard.journal import read_run

DATA = batches(12)


def _sgd(model: nn.Module, **settings: Any) -> Scene:
    return Scene(model, torch.optim.SGD(model.parameters(), lr=0.05), **settings)


def _adam(model: nn.Module, *, fused: bool = False, **settings: Any) -> Scene:
    return Scene(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused), **settings)


def _loss(change: Callable[[Tensor, Scene], Tensor], on: Batch) -> Callable[[Scene, Any], Tensor]:
    """The usual loss, changed on one batch only."""

    def loss(scene: Scene, batch: Any) -> Tensor:
        value = nn.functional.cross_entropy(scene.model(batch[0]), batch[1])
        return change(value, scene) if batch is on else value

    return loss


def _incidents(scene: Scene, loop: str, steps: list[tuple[Any, ...]], config: GuardConfig = QUIET) -> list[Incident]:
    if loop == "watch":
        return list(watched(scene, steps, config))
    return [result.incident for result in stepped(scene, steps, config) if result.incident is not None]


def _kinds(found: list[Incident]) -> list[tuple[int, str]]:
    return [(incident.step, incident.verdict.kind) for incident in found]


def _first_weight(scene: Scene) -> Tensor:
    return next(scene.model.parameters())


# --- non-finite values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("fused", [False, True])
def test_bad_input_is_named_by_its_key(value: float, fused: bool) -> None:
    scene = _adam(calm_net(), fused=fused, loss=lambda s, b: nn.functional.cross_entropy(s.model(b["x"]), b["y"]))
    keyed = [{"x": x, "y": y} for x, y in [DATA[0], poisoned(DATA[1], value), DATA[2]]]
    found = _incidents(scene, "step", grouped(keyed, 1))
    assert _kinds(found) == [(1, "nonfinite_input")]
    assert found[0].reading.bad_inputs == ("batch:x",)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_bad_loss_of_good_input(loop: str, fused: bool) -> None:
    scene = _adam(calm_net(), fused=fused, loss=_loss(lambda v, s: torch.log(v - v.detach() - 1.0), DATA[1]))
    assert _kinds(_incidents(scene, loop, grouped(DATA[:3], 1))) == [(1, "nonfinite_loss")]


def _singular(value: Tensor, scene: Scene) -> Tensor:
    return value + torch.sqrt(_first_weight(scene).sum() * 0.0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_bad_gradient_of_a_good_loss(loop: str, fused: bool) -> None:
    scene = _adam(calm_net(), fused=fused, loss=_loss(_singular, DATA[1]))
    found = _incidents(scene, loop, grouped(DATA[:3], 1))
    assert _kinds(found) == [(1, "nonfinite_gradient")]
    assert math.isfinite(found[0].reading.loss or NAN) and "0.weight" in found[0].verdict.summary


def test_late_reading_never_takes_the_next_gradients_for_its_own() -> None:
    scene = _adam(plain_net(), fused=True, loss=_loss(_singular, DATA[1]))  # nothing forces an early reading
    found = _incidents(scene, "watch", grouped(DATA[:4], 1))
    assert _kinds(found) == [(1, "nonfinite_gradient")]
    assert found[0].reading.bad_grads == ()  # they are gone, and those of the next step are not theirs


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_finite_gradients_whose_norm_overflows(loop: str, fused: bool) -> None:
    scene = _adam(calm_net(), fused=fused, loss=_loss(lambda v, s: v + (_first_weight(s) * 1e25).sum(), DATA[1]))
    before = state_of(scene)
    found = _incidents(scene, loop, [(DATA[1],)])
    assert _kinds(found) == [(0, "infinite_norm")]
    assert found[0].reading.grads_finite and found[0].reading.grad_norm == INF
    assert difference(state_of(scene)["model"], before["model"]) == ""


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_parameter_that_turned_bad_between_steps_stops_the_run(loop: str, fused: bool) -> None:
    scene = _adam(plain_net(), fused=fused)

    def steps() -> Any:
        yield (DATA[0],)
        with torch.no_grad():
            _first_weight(scene)[0, 0] = NAN
        yield (DATA[1],)
        yield (DATA[2],)

    with pytest.raises(TrainingHalted) as halted:
        LOOPS[loop](scene, steps())
    incident = halted.value.incident
    assert incident.verdict.kind == "nonfinite_parameter" and incident.reading.bad_state == ("param:0.weight",)


@pytest.mark.parametrize("loop", LOOPS)
def test_norm_statistics_that_turned_bad_between_steps_stop_the_run(loop: str) -> None:
    scene = _sgd(calm_net())

    def steps() -> Any:
        yield (DATA[0],)
        scene.model[1].running_var[0] = NAN
        if loop == "watch":
            scene.model.load_state_dict(scene.model.state_dict())  # how statistics change outside a forward
        yield (DATA[1],)

    with pytest.raises(TrainingHalted) as halted:
        LOOPS[loop](scene, steps())
    incident = halted.value.incident
    assert (incident.verdict.kind, incident.reading.bad_state) == ("nonfinite_buffer", ("buffer:1.running_var",))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_norm_statistics_that_this_step_overflows_are_put_back(loop: str, fused: bool) -> None:
    def saturated(scene: Scene, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(scene.model(batch[0]).tanh(), batch[1])  # finite whatever comes in

    scene, reference = _adam(calm_net(), fused=fused, loss=saturated), _adam(calm_net(), fused=fused, loss=saturated)
    huge = (DATA[1][0] * 1e20, DATA[1][1])  # the variance of 1e20 overflows fp32
    found = _incidents(scene, loop, [(DATA[0],), (huge,), (DATA[2],)])
    assert [i.verdict.kind for i in found] == ["nonfinite_buffer"] and found[0].reading.state_born
    assert found[0].decision is not None and found[0].decision.action == "skip"
    for batch in (DATA[0], DATA[2]):
        plain_step(reference, (batch,))
    assert difference(state_of(scene), state_of(reference)) == ""


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_poisoned_optimizer_state_stops_the_run_before_it_spreads(loop: str, fused: bool) -> None:
    scene = _adam(plain_net(), fused=fused)
    plain_step(scene, (DATA[0],))
    scene.optimizer.state[_first_weight(scene)]["exp_avg_sq"][0] = INF
    before = state_of(scene)
    with pytest.raises(TrainingHalted) as halted:
        LOOPS[loop](scene, grouped(DATA[1:4], 1))
    incident = halted.value.incident
    assert incident.verdict.kind == "nonfinite_optimizer_state"
    assert incident.reading.bad_state == ("opt:exp_avg_sq",) and incident.step == 0
    assert difference(state_of(scene), before) == ""


@pytest.mark.parametrize("loop", LOOPS)
def test_epsilon_that_is_zero_in_fp16_is_caught_at_that_step(loop: str) -> None:
    model = plain_net().half()
    with torch.no_grad():
        model[2].weight.zero_()  # as LoRA starts: the first layer's gradient is exactly 0, and 0 / (0 + 0) is NaN
        model[2].bias.zero_()
    scene = Scene(model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-8, foreach=True))
    scene.loss = lambda s, b: nn.functional.cross_entropy(s.model(b[0].half()).float(), b[1])
    before = state_of(scene)
    found = _incidents(scene, loop, [(DATA[0],)])
    assert _kinds(found) == [(0, "nonfinite_parameter")]
    assert found[0].reading.state_born and found[0].reading.grads_finite
    assert difference(state_of(scene), before) == ""


# --- finite anomalies -------------------------------------------------------------------------------------------------


def _notes(folder: Path) -> list[tuple[int, str]]:
    return [(n["step"], n["kind"]) for n in read_run(folder).notes if n["type"] == "note"]


def test_loss_that_stays_zero_is_noted_once(tmp_path: Path) -> None:
    scene = _sgd(plain_net(), loss=lambda s, b: s.model(b[0]).sum() * 0.0)
    assert _incidents(scene, "step", grouped(DATA, 1), quiet(run_dir=tmp_path)) == []
    assert _notes(tmp_path) == [(4, "zero_loss")]


def test_batch_without_labels_is_noted(tmp_path: Path) -> None:
    def summed(scene: Scene, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(scene.model(batch["x"]), batch["y"], reduction="sum")

    keyed = [{"x": x, "y": torch.full_like(y, -100) if i == 2 else y} for i, (x, y) in enumerate(DATA[:4])]
    config = quiet(run_dir=tmp_path, labels_key="y")
    assert _incidents(_sgd(plain_net(), loss=summed), "step", grouped(keyed, 1), config) == []
    assert _notes(tmp_path) == [(2, "no_labels")]
    assert [line["labels"] for line in read_run(tmp_path).steps] == [4, 4, 0, 4]


def _through_half(scene: Scene, batch: Any) -> Tensor:
    """The gradient passes through fp16 and is 2e5 there: too much for any scale from 0.33 on."""
    return (scene.model(batch[0]).half().float() * 2e5).sum() * 1e-3 / 1e-3


@pytest.mark.parametrize("loop", LOOPS)
def test_scaler_that_collapses_is_an_incident(loop: str) -> None:
    model = plain_net()
    scaler = GradScaler("cpu", init_scale=4.0)
    scene = Scene(model, torch.optim.SGD(model.parameters(), lr=1e-9), scaler=scaler, loss=_through_half)
    found = _incidents(scene, loop, grouped(DATA[:5], 1))
    assert _kinds(found)[0] == (3, "scaler_collapse")  # 4, 2 and 1 are calibration
    assert found[0].reading.scale == 0.5


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_scaler_that_warms_up_is_no_incident(loop: str, fused: bool, tmp_path: Path) -> None:
    scene = _adam(plain_net(), fused=fused, scaler=GradScaler("cpu", init_scale=2.0**14))
    scene.loss = lambda s, b: (s.model(b[0]).half().float() * 64).square().mean()
    assert _incidents(scene, loop, grouped(DATA, 1), quiet(run_dir=tmp_path)) == []
    assert scene.scaler is not None and 1.0 < scene.scaler.get_scale() < 2.0**14
    assert {kind for _, kind in _notes(tmp_path)} == {"scale_calibration"}
    lines = read_run(tmp_path).steps
    assert not lines[0]["committed"] and lines[-1]["committed"]


class Valley(nn.Module):
    """One weight whose distance from 0 is the loss, plus what the batch adds."""

    def __init__(self) -> None:
        super().__init__()
        self.height = nn.Parameter(torch.tensor(9.0))

    def forward(self, extra: Tensor) -> Tensor:
        return self.height.abs() + extra


def _valley() -> Scene:
    model = Valley()
    return Scene(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda s, b: s.model(b))


def _down(guard: Guard, scene: Scene, count: int = 80) -> None:
    """From 9 down to 1, with a little noise from the data."""
    for index in range(count):
        assert guard.step(scene.loss_fn, torch.tensor(0.01 * (index % 3))).incident is None


@pytest.mark.parametrize("fused", [False, True])
def test_spike_of_hurt_weights_is_an_incident_and_a_hard_batch_is_not(fused: bool, tmp_path: Path) -> None:
    scene = _valley()
    scene.optimizer = torch.optim.SGD(scene.model.parameters(), lr=0.1, fused=fused)
    with Guard(scene.model, scene.optimizer, config=quiet(run_dir=tmp_path, snapshot_every=8)) as guard:
        _down(guard, scene, 85)
        hard = guard.step(scene.loss_fn, torch.tensor(30.0))
        assert hard.incident is None and hard.committed
        with torch.no_grad():
            scene.model.height.fill_(30.0)
        hurt = guard.step(scene.loss_fn, torch.tensor(0.0))
        assert hurt.incident is not None and hurt.incident.verdict.kind == "spike"
        assert (hurt.incident.verdict.evidence or {})["repeat_loss"] == pytest.approx(30.0, abs=0.1)
        assert hurt.incident.decision is not None and hurt.incident.decision.action == "rewind"
        assert not hurt.committed and float(scene.model.height.detach()) < 5.0
    assert _notes(tmp_path) == [(85, "spike")]


def test_slow_drift_of_the_weights_is_an_incident(tmp_path: Path) -> None:
    scene = _valley()
    with Guard(scene.model, scene.optimizer, config=quiet(run_dir=tmp_path)) as guard:
        _down(guard, scene)
        scene.optimizer.param_groups[0]["lr"] = 0.0
        first = None
        for index in range(300):
            with torch.no_grad():
                scene.model.height.add_(0.03)
            result = guard.step(scene.loss_fn, torch.tensor(0.01 * (index % 3)))
            if result.incident is not None:
                first = (index, result.incident)
                break
    assert first is not None and first[1].verdict.kind == "drift"
    assert 32 <= first[0] < 200


def test_slow_rise_of_the_data_is_no_incident() -> None:
    scene = _valley()
    with Guard(scene.model, scene.optimizer, config=QUIET) as guard:
        _down(guard, scene)
        scene.optimizer.param_groups[0]["lr"] = 0.0
        for index in range(200):
            assert guard.step(scene.loss_fn, torch.tensor(0.03 * index)).incident is None


@pytest.mark.parametrize("loop", LOOPS)
def test_learning_rate_nobody_configured_is_noted(loop: str, tmp_path: Path) -> None:
    scene = _sgd(plain_net())
    assert _incidents(scene, loop, [(DATA[0],)], quiet(run_dir=tmp_path, lr=1e-3)) == []
    assert _notes(tmp_path) == [(0, "lr_mismatch")]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("rate", [NAN, INF])
def test_learning_rate_that_is_no_number_never_reaches_the_weights(loop: str, rate: float) -> None:
    scene = _sgd(plain_net())
    before = state_of(scene)["model"]
    scene.optimizer.param_groups[0]["lr"] = rate
    assert _kinds(_incidents(scene, loop, [(DATA[0],)])) == [(0, "lr_mismatch")]
    assert difference(state_of(scene)["model"], before) == ""


# --- when state is looked at ------------------------------------------------------------------------------------------


def _bad_weights() -> dict[str, Tensor]:
    weights = calm_net().state_dict()
    return {**weights, "0.weight": torch.full_like(weights["0.weight"], NAN)}


def _guarded(loop: str, scene: Scene) -> tuple[Guard, Callable[[Batch], Any]]:
    if loop == "watch":
        return stepguard.watch(scene.model, scene.optimizer, config=QUIET), lambda b: plain_step(scene, (b,))
    guard = Guard(scene.model, scene.optimizer, config=QUIET)
    return guard, lambda b: guard.step(scene.loss_fn, b)


@pytest.mark.parametrize("loop", LOOPS)
def test_bad_weights_replaced_before_the_first_step_are_no_matter(loop: str) -> None:
    model = calm_net()
    model.load_state_dict(_bad_weights())
    guard, step = _guarded(loop, _sgd(model))
    with guard:
        model.load_state_dict(calm_net().state_dict())
        step(DATA[0])
        assert guard.incidents == ()


@pytest.mark.parametrize("loop", LOOPS)
def test_bad_weights_loaded_after_the_guard_was_built_stop_the_first_step(loop: str) -> None:
    model = calm_net()
    guard, step = _guarded(loop, _sgd(model))
    with guard:
        model.load_state_dict(_bad_weights())
        with pytest.raises(TrainingHalted, match=r"param:0\.weight was non-finite before this step"):
            step(DATA[0])


@pytest.mark.parametrize("loop", LOOPS)
def test_veto_of_the_first_step_keeps_the_statistics_that_were_loaded(loop: str) -> None:
    loaded = calm_net()
    plain_step(_sgd(loaded), (DATA[0],))
    model = calm_net()
    guard, step = _guarded(loop, _sgd(model))
    with guard:
        model.load_state_dict(loaded.state_dict())
        step(poisoned(DATA[1]))
        assert len(guard.incidents) == 1
    assert difference(dict(model.state_dict()), dict(loaded.state_dict())) == ""


# --- benign -----------------------------------------------------------------------------------------------------------


class Causal(nn.Module):
    """Attention with a -inf mask in a buffer, and buffers that hold Inf and NaN as sentinels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.queries, self.values = nn.Linear(FEATURES, 4), nn.Linear(FEATURES, CLASSES)
        self.register_buffer("mask", torch.full((4, 4), -INF).triu(1))
        self.register_buffer("best", torch.tensor(INF))
        self.register_buffer("unset", torch.full((3,), NAN))
        self.register_buffer("count", torch.tensor(0.0))

    def forward(self, inputs: Tensor) -> Tensor:
        self.count += 1
        q = self.queries(inputs)
        return (q @ q.T + self.mask).softmax(-1) @ self.values(inputs)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_causal_mask_and_sentinel_buffers_are_no_incident(loop: str, fused: bool) -> None:
    assert _incidents(_adam(Causal(), fused=fused), loop, grouped(DATA, 1)) == []


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_sentinel_buffers_are_not_blamed_for_a_bad_batch(loop: str, fused: bool) -> None:
    scene = _adam(Causal(), fused=fused)
    found = _incidents(scene, loop, [(DATA[0],), (poisoned(DATA[1]),), (DATA[2],)])
    assert _kinds(found) == [(1, "nonfinite_input")]
    assert found[0].decision is not None and found[0].decision.action == "skip"
    assert scene.model.count == 2.0  # the bad forward never counted, the others did


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_buffer_that_turned_bad_during_the_run_and_feeds_the_loss_is_named(loop: str, fused: bool) -> None:
    scene = _adam(Causal(), fused=fused)

    def steps() -> Any:
        yield (DATA[0],)
        scene.model.count.fill_(NAN)
        if loop == "watch":
            scene.model.load_state_dict(scene.model.state_dict())
        yield (DATA[1],)
        yield (DATA[2],)

    scene.loss = lambda s, b: nn.functional.cross_entropy(s.model(b[0]), b[1]) + s.model.count * 0
    with pytest.raises(TrainingHalted) as halted:
        LOOPS[loop](scene, steps())
    assert halted.value.incident.reading.bad_state == ("buffer:count",)
    assert halted.value.incident.verdict.kind == "nonfinite_buffer"


def _masked_targets(scene: Scene, batch: Any) -> Tensor:
    output = scene.model(batch[0])[:, 0]
    targets = torch.tensor([1.0, NAN, 0.5, NAN])
    known = targets.isfinite()
    return (output[known] - targets[known]).square().mean()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    "loss",
    [
        _masked_targets,
        lambda s, b: s.model(b[0]).square().mean() * 0.0,
        lambda s, b: -s.model(b[0]).square().mean() - 5.0,
        lambda s, b: s.model(b[0]).square().mean() * 1e-3 + 1e18,
        lambda s, b: s.model(b[0]).square().mean() + (100.0 if b[0][0, 0] > 0.5 else 0.0),
        lambda s, b: s.model(b[0]).masked_fill(b[0][:, :3] > 0, -1e30).logsumexp(-1).clamp(-5, 5).mean(),
    ],
    ids=["nan-targets-masked", "zero", "negative", "huge", "jumping", "hidden-infinity"],
)
def test_benign_losses_are_no_incident(loss: Callable[[Scene, Any], Tensor], loop: str, fused: bool) -> None:
    scene = _adam(plain_net(), fused=fused, loss=loss)
    config = quiet(spike_window=8)
    assert _incidents(scene, loop, grouped(DATA * 4, 1), config) == []


@pytest.mark.parametrize("loop", LOOPS)
def test_buffer_that_cannot_be_written_is_no_matter(loop: str) -> None:
    model = plain_net()
    model.register_buffer("wide", torch.ones(1).expand(64))
    found = _incidents(_sgd(model), loop, [(DATA[0], DATA[1]), (poisoned(DATA[2]), DATA[3]), (DATA[4],)])
    assert [incident.step for incident in found] == [1]


@pytest.mark.parametrize("loop", LOOPS)
def test_weights_that_are_mended_before_anybody_used_them_are_no_incident(loop: str) -> None:
    """The cheap look after an update sees NaN, the closer look at the next step does not: that step goes through."""

    def run(loop: Callable[..., Any]) -> tuple[Scene, Any]:
        scene = _sgd(calm_net())
        weight = _first_weight(scene)
        kept: list[Tensor] = []

        def spoil(*_: Any) -> None:
            kept.append(weight.detach().clone())
            weight.data.fill_(NAN)

        def steps() -> Any:
            for batch in DATA[:4]:
                yield (batch,)
                weight.data.copy_(kept.pop())

        scene.optimizer.register_step_post_hook(spoil)
        return scene, loop(scene, steps())

    guarded, found = run(LOOPS[loop])
    incidents = list(found) if loop == "watch" else [r.incident for r in found if r.incident is not None]
    assert incidents == []
    assert difference(state_of(guarded), state_of(run(bare)[0])) == ""


def test_nan_never_enters_the_history(tmp_path: Path) -> None:
    scene = _valley()
    with Guard(scene.model, scene.optimizer, config=QUIET) as guard:
        _down(guard, scene, 40)
        guard.step(scene.loss_fn, torch.tensor(NAN))
        with torch.no_grad():
            scene.model.height.fill_(60.0)
        assert guard.step(scene.loss_fn, torch.tensor(0.0)).incident is not None  # a blinded detector would pass it
        assert all(map(math.isfinite, guard._context.history.losses))
