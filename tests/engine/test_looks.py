"""When looks are taken, that a run with looks is the unguarded one, and what is forecast."""

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
    SHARE,
    HealthCheck,
    HostFacts,
    LookSchedule,
)
from stepguard.records import Reading
from stepguard.records.probes import AttentionLook, Look
from stepguard.report.story import read_story
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


def test_automatic_looks_take_a_hundredth_early_and_a_thousandth_later() -> None:
    looked = looked_at(200_000, look=0.1, step=0.05)
    assert looked[0] == FIRST
    seconds = 0.05 * 200_000
    early = [step for step in looked if 0.05 * step <= EARLY_SECONDS]
    assert 0.1 * (len(early) - 1) <= EARLY_SHARE * EARLY_SECONDS
    assert 0.1 * (len(looked) - 1) <= EARLY_SHARE * EARLY_SECONDS + SHARE * seconds
    gaps = [after - before for before, after in itertools.pairwise(looked[len(early) :])]
    assert min(gaps) >= 1000


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


def test_object_of_the_user_is_not_asked_for_its_state() -> None:
    class Counts:
        asked = 0

        def state_dict(self) -> dict[str, Any]:
            self.asked += 1
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def asked(every: int | None) -> int:
        counts, model = Counts(), nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = GuardConfig(
            probes=Probes(look_every=every), snapshots=Snapshots(count=0), terminal="quiet"
        )
        with Guard(model, optimizer, state={"counts": counts}, config=config) as guard:
            for _ in range(FIRST + 4):
                guard.step(lambda x: model(x).mean(), torch.ones(2, 4))
        return counts.asked

    assert asked(1) == asked(None)


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


# --- forecasts


class Told:
    """Stands for the context of a guard: keeps what is told."""

    def __init__(self) -> None:
        self.outputs = self
        self.scheduler = None
        self.roots = {"": nn.Linear(1, 1)}
        self.notes: list[dict[str, Any]] = []

    def note(self, kind: str, text: str, **facts: Any) -> None:
        self.notes.append({"kind": kind, "text": text, **facts})


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def schedule() -> LookSchedule:
    return LookSchedule("auto")


@pytest.fixture
def check(told: Told, schedule: LookSchedule) -> HealthCheck:
    return HealthCheck(told, HostFacts(told), schedule)  # type: ignore[arg-type]


def attention(step: int, logit: float) -> Look:
    row = AttentionLook(module="block.0", largest_logit=logit, entropy=0.5, collapsed=0.0)
    return Look(step=step, attention=(row,))


def diverge(folder: Path | None, *, guarded: bool) -> list[Tensor]:
    """Gradient descent slightly above its stable rate: the loss doubles about every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=3.0)
    data = [torch.randn(32, 8) for _ in range(20)]

    def loss(x: Tensor) -> Tensor:
        return model(x).square().sum(-1).mean()

    if guarded:
        config = GuardConfig(run_dir=folder, probes=Probes(look_every=3), terminal="quiet")
        with Guard(model, optimizer, config=config) as guard:
            for batch in data:
                guard.step(loss, batch)
    else:
        for batch in data:
            optimizer.zero_grad()
            loss(batch).backward()
            optimizer.step()
    return [*model.state_dict().values(), torch.get_rng_state()]


def test_run_that_is_foretold_is_bit_identical_to_the_bare_one(tmp_path: Path) -> None:
    bare = diverge(None, guarded=False)
    assert all(map(torch.equal, bare, diverge(tmp_path, guarded=True)))
    notes = [note for note in read_run(tmp_path).notes if note.get("kind") == "forecast"]
    assert [note["code"] for note in notes] == ["SG955", "SG953"]
    forecast = notes[0]["forecast"]
    assert forecast["earliest"] <= forecast["step"] <= forecast["latest"]
    assert "What to do now" in str(notes[0]["summary"])
    story = read_story(tmp_path)
    shown = [note for note in story.runs[-1].notes if note.kind == "forecast"]
    assert [note.fields["code"] for note in shown] == ["SG955", "SG953"]


def test_trend_of_looks_is_told_once(check: HealthCheck, told: Told) -> None:
    for number in range(8):
        check.looked(attention(10 * number, 8.0 * 1.6**number))
    assert len(told.notes) == 1
    assert told.notes[0]["code"] == "SG952"
    assert "block.0" in told.notes[0]["text"]


def test_level_that_stays_is_not_told(check: HealthCheck, told: Told) -> None:
    for number in range(40):
        check.looked(attention(10 * number, 300.0 + number % 3))
        check.read(Reading(step=10 * number, loss=1.0 + number % 5, grad_norm=1.0, scale=1024.0))
    assert told.notes == []


def test_scale_that_falls_from_where_it_worked_is_told(check: HealthCheck, told: Told) -> None:
    for step in range(100):
        bad = step % 5 == 4
        scale = 2.0 ** (12 - step // 5)
        check.read(Reading(step=step, loss=1.0, scale=scale, grads_finite=not bad, overflow=bad))
        if told.notes:
            break
    assert [note["code"] for note in told.notes] == ["SG951"]
    assert abs(told.notes[0]["forecast"]["step"] - 60) <= 10


def test_what_a_rewind_took_back_is_forgotten(check: HealthCheck, told: Told) -> None:
    for number in range(4):
        check.looked(attention(10 * number, 8.0 * 1.6**number))
        check.read(Reading(step=10 * number, loss=1.0))
    check.read(Reading(step=0, loss=1.0))
    for number in range(4):
        check.looked(attention(1 + number, 60.0 * 1.6**number))
    assert told.notes == []


def test_trend_that_begins_asks_for_looks(check: HealthCheck, schedule: LookSchedule) -> None:
    for number in range(3):
        check.looked(attention(10 * number, 20.0 * 1.5**number))
    assert schedule.hurry
    check.looked(attention(40, 20.0))
    assert not schedule.hurry


@pytest.mark.parametrize("make", [Guard, stepguard.watch], ids=["step", "watch"])
def test_exception_in_the_forward_ends_the_look(make: Any) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(guard: Guard, x: Tensor) -> None:
        if make is Guard:
            guard.step(lambda x: model(x).mean(), x)
            return
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()

    with make(model, optimizer, config=GuardConfig(terminal="quiet")) as guard:
        for _ in range(FIRST):
            step(guard, torch.ones(2, 4))
        with pytest.raises(RuntimeError):
            step(guard, torch.ones(2, 5))
        assert not dispatch_mode_stack()


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
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = GuardConfig(run_dir=tmp_path, probes=Probes(look_every=1), terminal="quiet")

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(model, parameters, (x[None],))
        return found.square().sum()

    with stepguard.watch(model, optimizer, config=config) as guard:
        for _ in range(FIRST + 2):
            named = dict(model.named_parameters())
            each = torch.func.vmap(torch.func.grad(loss), (None, 0))(named, torch.randn(5, 4))
            for name, parameter in named.items():
                parameter.grad = each[name].mean(0)
            optimizer.step()
        assert guard.armed
    assert read_run(tmp_path).looks
