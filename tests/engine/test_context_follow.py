"""Values the user follows: beside the loss in journal, log and incident, for no extra wait, and
never an incident.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stepguard
from scenes import NAN, Scene, batches, plain_net, plain_step, poisoned, quiet
from stepguard import ConfigError, Guard
from stepguard.journal import read_run
from stepguard.report import screen
from stepguard.report.health import judge_stages, parse_stage
from stepguard.report.run_report import render_terminal
from stepguard.report.story import read_story
from stepguard.report.summary import summarize
from stepguard.report.terminal import paint_incident
from stepguard.sentinel.gradients import Packet

DATA = batches(12)


def scene(*, fused: bool = False) -> Scene:
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
    made, config = scene(fused=fused), quiet(run_dir=tmp_path / "run", human_log=tmp_path / "log")
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


def test_following_costs_no_further_wait() -> None:
    def waits(value: Callable[[int], Any] | None) -> int:
        made = scene()
        with Guard(made.model, made.optimizer, config=quiet()) as guard:
            before = Packet.fetched
            for batch in DATA:
                guard.step(following(made, lambda: guard, value) if value else made.loss_fn, batch)
            return Packet.fetched - before

    assert waits(lambda step: torch.ones(3)) == waits(None)


@pytest.mark.parametrize("fused", [False, True])
def test_a_followed_nan_is_written_down_and_no_incident(fused: bool, tmp_path: Path) -> None:
    made, alone = scene(fused=fused), scene(fused=fused)
    with Guard(made.model, made.optimizer, config=quiet(run_dir=tmp_path)) as guard:
        for batch in DATA[:4]:
            guard.step(following(made, lambda: guard, lambda step: NAN), batch)
        assert guard.incidents == ()
    for batch in DATA[:4]:
        plain_step(alone, (batch,))

    assert all(math.isnan(line["followed"]["gate"]) for line in read_run(tmp_path).steps)
    for mine, other in zip(made.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_a_value_is_not_taken_for_that_of_a_later_step(tmp_path: Path) -> None:
    made = scene()
    with Guard(made.model, made.optimizer, config=quiet(run_dir=tmp_path)) as guard:
        guard.step(following(made, lambda: guard, lambda step: 7.0), DATA[0])
        guard.step(made.loss_fn, DATA[1])
    first, second = read_run(tmp_path).steps
    assert first["followed"] == {"gate": 7.0}
    assert "followed" not in second


def test_incident_report_and_stages_know_what_was_followed(tmp_path: Path) -> None:
    made = scene()
    with Guard(made.model, made.optimizer, config=quiet(run_dir=tmp_path)) as guard:
        for index in range(8):
            batch = poisoned(DATA[index]) if index == 6 else DATA[index]
            guard.step(following(made, lambda: guard, lambda step: 0.01 * 2**step), batch)
        (incident,) = guard.incidents
    story = read_story(tmp_path).latest

    assert incident.reading.followed == {"gate": pytest.approx(0.64)}
    assert "gate" in render_terminal(summarize(story)).partition("before the first incident")[2]
    stages = [parse_stage("0-3: gate<0.1"), parse_stage("0-7: gate<0.1")]
    assert [outcome.state for outcome in judge_stages(story, stages)] == ["passed", "failed"]


def test_what_is_no_number_is_refused_with_its_name() -> None:
    made = scene()
    with Guard(made.model, made.optimizer, config=quiet()) as guard:
        with pytest.raises(ConfigError, match=r"follow\('gate'\) got a str"):
            guard.follow("gate", "high")  # type: ignore[arg-type]
        assert guard.armed


def test_the_schedule_is_named_in_the_report(tmp_path: Path) -> None:
    made = scene()
    schedule = torch.optim.lr_scheduler.OneCycleLR(made.optimizer, 0.1, total_steps=10)
    with Guard(
        made.model, made.optimizer, scheduler=schedule, config=quiet(run_dir=tmp_path)
    ) as guard:
        guard.step(made.loss_fn, DATA[0])
    assert "OneCycleLR at 0" in render_terminal(summarize(read_story(tmp_path).latest))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("entry", ["step", "watch", "watch, schedule not given"])
def test_an_incident_has_rate_and_position_of_its_own_step(entry: str, fused: bool) -> None:
    """Not those of the next one, which the schedule may have set when the incident is told."""
    made = scene(fused=fused)
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
