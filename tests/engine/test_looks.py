"""When looks are taken, and that a run with looks is the bare run."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import stepguard
from stepguard import ConfigError, Guard, GuardConfig, Probes, Snapshots
from stepguard.cli.app import app
from stepguard.journal import read_run
from stepguard.probes.looks import (
    EARLY_SECONDS,
    EARLY_SHARE,
    FIRST,
    LEAST_SECONDS,
    SHARE,
    LookSchedule,
    is_average,
    tensors_held,
)
from stepguard.tensors.torch_private import dispatch_mode_stack

STEPS = 8


def looked_at(steps: int, *, look: float, step: float, unseen: float = 0.0) -> list[int]:
    """Steps that are looked at by default, where a look and a step take so many seconds."""
    now = 0.0
    schedule = LookSchedule("auto", clock=lambda: now)
    looked = []
    for number in range(steps):
        if schedule.due(number):
            looked.append(number)
            schedule.took(number, look)
            now += look + unseen
        now += step
    return looked


def test_fast_steps_are_looked_at_from_the_start() -> None:
    """A run of a few seconds is over before a thousandth of its time is worth a look."""
    looked = looked_at(3200, look=0.008, step=0.001)
    assert looked[:6] == [2, 4, 8, 13, 18, 23]
    assert 0.008 * len(looked) <= EARLY_SHARE * LEAST_SECONDS


def test_automatic_looks_take_a_hundredth_early_and_a_thousandth_later() -> None:
    looked = looked_at(200_000, look=0.1, step=0.05)
    assert looked[0] == FIRST
    seconds = 0.05 * 200_000
    early = [step for step in looked if 0.05 * step <= EARLY_SECONDS]
    assert 0.1 * (len(early) - 1) <= EARLY_SHARE * EARLY_SECONDS
    assert 0.1 * (len(looked) - 1) <= EARLY_SHARE * EARLY_SECONDS + SHARE * seconds
    gaps = [after - before for before, after in itertools.pairwise(looked[len(early) :])]
    assert min(gaps) >= 1000


def test_look_is_charged_with_what_it_does_not_see_of_itself() -> None:
    looked = looked_at(200_000, look=0.1, unseen=0.05, step=0.05)
    assert 3 < len(looked) < len(looked_at(200_000, look=0.1, step=0.05))


def test_looks_become_rarer() -> None:
    looked = looked_at(20_000, look=0.0, step=1.0)
    assert looked[-1] - looked[-2] >= 900


def test_trend_that_shows_is_followed_every_few_steps() -> None:
    now = 0.0
    schedule = LookSchedule("auto", clock=lambda: now)
    schedule.hurry = True
    looked = []
    for number in range(40):
        if schedule.due(number):
            looked.append(number)
            schedule.took(number, 0.01)
        now += 0.001
    assert looked[:4] == [2, 6, 10, 14]


def test_every_so_many_steps_or_never() -> None:
    schedule = LookSchedule(3)
    looked = []
    for step in range(9):
        if schedule.due(step):
            looked.append(step)
            schedule.took(step, 1.0)
    assert looked == [2, 5, 8]
    assert not LookSchedule(None).due(2)


@pytest.mark.parametrize("value", [0, -1, "often", 1.5])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="look_every"):
        GuardConfig(probes=Probes(look_every=value))


def train(way: str, folder: Path, *, fused: bool, every: int | None) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    config = GuardConfig(run_dir=folder, probes=Probes(look_every=every), terminal="quiet")

    def loss(batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    data = [torch.randn(16, 4) for _ in range(STEPS)]
    if way == "step":
        with Guard(model, optimizer, config=config) as guard:
            for batch in data:
                guard.step(loss, batch)
    else:
        watching = stepguard.watch(model, optimizer, config=config) if way == "watch" else None
        for batch in data:
            optimizer.zero_grad()
            loss(batch).backward()
            optimizer.step()
        if watching is not None:
            watching.close()
    state = [value for one in optimizer.state.values() for value in one.values()]
    return [*model.state_dict().values(), *state, torch.get_rng_state()]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", ["step", "watch"])
def test_run_with_looks_is_bit_identical_to_the_bare_one(
    way: str, fused: bool, tmp_path: Path
) -> None:
    bare = train("bare", tmp_path, fused=fused, every=None)
    looked = train(way, tmp_path, fused=fused, every=3)
    assert all(map(torch.equal, bare, looked))
    looks = read_run(tmp_path).looks
    assert [look.step for look in looks] == [2, 5]
    assert all(one.update for look in looks for one in look.parameters)
    assert not dispatch_mode_stack()


def test_bad_step_leaves_no_look(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = GuardConfig(run_dir=tmp_path, probes=Probes(look_every=1), terminal="quiet")
    with Guard(model, optimizer, config=config) as guard:
        for value in (1.0, 1.0, torch.nan, 1.0):
            guard.step(lambda x: model(x).mean(), torch.full((2, 4), value))
    record = read_run(tmp_path)
    assert len(record.incidents) == 1
    assert [look.step for look in record.looks] == [3]


def test_exception_in_the_step_ends_the_look() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guard(model, optimizer, config=GuardConfig(terminal="quiet")) as guard:
        for _ in range(FIRST):
            guard.step(lambda x: model(x).mean(), torch.ones(2, 4))
        with pytest.raises(RuntimeError):
            guard.step(lambda x: model(x).mean(), torch.ones(2, 5))
        assert not dispatch_mode_stack()


def test_evaluation_is_not_looked_at(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = GuardConfig(run_dir=tmp_path, probes=Probes(look_every=1), terminal="quiet")
    with stepguard.watch(model, optimizer, config=config):
        for _ in range(FIRST + 2):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).mean().backward()
            optimizer.step()
            with torch.no_grad():
                model(torch.ones(2, 4))
                assert not dispatch_mode_stack()


def test_exception_in_a_watched_forward_ends_the_look() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stepguard.watch(model, optimizer, config=GuardConfig(terminal="quiet")):
        for _ in range(FIRST):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).mean().backward()
            optimizer.step()
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 5))
        assert not dispatch_mode_stack()


def test_object_of_the_user_is_not_asked_for_its_state() -> None:
    class Counts:
        asked = 0

        def state_dict(self) -> dict[str, Any]:
            self.asked += 1
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    def asked(every: int | None) -> int:
        counts = Counts()
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = GuardConfig(
            probes=Probes(look_every=every), snapshots=Snapshots(count=0), terminal="quiet"
        )
        with Guard(model, optimizer, state={"counts": counts}, config=config) as guard:
            for _ in range(FIRST + 4):
                guard.step(lambda x: model(x).mean(), torch.ones(2, 4))
        return counts.asked

    assert asked(1) == asked(None)


class Shadow:
    """An average as scripts write it."""

    def __init__(self, model: nn.Module) -> None:
        self.means = {name: p.detach().clone() for name, p in model.named_parameters()}


def test_average_is_known_by_its_type_or_its_name() -> None:
    model = nn.Linear(4, 2)
    assert is_average("second", torch.optim.swa_utils.AveragedModel(model))
    assert is_average("model_ema", model)
    assert is_average("slow", Shadow(model))
    assert not is_average("reference", model)
    assert [value.shape for value in tensors_held(Shadow(model))] == [(2, 4), (2,)]
    assert tensors_held(3) == []


def test_batch_of_the_step_after_a_look_is_compared(tmp_path: Path) -> None:
    def after(batches: list[Tensor], folder: Path) -> list[str]:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = GuardConfig(run_dir=folder, probes=Probes(look_every=4), terminal="quiet")
        with Guard(model, optimizer, config=config) as guard:
            for batch in batches:
                guard.step(lambda x: model(x).mean(), batch)
        return [look.facts.batch_after for look in read_run(folder).looks]

    epoch = [torch.randn(2, 4) for _ in range(4)]
    kept = epoch[0]
    assert after([*epoch, *epoch, *epoch], tmp_path / "epochs") == ["unknown", "other", "other"]
    assert after([kept] * 8, tmp_path / "kept") == ["unknown", "same"]
    again = [kept.clone() for _ in range(8)]
    assert after(again, tmp_path / "equal") == ["unknown", "equal"]


def train_scaled(folder: Path, every: int | None) -> list[Tensor]:
    """Half precision, dropout, batch norm and a GradScaler that skips its first steps; bare where
    nothing is looked at.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=4)
    guard = None
    if every is not None:
        config = GuardConfig(run_dir=folder, probes=Probes(look_every=every), terminal="quiet")
        guard = stepguard.watch(model, optimizer, scaler=scaler, config=config)
    for _ in range(24):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            output = model(torch.randn(16, 4))
        scaler.scale(output.float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    if guard is not None:
        guard.close()
    momentum = [value for one in optimizer.state.values() for value in one.values()]
    scale = torch.tensor([scaler.get_scale()])
    return [*model.state_dict().values(), *momentum, scale, torch.get_rng_state()]


def test_looked_at_run_with_a_scaler_is_bit_identical_to_the_bare_one(tmp_path: Path) -> None:
    bare = train_scaled(tmp_path, None)
    looked = train_scaled(tmp_path, 2)
    assert len(bare) == len(looked)
    assert all(map(torch.equal, bare, looked))
    record = read_run(tmp_path)
    assert len(record.looks) > 3
    assert [note for note in record.notes if note.get("kind") == "silent"] == []


def test_loop_between_two_micro_batches_is_not_looked_at(tmp_path: Path) -> None:
    """The mode of a look is off while the user's own accumulation loop fetches the next batch."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = GuardConfig(run_dir=tmp_path, probes=Probes(look_every=1), terminal="quiet")
    active = []
    with stepguard.watch(model, optimizer, config=config):
        for _ in range(FIRST + 2):
            optimizer.zero_grad()
            for _ in range(2):
                active.append(len(dispatch_mode_stack()))
                model(torch.randn(3, 4)).mean().backward()
            optimizer.step()
    looks = read_run(tmp_path).looks
    assert not any(active) and looks
    assert {row.stage for row in looks[-1].tensors} == {"stored", "forward", "backward"}


@pytest.mark.parametrize("shape", [(8, 1, 1, 12), (1, 1, 12, 12), (12, 12), (8, 4, 12, 12)])
def test_fused_attention_with_any_mask_is_looked_at(tmp_path: Path, shape: tuple[int, ...]) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(batch: Tensor) -> Tensor:
        heads = model(batch).view(8, 12, 4, 2).transpose(1, 2)
        mask = torch.ones(shape, dtype=torch.bool)
        mask[..., 9:] = False
        attended = nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
        return attended.square().mean()

    config = GuardConfig(run_dir=tmp_path, probes=Probes(look_every=1), terminal="quiet")
    with Guard(model, optimizer, config=config) as guard:
        for _ in range(FIRST + 1):
            guard.step(loss, torch.randn(8, 12, 8))
    record = read_run(tmp_path)
    assert record.looks[-1].attention
    assert not [note for note in record.notes if note.get("kind") == "look"]


def test_look_inside_a_transform_of_functorch_is_taken(tmp_path: Path) -> None:
    from torch.func import functional_call, grad, vmap

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = GuardConfig(run_dir=tmp_path, probes=Probes(look_every=1), terminal="quiet")

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        found: Tensor = functional_call(model, parameters, (x[None],))
        return found.square().sum()

    with stepguard.watch(model, optimizer, config=config) as guard:
        for _ in range(FIRST + 2):
            named = dict(model.named_parameters())
            each = vmap(grad(loss), (None, 0))(named, torch.randn(5, 4))
            for name, parameter in named.items():
                parameter.grad = each[name].mean(0)
            optimizer.step()
        assert guard.armed
    assert read_run(tmp_path).looks


def test_look_that_fails_is_told_once_and_costs_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> None:
        raise IndexError("index 1 is out of bounds")

    monkeypatch.setattr("stepguard.probes.deep_look.StepNotes.after", broken)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guard(
        model, optimizer, config=GuardConfig(run_dir=tmp_path, probes=Probes(look_every=1))
    ) as guard:
        for _ in range(FIRST + 3):
            guard.step(lambda x: model(x).mean(), torch.ones(2, 4))
    said = capsys.readouterr().err
    assert said.count("the health probe at step") == 1 and "IndexError" in said
    assert len(read_run(tmp_path).looks) == 3


def test_reason_for_no_looks_is_kept(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    config = GuardConfig(run_dir=tmp_path, probes=Probes(look_every=1), terminal="quiet")
    with Guard(model, optimizer, config=config) as guard:
        for _ in range(FIRST + 2):
            guard.step(lambda x: model(x).square().mean(), torch.ones(2, 4))
    shown = CliRunner().invoke(app, ["look", str(tmp_path)])
    assert shown.exit_code == 2 and "the optimizer calls a closure" in shown.output
