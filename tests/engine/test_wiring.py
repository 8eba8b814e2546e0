"""A guard that does not fit its loop says so at once; values that the user follows stand beside the
loss.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import stepguard
from scenes import (
    NAN,
    Batch,
    Scene,
    batches,
    difference,
    plain_net,
    plain_step,
    poisoned,
    quiet,
    state_of,
)
from stepguard import ConfigError, Guard, GuardConfig
from stepguard.engine import wiring
from stepguard.engine.wiring import WiringWarning
from stepguard.journal import read_run
from stepguard.report import screen
from stepguard.report.terminal import paint_incident
from stepguard.watching import watch_for

DATA = batches(12)


def scene(model: nn.Module | None = None) -> Scene:
    model = model or plain_net()
    return Scene(model, torch.optim.SGD(model.parameters(), lr=0.1))


@contextmanager
def silence() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def told(run_dir: Path) -> list[str]:
    return [note["summary"] for note in read_run(run_dir).notes if note.get("kind") == "wiring"]


@pytest.mark.parametrize("config", [{"clip_norm": 1.0}, {}, "quiet", 3])
def test_config_that_is_no_config_is_refused(config: Any) -> None:
    at = scene()
    for make in (Guard, stepguard.watch):
        with pytest.raises(
            ConfigError, match=f"config is a {type(config).__name__}; give stepguard.GuardConfig"
        ):
            make(at.model, at.optimizer, config=config)


@pytest.mark.slow
@pytest.mark.parametrize("make", [Guard, stepguard.watch])
def test_optimizer_of_another_model_is_refused(make: Any) -> None:
    at, other = scene(), scene()
    with pytest.raises(
        ConfigError,
        match="holds no parameter of the Sequential it is given with, but some of another",
    ):
        make(other.model, at.optimizer, config=quiet())
    make(other.model, at.optimizer, modules={"first": at.model}, config=quiet()).close()


@pytest.mark.slow
def test_master_copies_in_no_module_are_no_mistake() -> None:
    model = plain_net()
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)

    def loss_fn(batch: Batch) -> Tensor:
        names = [name for name, _ in model.named_parameters()]
        out = torch.func.functional_call(model, dict(zip(names, masters, strict=True)), (batch[0],))
        return nn.functional.cross_entropy(out, batch[1])

    with silence(), Guard(model, optimizer, config=quiet()) as guard:
        assert all(guard.step(loss_fn, batch).committed for batch in DATA[:5])


def test_parameters_that_no_gradient_reaches_are_told_once() -> None:
    model = plain_net()
    optimizer = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=0.1)
    at = Scene(model, optimizer)
    with (
        pytest.warns(
            WiringWarning, match="no parameter of the optimizer got a gradient in 3 steps"
        ) as said,
        Guard(model, optimizer, config=quiet()) as guard,
    ):
        for batch in DATA[:8]:
            guard.step(at.loss_fn, batch)
    assert len(said) == 1


@pytest.mark.parametrize("mode", ["step", "watch"])
@pytest.mark.parametrize("given", [True, False])
def test_an_optimizer_without_a_trainable_parameter_is_named(mode: str, given: bool) -> None:
    """An adapter that was loaded for inference; checkpointing has given its inputs a gradient."""
    model = nn.Linear(4, 2).requires_grad_(False)
    groups = [{"params": list(model.parameters()) if given else []}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)

    def loss_fn(batch: Tensor) -> Tensor:
        out: Tensor = model(batch.clone().requires_grad_())
        return out.square().mean()

    make = Guard if mode == "step" else stepguard.watch
    with (
        pytest.warns(WiringWarning, match="no trainable parameter") as said,
        make(model, optimizer, config=quiet()) as guard,
    ):
        for _ in range(5):
            if mode == "step":
                guard.step(loss_fn, torch.randn(3, 4))
            else:
                loss_fn(torch.randn(3, 4)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        assert guard.armed
    assert len(said) == 1


def test_weights_replaced_before_the_first_step_are_an_error() -> None:
    at = scene()
    guard = Guard(at.model, at.optimizer, config=quiet())
    at.model.load_state_dict(
        {name: t.clone() for name, t in at.model.state_dict().items()}, assign=True
    )
    with guard, pytest.raises(ConfigError, match="no longer the model's"):
        guard.step(at.loss_fn, DATA[0])


@pytest.mark.parametrize("mode", ["step", "watch"])
def test_weights_replaced_in_mid_run_are_told(mode: str, tmp_path: Path) -> None:
    at = scene()
    make = Guard if mode == "step" else stepguard.watch
    with make(at.model, at.optimizer, config=quiet(run_dir=tmp_path)) as guard:

        def one(batch: Batch) -> None:
            if mode == "step":
                guard.step(at.loss_fn, batch)
            else:
                plain_step(at, (batch,))

        for batch in DATA[:5]:
            one(batch)
        at.model.load_state_dict(
            {name: t.clone() for name, t in at.model.state_dict().items()}, assign=True
        )
        with pytest.warns(WiringWarning, match="no longer the model's.*nothing is learned") as said:
            for batch in DATA[5:]:
                one(batch)
    assert len(said) == 1 and len(told(tmp_path)) == 1


def test_guard_beside_the_old_loop_is_told_at_the_first_update(tmp_path: Path) -> None:
    at = scene()
    guard = Guard(at.model, at.optimizer, config=quiet(run_dir=tmp_path))
    with pytest.warns(WiringWarning, match=r"outside of guard\.step.*stepguard\.watch") as said:
        for batch in DATA[:4]:
            plain_step(at, (batch,))
    guard.close()
    assert len(said) == 1
    assert (
        told(tmp_path)[-1]
        == "this guard saw no step: 4 calls of optimizer.step() came outside of guard.step"
    )
    assert not at.optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize(
    ("action", "category", "warned", "printed"),
    [
        ("default", Warning, 1, 0),
        ("always", WiringWarning, 1, 0),
        ("ignore", Warning, 0, 1),  # a script that hides all warnings still has to see this one
        ("ignore", WiringWarning, 0, 0),
    ],
)
def test_mistake_is_shown_once(
    action: Any,
    category: type[Warning],
    warned: int,
    printed: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    at = scene()
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        warnings.simplefilter(action, category)
        with Guard(at.model, at.optimizer, config=GuardConfig(run_dir=tmp_path)):
            for batch in DATA[:4]:
                plain_step(at, (batch,))
    said = "optimizer.step() was called outside of guard.step"
    assert sum(said in str(one.message) for one in caught) == warned
    assert capsys.readouterr().err.count(said) == printed
    assert sum(said in line for line in told(tmp_path)) == 1


def test_watched_optimizer_that_never_steps_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wiring, "WITHOUT_STEP", 5)
    at = scene()
    guard = stepguard.watch(at.model, at.optimizer, config=quiet(run_dir=tmp_path))
    with pytest.warns(
        WiringWarning, match="5 backward passes, and the watched optimizer has made no step"
    ) as said:
        for batch in DATA:
            at.optimizer.zero_grad()
            at.loss_fn(batch).backward()
    guard.close()
    assert len(said) == 1
    assert (
        told(tmp_path)[-1]
        == "this guard saw no step: 12 backward passes, and the optimizer never stepped"
    )


@pytest.mark.slow
def test_long_accumulation_is_no_mistake(tmp_path: Path) -> None:
    at = scene()
    with silence(), stepguard.watch(at.model, at.optimizer, config=quiet(run_dir=tmp_path)):
        for _ in range(3):
            at.optimizer.zero_grad()
            for batch in DATA * 9:
                at.loss_fn(batch).backward()
            at.optimizer.step()
    assert told(tmp_path) == []


def test_schedule_that_the_loop_advances_too_is_told_once() -> None:
    at = scene()
    schedule = LambdaLR(at.optimizer, lambda step: 1.0)
    with (
        pytest.warns(WiringWarning, match=r"twice as fast.*state=") as said,
        Guard(at.model, at.optimizer, scheduler=schedule, config=quiet()) as guard,
    ):
        for batch in DATA[:6]:
            guard.step(at.loss_fn, batch)
            schedule.step()
    assert len(said) == 1


@pytest.mark.parametrize("fused", [False, True])
def test_schedule_moved_by_hand_once_or_taken_back_by_a_veto_is_no_mistake(fused: bool) -> None:
    model = plain_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    at, schedule = Scene(model, optimizer), LambdaLR(optimizer, lambda step: 1.0)
    with silence(), Guard(model, optimizer, scheduler=schedule, config=quiet()) as guard:
        guard.step(at.loss_fn, DATA[0])
        guard.port.settle()
        schedule.step()
        for batch in (
            DATA[1],
            poisoned(DATA[2]),
            poisoned(DATA[3]),
            DATA[4],
            poisoned(DATA[5]),
            DATA[6],
        ):
            guard.step(at.loss_fn, batch)
            guard.port.settle()


@pytest.mark.parametrize("make", [Guard, stepguard.watch])
def test_cell_that_runs_again_replaces_its_guard(make: Any, tmp_path: Path) -> None:
    at, twin = scene(), scene()
    with silence():
        first = make(at.model, at.optimizer, config=quiet(run_dir=tmp_path))
        second = make(at.model, at.optimizer, config=quiet(run_dir=tmp_path))
    assert first._closed and len(told(tmp_path)) == 1 and "a new one was built" in told(tmp_path)[0]
    with stepguard.watch(twin.model, twin.optimizer, config=quiet()):
        plain_step(twin, (DATA[0],))
    if make is Guard:
        second.step(at.loss_fn, DATA[0])
    else:
        plain_step(at, (DATA[0],))
    second.close()
    assert difference(state_of(at), state_of(twin)) == ""


def test_guard_in_an_open_block_is_not_replaced() -> None:
    at = scene()
    with (
        stepguard.watch(at.model, at.optimizer, config=quiet()) as guard,
        pytest.raises(
            ConfigError, match="has a guard already, in a `with` block that is still open"
        ),
    ):
        Guard(at.model, at.optimizer, config=quiet())
    assert guard._closed
    Guard(at.model, at.optimizer, config=quiet()).close()


def test_guard_of_a_framework_is_not_replaced() -> None:
    at = scene()
    theirs = watch_for("transformers", at.model, at.optimizer, config=quiet(clip_norm=1.0))
    with pytest.raises(ConfigError, match="made by transformers; close that one first"):
        stepguard.watch(at.model, at.optimizer, config=quiet())
    theirs.close()
    stepguard.watch(at.model, at.optimizer, config=quiet()).close()


@pytest.mark.parametrize("mode", ["step", "watch"])
def test_anomaly_mode_is_noted_once(mode: str, tmp_path: Path) -> None:
    at = scene()
    make = Guard if mode == "step" else stepguard.watch
    with (
        warnings.catch_warnings(),
        torch.autograd.set_detect_anomaly(True),
        make(
            at.model, at.optimizer, config=GuardConfig(run_dir=tmp_path, terminal="quiet")
        ) as guard,
    ):
        warnings.simplefilter("ignore")
        for batch in DATA[:3]:
            if mode == "step":
                guard.step(at.loss_fn, batch)
            else:
                plain_step(at, (batch,))
    assert len(told(tmp_path)) == 1 and "anomaly mode is on" in told(tmp_path)[0]


# --- values that the user follows


def followed_scene(*, fused: bool = False) -> Scene:
    model = plain_net()
    return Scene(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused))


def following(
    made: Scene, guard: Callable[[], Guard], value: Callable[[int], Any]
) -> Callable[[Any], Tensor]:
    """A loss function that follows `value(step)` as gate."""

    def loss_fn(batch: Any) -> Tensor:
        guard().follow("gate", value(guard().steps))
        loss: Tensor = made.loss_fn(batch)
        return loss

    return loss_fn


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("entry", ["step", "watch"])
def test_what_is_followed_stands_beside_the_loss_of_its_step(
    entry: str, fused: bool, tmp_path: Path
) -> None:
    made, config = (
        followed_scene(fused=fused),
        quiet(run_dir=tmp_path / "run", human_log=tmp_path / "log"),
    )
    if entry == "step":
        with Guard(made.model, made.optimizer, config=config) as guard:
            for batch in DATA[:4]:
                guard.step(
                    following(made, lambda: guard, lambda step: torch.tensor([0.5, -step - 1.0])),
                    batch,
                )
    else:
        with stepguard.watch(made.model, made.optimizer, config=config) as guard:
            made.loss = lambda s, b: (guard.follow("gate", guard.steps + 1), plain_loss(s, b))[1]
            for batch in DATA[:4]:
                plain_step(made, (batch,))

    lines = read_run(tmp_path / "run").steps
    assert [line["followed"] for line in lines] == [{"gate": float(step + 1)} for step in range(4)]
    logged = [
        json.loads(text)
        for text in (tmp_path / "log" / "training_log.jsonl").read_text().splitlines()
    ]
    assert [line["followed"]["gate"] for line in logged] == [1.0, 2.0, 3.0, 4.0]
    assert "gate 3" in (tmp_path / "log" / "latest.log").read_text().splitlines()[2]


def plain_loss(made: Scene, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(made.model(batch[0]), batch[1])


@pytest.mark.parametrize("fused", [False, True])
def test_a_followed_nan_is_written_down_and_no_incident(fused: bool, tmp_path: Path) -> None:
    made, alone = followed_scene(fused=fused), followed_scene(fused=fused)
    with Guard(made.model, made.optimizer, config=quiet(run_dir=tmp_path)) as guard:
        for batch in DATA[:4]:
            guard.step(following(made, lambda: guard, lambda step: NAN), batch)
        assert guard.incidents == ()
    for batch in DATA[:4]:
        plain_step(alone, (batch,))

    assert all(math.isnan(line["followed"]["gate"]) for line in read_run(tmp_path).steps)
    for mine, other in zip(made.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("entry", ["step", "watch", "watch, schedule not given"])
def test_an_incident_has_rate_and_position_of_its_own_step(entry: str, fused: bool) -> None:
    """Not those of the next one, which the schedule may have set when the incident is told."""
    made = followed_scene(fused=fused)
    schedule = torch.optim.lr_scheduler.OneCycleLR(made.optimizer, 0.1, total_steps=20)
    start = Guard if entry == "step" else stepguard.watch
    given = {} if "not given" in entry else {"scheduler": schedule}
    rates = []
    with start(made.model, made.optimizer, config=quiet(), **given) as guard:
        for number, batch in enumerate(DATA[:8]):
            rates.append(schedule.get_last_lr()[0])
            batch = poisoned(batch, NAN) if number == 5 else batch
            if entry == "step":
                guard.step(made.loss_fn, batch)
            else:
                plain_step(made, (batch,))
                schedule.step()
    (incident,) = guard.incidents
    assert incident.step == 5 and incident.reading.lr == pytest.approx((rates[5],))
    moved = fused and "not given" in entry
    assert incident.reading.schedule == ("OneCycleLR" if moved else "OneCycleLR at 5 of 20")
    console = screen.paper(width=200, colour=False)
    paint_incident(console, incident)
    assert f"({incident.reading.schedule})" in console.file.getvalue()  # type: ignore[attr-defined]


def test_settings_without_effect_are_refused() -> None:
    at = scene()
    with pytest.raises(ConfigError, match=r"inside guard\.step only.*GradScaler"):
        stepguard.watch(at.model, at.optimizer, config=quiet(loss_scale=8.0))
    for make in (Guard, stepguard.watch):
        with pytest.raises(ConfigError, match="checkpoint_every=10 has no folder"):
            make(at.model, at.optimizer, config=quiet(clip_norm=1.0, checkpoint_every=10))
    assert not at.optimizer._optimizer_step_pre_hooks
    with Guard(at.model, at.optimizer, config=quiet()) as guard:
        with pytest.raises(ConfigError, match=r"follow\('gate'\) got a str"):
            guard.follow("gate", "high")  # type: ignore[arg-type]
        for batch in DATA[: wiring.LOOKED_AT + 1]:
            guard.step(at.loss_fn, batch)
        # the hook that looks for updates outside of guard.step is gone after a few steps
        assert guard.armed and not at.optimizer._optimizer_step_pre_hooks
