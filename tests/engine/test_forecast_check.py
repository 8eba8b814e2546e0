"""A clear trend is told once with its step of crossing; the run stays the bare one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepguard import Guard, GuardConfig, Probes
from stepguard.journal import read_run
from stepguard.probes.looks import HealthCheck, HostFacts, LookSchedule
from stepguard.records import Reading
from stepguard.records.probes import AttentionLook, Look
from stepguard.report.story import read_story


class Told:
    """Stands for the context of a guard: keeps what is told."""

    def __init__(self) -> None:
        self.outputs = self
        self.scheduler = None
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


def test_scale_that_is_looked_for_is_not_told(check: HealthCheck, told: Told) -> None:
    for step in range(12):
        scale = 2.0 ** (16 - step)
        check.read(Reading(step=step, loss=1.0, scale=scale, grads_finite=False, overflow=True))
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


def test_saved_time_is_spent_in_a_hurry() -> None:
    now = 0.0
    schedule = LookSchedule("auto", clock=lambda: now)
    for step in range(10_000):
        if schedule.due(step):
            schedule.took(step, 1.0)
        now += 1.0
    assert not schedule.due(10_000)
    schedule.hurry = True
    assert schedule.due(10_000)


@pytest.mark.parametrize("loss", [None, 0.0, math.inf])
def test_odd_losses_are_no_trend(check: HealthCheck, told: Told, loss: float | None) -> None:
    for step in range(20):
        check.read(Reading(step=step, loss=loss, grad_norm=0.0))
    assert told.notes == []
