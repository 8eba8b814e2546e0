"""Each kind of bad step gets its own verdict and its own remedy, and what is benign gets none."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler

from engine.parts import incident_of, origin_of, step_of
from guard.judging import adam, changed_loss, first_weight, incidents, kinds, sgd
from scenes import (
    INF,
    LOOPS,
    NAN,
    Batch,
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
from stepguard.engine.incident.anomaly_check import TOLD_FOR, AnomalyCheck
from stepguard.engine.incident.closer_look import (
    EXTREME,
    LOST,
    accept,
    agreed_trouble,
    bad_tensors,
    blamed_on_update,
    born_in_update,
    examine,
    exploded,
    presumed_verdict,
    stored_culprit,
    stored_trouble,
    surfaces_only,
    weights_ruined,
)
from stepguard.engine.incident.situation import Decider
from stepguard.journal import read_run
from stepguard.judge.decide import Situation
from stepguard.ranks.one_decision import OneDecision
from stepguard.records import Evidence, Incident, Operand, Origin, Reading, Verdict

DATA = batches(12)


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


# --- learning rates that were not configured, or are not numbers


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("rate", [NAN, INF])
def test_learning_rate_that_is_no_number_never_reaches_the_weights(loop: str, rate: float) -> None:
    scene = sgd(plain_net())
    before = state_of(scene)["model"]
    scene.optimizer.param_groups[0]["lr"] = rate
    assert kinds(incidents(scene, loop, [(DATA[0],)])) == [(0, "lr_mismatch")]
    assert difference(state_of(scene)["model"], before) == ""


# --- losses that rise by intention


STEPS, SWITCH = 60, 30
SIXTY = batches(STEPS, size=8)


def test_runaway_loss_is_told_once_and_then_only_noted() -> None:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guard(model, optimizer, config=quiet()) as guard:
        check = AnomalyCheck(guard._context, guard._rewinder, clips_itself=True)
        runaway = Verdict(kind="spike", severity="incident", summary="high")
        severities = []
        for step in (10, 11, 10 + TOLD_FOR):
            reading = Reading(step=step, loss=1e9)
            _, verdict = check.weigh(step_of(SIXTY[0]), reading, runaway)
            severities.append(verdict.severity)
    assert severities == ["incident", "note", "incident"]


def test_earlier_batch_is_evaluated_on_the_present_weights() -> None:
    model = plain_net()
    for maximize, sign in ((False, 1.0), (True, -1.0)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, maximize=maximize)
        with Guard(model, optimizer, config=quiet()) as guard:
            check = AnomalyCheck(guard._context, guard._rewinder, clips_itself=True)
            assert check.earlier_batch_now() is None
            guard._context.memory.anchor = (step_of(SIXTY[0], model=model), 0.25)
            now = F.cross_entropy(model(SIXTY[0][0]), SIXTY[0][1]).item()
            assert check.earlier_batch_now() == (sign * now, 0.25)


# --- the closer look


BAD = Reading(step=0, loss=math.nan, micro_losses=(math.nan,), grads_finite=False)


@pytest.fixture
def calm_guard() -> Iterator[Guard]:
    model = calm_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Guard(model, optimizer, config=quiet()) as made:
        yield made


def _model(calm_guard: Guard) -> nn.Module:
    return calm_guard._context.model


def test_bad_batch_and_gradients_are_named(calm_guard: Guard) -> None:
    model = _model(calm_guard)
    step = step_of(poisoned(DATA[0]), model=model)
    nn.functional.cross_entropy(model(step.micro_batches[0][0]), DATA[0][1]).backward()
    seen = examine(calm_guard._context, step, BAD)
    assert seen.bad_inputs and seen.bad_inputs[0].startswith("batch:")
    assert set(seen.bad_grads) == {"0.weight", "3.weight"}
    assert seen.bad_state == ()
    gone = step_of(poisoned(DATA[0]), model=_model(calm_guard), grads_gone=True)  # made again
    assert set(examine(calm_guard._context, gone, BAD).bad_grads) == {"0.weight", "3.weight"}


def test_stored_tensor_that_is_bad_is_named_until_it_is_accepted(calm_guard: Guard) -> None:
    with torch.no_grad():
        _model(calm_guard)[0].weight[0, 0] = math.inf  # type: ignore[index, union-attr]
    assert stored_trouble(calm_guard._context) == ["param:0.weight"]
    assert agreed_trouble(calm_guard._context, together=True) == ("param:0.weight",)
    assert bad_tensors(_model(calm_guard)) == ("param:0.weight",)
    accept(calm_guard._context, ["param:0.weight"])
    assert stored_trouble(calm_guard._context) == []
    assert born_in_update(calm_guard._context) == []


def test_running_statistic_of_a_norm_layer_must_be_finite() -> None:
    model = calm_net()
    model[1].running_mean[0] = math.nan  # type: ignore[index]
    model.register_buffer("sentinel", torch.tensor(math.inf))
    assert bad_tensors(model) == ("buffer:1.running_mean",)


# --- weights that have exploded


HUGE = (Operand(name="self", max=2 * EXTREME),)
OVERFLOW = Evidence(finite_in=1e30)


@pytest.mark.parametrize(
    "changed",
    [
        {"phase": "state"},
        {"samples": (3,)},
        {"tensor": "batch:x"},
        {"evidence": Evidence()},
        {"evidence": Evidence(finite_in=1e30, half_precision=True)},
        {"inputs": (Operand(max=1.0),)},
        {"inputs": (*HUGE, Operand(posinf=1))},
    ],
)
def test_overflow_with_a_reason_of_its_own_is_left_where_it_is(changed: dict[str, object]) -> None:
    overflow = {"inputs": HUGE, "evidence": OVERFLOW}
    assert surfaces_only(origin_of(**overflow)) and not surfaces_only(None)
    assert not surfaces_only(origin_of(**{**overflow, **changed}))


@pytest.mark.parametrize(
    ("tensor", "guilty"),
    [("param:0.weight", True), ("buffer:bn.running_var", True), ("opt:exp_avg", False)],
)
def test_stored_tensors_of_the_model_are_met_by_the_next_batch(tensor: str, guilty: bool) -> None:
    assert stored_culprit(origin_of(phase="state", tensor=tensor)) == guilty
    as_data = origin_of(phase="state", tensor=tensor, evidence=Evidence(as_data=True))
    assert not stored_culprit(as_data) and not stored_culprit(None)


@pytest.mark.parametrize(
    ("now", "then", "expected"),
    [(math.nan, 1.0, True), (math.inf, 1.0, True), (2 * LOST, 1.0, True), (50.0, 1.0, False)],
)
def test_earlier_batch_that_fails_now_ruins_the_weights(
    now: float, then: float, expected: bool
) -> None:
    assert exploded((now, then)) == expected


def test_blame_moves_to_the_update_and_keeps_where_it_surfaced() -> None:
    origin = origin_of(op="aten.exp", module="net", inputs=HUGE, evidence=OVERFLOW)
    blamed = blamed_on_update(origin, Reading(step=0, repeat_loss=1e9))
    assert (blamed.phase, blamed.op, blamed.module) == ("optimizer", None, None)
    assert blamed.evidence.surfaced_at == "aten.exp"
    assert weights_ruined(blamed)


# --- what the cheap reading proves


def _context(*, scaling: bool = False) -> Any:
    return SimpleNamespace(scaling=lambda: scaling)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, "ok"),
        ({"loss": math.nan}, "nonfinite_loss"),
        ({"micro_losses": (1.0, math.inf)}, "nonfinite_loss"),
        ({"grads_finite": False}, "nonfinite_gradient"),
        ({"grad_norm": math.inf}, "infinite_norm"),
        ({"bad_state": ("state",)}, "nonfinite_parameter"),
        ({"bad_state": ("param:w",), "state_born": True}, "nonfinite_parameter"),
    ],
)
def test_what_is_proven_bad_is_refused_and_all_else_passes(
    fields: dict[str, Any], kind: str
) -> None:
    verdict = presumed_verdict(_context(), Reading(**{"step": 3, "loss": 1.0, **fields}))
    assert verdict.kind == kind
    assert verdict.bad == (kind != "ok")


def test_gradients_that_a_scaler_may_have_overflowed_are_its_calibration() -> None:
    reading = Reading(step=3, loss=1.0, grads_finite=False)
    assert presumed_verdict(_context(scaling=True), reading).kind == "scale_calibration"
    by_loss = Reading(step=3, loss=math.nan, grads_finite=False)
    assert presumed_verdict(_context(scaling=True), by_loss).kind == "nonfinite_loss"


# --- the fault decides the remedy


@pytest.fixture
def guard() -> Iterator[Guard]:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guard(model, optimizer, config=quiet()) as made:
        yield made


def _situation(
    guard: Guard,
    *,
    kind: Any = "nonfinite_loss",
    origin: Origin | None = None,
    committed: bool = False,
    batch: Any = None,
    **reading: Any,
) -> Situation:
    context, rewinder = guard._context, guard._rewinder
    anomalies = AnomalyCheck(context, rewinder, clips_itself=True)
    ranks = OneDecision(context.agreement, [])
    decider = Decider(context, rewinder, anomalies, ranks, lambda *_: origin_of(), reruns=True)
    found = incident_of(reading=Reading(step=0, **reading), origin=origin)
    incident = Incident(
        id=found.id,
        step=found.step,
        verdict=Verdict(kind=kind, severity="incident"),
        reading=found.reading,
        origin=origin,
    )
    return decider._answer(incident, step_of(batch or DATA[0]), committed).situation


def test_ruined_weights_with_nothing_to_go_back_to_are_answered_as_bad_data(guard: Guard) -> None:
    ruined = origin_of(phase="optimizer", evidence=Evidence(weights_ruined=True))
    assert _situation(guard, origin=ruined).fault == "data"
    assert guard._rewinder.snapshots.take() is not None
    guard._rewinder.probation.commit(guard._context.config.snapshots.probation)
    assert _situation(guard, origin=ruined).fault == "state"


def _singular(value: Tensor, scene: Scene) -> Tensor:
    return value + torch.sqrt(first_weight(scene).sum() * 0.0)


BORN = {
    "nonfinite_loss": lambda v, s: torch.log(v - v.detach() - 1.0),
    "nonfinite_gradient": _singular,
    "infinite_norm": lambda v, s: v + (first_weight(s) * 1e25).sum(),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", BORN)
def test_bad_loss_of_good_input(kind: str, loop: str, fused: bool) -> None:
    """And bad gradients of a good loss, and finite ones whose norm overflows."""
    scene = adam(calm_net(), fused=fused, loss=changed_loss(BORN[kind], DATA[1]))
    reference = adam(calm_net(), fused=fused)
    found = incidents(scene, loop, grouped(DATA[:3], 1))
    assert kinds(found) == [(1, kind)]
    reading = found[0].reading
    assert math.isfinite(reading.loss or NAN) == (kind != "nonfinite_loss")
    if kind == "nonfinite_gradient":
        assert "0.weight" in found[0].verdict.summary
    if kind == "infinite_norm":
        assert reading.grads_finite and reading.grad_norm == INF
    for batch in (DATA[0], DATA[2]):
        plain_step(reference, (batch,))
    assert difference(state_of(scene), state_of(reference)) == ""


def test_late_reading_never_takes_the_next_gradients_for_its_own() -> None:
    # nothing forces an early reading here
    scene = adam(plain_net(), fused=True, loss=changed_loss(_singular, DATA[1]))
    found = incidents(scene, "watch", grouped(DATA[:4], 1))
    assert kinds(found) == [(1, "nonfinite_gradient")]
    assert found[0].reading.bad_grads == ()  # they are gone; those of the next step are others


@pytest.mark.parametrize("part", ["parameter", "buffer"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_tensor_that_turned_bad_between_steps_stops_the_run(
    loop: str, fused: bool, part: str
) -> None:
    scene = adam(calm_net(), fused=fused)

    def steps() -> Any:
        yield (DATA[0],)
        with torch.no_grad():
            if part == "parameter":
                first_weight(scene)[0, 0] = NAN
            else:
                scene.model[1].running_var[0] = NAN
        if part == "buffer" and loop == "watch":  # how statistics change outside a forward
            scene.model.load_state_dict(scene.model.state_dict())
        yield (DATA[1],)
        yield (DATA[2],)

    with pytest.raises(TrainingHalted) as halted:
        LOOPS[loop](scene, steps())
    incident = halted.value.incident
    name = "param:0.weight" if part == "parameter" else "buffer:1.running_var"
    assert (incident.verdict.kind, incident.reading.bad_state) == (f"nonfinite_{part}", (name,))


def test_anomalies_are_told_without_blame_or_not_at_all(tmp_path: Path) -> None:
    for anomalies in ("note", "off"):
        scene, folder = _valley(), tmp_path / anomalies
        config = quiet(run_dir=folder, anomalies=anomalies)
        with Guard(scene.model, scene.optimizer, config=config) as guard:
            _down(guard, scene, 40)
            guard.step(scene.loss_fn, torch.tensor(30.0))
    said = [str(n["summary"]) for n in read_run(tmp_path / "note").notes if n["type"] == "note"]
    assert said
    assert not any(word in line for line in said for word in ("did it", "hurt", "earlier batch"))
    assert _notes(tmp_path / "off") == []


def _second_term(model: nn.Module, batch: Batch, step: int) -> Tensor:
    scores = model(batch[0])
    first = F.cross_entropy(scores, batch[1])
    return first + (50.0 + scores.pow(2).mean() if step >= SWITCH else 0.0)


def _reward(model: nn.Module, batch: Batch, step: int) -> Tensor:
    return 1e-3 - 1e-3 * F.cross_entropy(model(batch[0]), batch[1]) + 0.01 * step**2


def _penalty(model: nn.Module, batch: Batch, step: int) -> Tensor:
    away = [(p - s).pow(2).sum() for p, s in zip(model.parameters(), START, strict=True)]
    score = model(batch[0]).sum()
    return torch.stack(away).sum() + score - score.detach()


START = [p.detach().clone() for p in plain_net().parameters()]
RISES = {
    "second term": (_second_term, 0.01, False),
    "reward": (_reward, 0.05, True),
    "penalty from 0": (_penalty, 1e-3, False),
}


@pytest.mark.parametrize("name", RISES)
def test_loss_that_rises_by_intention_is_not_an_incident_and_changes_nothing(name: str) -> None:
    loss, lr, maximize = RISES[name]
    ends = []
    for guarded in (True, False):
        model = plain_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, maximize=maximize)
        config = quiet(snapshot_every=5, anomalies="act")
        guard = Guard(model, optimizer, config=config) if guarded else None
        for step, batch in enumerate(SIXTY):
            if guard is not None:
                guard.step(lambda b, step=step, model=model: loss(model, b, step), batch)
                continue
            optimizer.zero_grad()
            loss(model, batch, step).backward()
            optimizer.step()
        if guard is not None:
            guard.close()
            assert guard.incidents == ()
        ends.append([p.detach() for p in model.parameters()])
    assert all(map(torch.equal, *ends))


def test_weights_that_are_hurt_while_the_loss_stays_the_same_are_an_incident() -> None:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guard(model, optimizer, config=quiet(snapshot_every=5, anomalies="act")) as guard:
        for step, batch in enumerate(SIXTY[: SWITCH + 3]):
            if step == SWITCH:
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(-60.0)
            guard.step(lambda b: F.cross_entropy(model(b[0]), b[1]), batch)
    assert [(i.step, i.verdict.kind) for i in guard.incidents] == [(SWITCH + 2, "spike")]
