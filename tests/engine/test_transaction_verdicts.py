"""Each kind of bad step gets its own verdict, and what is benign gets none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from guard.judging import adam, changed_loss, first_weight, incidents, kinds, sgd
from scenes import (
    INF,
    LOOPS,
    NAN,
    QUIET,
    Scene,
    batches,
    calm_net,
    difference,
    grouped,
    plain_net,
    plain_step,
    poisoned,
    quiet,
    state_of,
)
from stepguard import Guard, TrainingHalted
from stepguard.journal import read_run

DATA = batches(12)


# --- non-finite values
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("fused", [False, True])
def test_bad_input_is_named_by_its_key(value: float, fused: bool) -> None:
    scene = adam(
        calm_net(),
        fused=fused,
        loss=lambda s, b: nn.functional.cross_entropy(s.model(b["x"]), b["y"]),
    )
    keyed = [{"x": x, "y": y} for x, y in [DATA[0], poisoned(DATA[1], value), DATA[2]]]
    found = incidents(scene, "step", grouped(keyed, 1))
    assert kinds(found) == [(1, "nonfinite_input")]
    assert found[0].reading.bad_inputs == ("batch:x",)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_bad_loss_of_good_input(loop: str, fused: bool) -> None:
    scene = adam(
        calm_net(),
        fused=fused,
        loss=changed_loss(lambda v, s: torch.log(v - v.detach() - 1.0), DATA[1]),
    )
    assert kinds(incidents(scene, loop, grouped(DATA[:3], 1))) == [(1, "nonfinite_loss")]


def _singular(value: Tensor, scene: Scene) -> Tensor:
    return value + torch.sqrt(first_weight(scene).sum() * 0.0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_bad_gradient_of_a_good_loss(loop: str, fused: bool) -> None:
    scene = adam(calm_net(), fused=fused, loss=changed_loss(_singular, DATA[1]))
    found = incidents(scene, loop, grouped(DATA[:3], 1))
    assert kinds(found) == [(1, "nonfinite_gradient")]
    assert math.isfinite(found[0].reading.loss or NAN) and "0.weight" in found[0].verdict.summary


def test_late_reading_never_takes_the_next_gradients_for_its_own() -> None:
    scene = adam(
        plain_net(), fused=True, loss=changed_loss(_singular, DATA[1])
    )  # nothing forces an early reading
    found = incidents(scene, "watch", grouped(DATA[:4], 1))
    assert kinds(found) == [(1, "nonfinite_gradient")]
    assert (
        found[0].reading.bad_grads == ()
    )  # they are gone, and those of the next step are not theirs


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_finite_gradients_whose_norm_overflows(loop: str, fused: bool) -> None:
    scene = adam(
        calm_net(),
        fused=fused,
        loss=changed_loss(lambda v, s: v + (first_weight(s) * 1e25).sum(), DATA[1]),
    )
    before = state_of(scene)
    found = incidents(scene, loop, [(DATA[1],)])
    assert kinds(found) == [(0, "infinite_norm")]
    assert found[0].reading.grads_finite and found[0].reading.grad_norm == INF
    assert difference(state_of(scene)["model"], before["model"]) == ""


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_parameter_that_turned_bad_between_steps_stops_the_run(loop: str, fused: bool) -> None:
    scene = adam(plain_net(), fused=fused)

    def steps() -> Any:
        yield (DATA[0],)
        with torch.no_grad():
            first_weight(scene)[0, 0] = NAN
        yield (DATA[1],)
        yield (DATA[2],)

    with pytest.raises(TrainingHalted) as halted:
        LOOPS[loop](scene, steps())
    incident = halted.value.incident
    assert incident.verdict.kind == "nonfinite_parameter" and incident.reading.bad_state == (
        "param:0.weight",
    )


@pytest.mark.parametrize("loop", LOOPS)
def test_norm_statistics_that_turned_bad_between_steps_stop_the_run(loop: str) -> None:
    scene = sgd(calm_net())

    def steps() -> Any:
        yield (DATA[0],)
        scene.model[1].running_var[0] = NAN
        if loop == "watch":
            scene.model.load_state_dict(
                scene.model.state_dict()
            )  # how statistics change outside a forward
        yield (DATA[1],)

    with pytest.raises(TrainingHalted) as halted:
        LOOPS[loop](scene, steps())
    incident = halted.value.incident
    assert (incident.verdict.kind, incident.reading.bad_state) == (
        "nonfinite_buffer",
        ("buffer:1.running_var",),
    )


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_norm_statistics_that_this_step_overflows_are_put_back(loop: str, fused: bool) -> None:
    def saturated(scene: Scene, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(
            scene.model(batch[0]).tanh(), batch[1]
        )  # finite whatever comes in

    scene, reference = (
        adam(calm_net(), fused=fused, loss=saturated),
        adam(calm_net(), fused=fused, loss=saturated),
    )
    huge = (DATA[1][0] * 1e20, DATA[1][1])  # the variance of 1e20 overflows fp32
    found = incidents(scene, loop, [(DATA[0],), (huge,), (DATA[2],)])
    assert [i.verdict.kind for i in found] == ["nonfinite_buffer"] and found[0].reading.state_born
    assert found[0].decision is not None and found[0].decision.action == "skip"
    for batch in (DATA[0], DATA[2]):
        plain_step(reference, (batch,))
    assert difference(state_of(scene), state_of(reference)) == ""


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_poisoned_optimizer_state_stops_the_run_before_it_spreads(loop: str, fused: bool) -> None:
    scene = adam(plain_net(), fused=fused)
    plain_step(scene, (DATA[0],))
    scene.optimizer.state[first_weight(scene)]["exp_avg_sq"][0] = INF
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
        # as LoRA starts: the first layer's gradient is exactly 0, and 0 / (0 + 0) is NaN
        model[2].weight.zero_()
        model[2].bias.zero_()
    scene = Scene(model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-8, foreach=True))
    scene.loss = lambda s, b: nn.functional.cross_entropy(s.model(b[0].half()).float(), b[1])
    before = state_of(scene)
    found = incidents(scene, loop, [(DATA[0],)])
    assert kinds(found) == [(0, "nonfinite_parameter")]
    assert found[0].reading.state_born and found[0].reading.grads_finite
    assert difference(state_of(scene), before) == ""


# --- finite anomalies
# -------------------------------------------------------------------------------------------------


def _notes(folder: Path) -> list[tuple[int, str]]:
    return [(n["step"], n["kind"]) for n in read_run(folder).notes if n["type"] == "note"]


def test_loss_that_stays_zero_is_noted_once(tmp_path: Path) -> None:
    scene = sgd(plain_net(), loss=lambda s, b: s.model(b[0]).sum() * 0.0)
    assert incidents(scene, "step", grouped(DATA, 1), quiet(run_dir=tmp_path)) == []
    assert _notes(tmp_path) == [(4, "zero_loss")]
    (note,) = [n for n in read_run(tmp_path).notes if n["type"] == "note"]
    assert note["code"] == "SG803" and "stepguard explain SG803" in note["summary"]


def test_batch_without_labels_is_noted(tmp_path: Path) -> None:
    def summed(scene: Scene, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(scene.model(batch["x"]), batch["y"], reduction="sum")

    keyed = [
        {"x": x, "y": torch.full_like(y, -100) if i == 2 else y}
        for i, (x, y) in enumerate(DATA[:4])
    ]
    config = quiet(run_dir=tmp_path, labels_key="y")
    assert incidents(sgd(plain_net(), loss=summed), "step", grouped(keyed, 1), config) == []
    assert _notes(tmp_path) == [(2, "no_labels")]
    assert [line["labels"] for line in read_run(tmp_path).steps] == [4, 4, 0, 4]


def _through_half(scene: Scene, batch: Any) -> Tensor:
    """The gradient passes through fp16 and is 2e5 there: too much for any scale from 0.33 on."""
    return (scene.model(batch[0]).half().float() * 2e5).sum() * 1e-3 / 1e-3


@pytest.mark.parametrize("loop", LOOPS)
def test_scaler_that_collapses_is_an_incident(loop: str) -> None:
    model = plain_net()
    scaler = GradScaler("cpu", init_scale=4.0)
    scene = Scene(
        model, torch.optim.SGD(model.parameters(), lr=1e-9), scaler=scaler, loss=_through_half
    )
    found = incidents(scene, loop, grouped(DATA[:5], 1))
    assert kinds(found)[0] == (3, "scaler_collapse")  # 4, 2 and 1 are calibration
    assert found[0].reading.scale == 0.5


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_scaler_that_warms_up_is_no_incident(loop: str, fused: bool, tmp_path: Path) -> None:
    scene = adam(plain_net(), fused=fused, scaler=GradScaler("cpu", init_scale=2.0**14))
    scene.loss = lambda s, b: (s.model(b[0]).half().float() * 64).square().mean()
    assert incidents(scene, loop, grouped(DATA, 1), quiet(run_dir=tmp_path)) == []
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
def test_spike_of_hurt_weights_is_an_incident_and_a_hard_batch_is_not(
    fused: bool, tmp_path: Path
) -> None:
    scene = _valley()
    scene.optimizer = torch.optim.SGD(scene.model.parameters(), lr=0.1, fused=fused)
    config = quiet(run_dir=tmp_path, snapshot_every=8, anomalies="act")
    with Guard(scene.model, scene.optimizer, config=config) as guard:
        _down(guard, scene, 85)
        hard = guard.step(scene.loss_fn, torch.tensor(30.0))
        assert hard.incident is None and hard.committed
        guard.step(scene.loss_fn, torch.tensor(0.0))
        with torch.no_grad():
            scene.model.height.fill_(30.0)
        results = [guard.step(scene.loss_fn, torch.tensor(0.01 * index)) for index in range(3)]
        hurt = results[-1]
        assert [r.incident for r in results[:2]] == [None, None]
        assert hurt.incident is not None and hurt.incident.verdict.kind == "spike"
        assert (hurt.incident.verdict.evidence or {})["repeat_loss"] == pytest.approx(30.0, abs=0.5)
        assert hurt.incident.decision is not None and hurt.incident.decision.action == "rewind"
        assert not hurt.committed and float(scene.model.height.detach()) < 5.0
    assert _notes(tmp_path) == [(85, "spike"), (87, "spike"), (88, "spike")]


@pytest.mark.parametrize("loop", LOOPS)
def test_finite_anomalies_are_told_and_nothing_is_done_by_default(
    loop: str, tmp_path: Path
) -> None:
    calls = []

    def loss(scene: Scene, batch: Any) -> Tensor:
        calls.append(1)
        return nn.functional.cross_entropy(scene.model(batch[0]), batch[1])

    scene, reference = (
        Scene(m, torch.optim.SGD(m.parameters(), 0.01), loss=loss)
        for m in (plain_net(), plain_net())
    )
    hard = [(x * 40.0, y) for x, y in DATA[:4]]
    steps = grouped([*DATA[:4] * 8, *hard, *DATA[:4]], 1)
    for micro in steps:
        plain_step(reference, micro)
    bare_calls = len(calls)
    calls.clear()
    assert incidents(scene, loop, steps, quiet(run_dir=tmp_path)) == []
    assert len(calls) == bare_calls
    assert difference(state_of(scene), state_of(reference)) == ""
    assert {kind for _, kind in _notes(tmp_path)} == {"spike"}


def test_no_line_blames_the_data_or_the_weights_without_a_measurement(tmp_path: Path) -> None:
    scene = _valley()
    with Guard(scene.model, scene.optimizer, config=quiet(run_dir=tmp_path)) as guard:
        _down(guard, scene, 40)
        guard.step(scene.loss_fn, torch.tensor(30.0))
    said = [
        str(note.get("summary")) for note in read_run(tmp_path).notes if note.get("kind") == "spike"
    ]
    assert said and not any(
        word in line for line in said for word in ("did it", "hurt", "earlier batch")
    )


def test_anomalies_off_says_nothing(tmp_path: Path) -> None:
    scene = _valley()
    with Guard(
        scene.model, scene.optimizer, config=quiet(run_dir=tmp_path, anomalies="off")
    ) as guard:
        _down(guard, scene, 40)
        guard.step(scene.loss_fn, torch.tensor(1e9))
    assert _notes(tmp_path) == []


@pytest.mark.slow
def test_slow_drift_of_the_weights_is_an_incident() -> None:
    scene = _valley()
    with Guard(
        scene.model, scene.optimizer, config=quiet(snapshot_every=8, anomalies="act")
    ) as guard:
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
    assert 32 <= first[0] < 250


@pytest.mark.slow
def test_slow_rise_of_the_data_is_no_incident() -> None:
    scene = _valley()
    with Guard(scene.model, scene.optimizer, config=QUIET) as guard:
        _down(guard, scene)
        scene.optimizer.param_groups[0]["lr"] = 0.0
        for index in range(200):
            assert guard.step(scene.loss_fn, torch.tensor(0.03 * index)).incident is None


def test_nan_never_enters_the_history(tmp_path: Path) -> None:
    scene = _valley()
    with Guard(scene.model, scene.optimizer, config=quiet(run_dir=tmp_path)) as guard:
        _down(guard, scene, 40)
        guard.step(scene.loss_fn, torch.tensor(NAN))
        with torch.no_grad():
            scene.model.height.fill_(60.0)
        guard.step(scene.loss_fn, torch.tensor(0.0))
        assert _notes(tmp_path)[-1] == (41, "spike")  # a blinded detector would pass it
        assert all(map(math.isfinite, guard._context.history.losses))
