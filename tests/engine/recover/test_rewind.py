"""Going back: to a state that was good, exactly where the fault is gone, past the bad data where it
is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import stepguard
from scenes import (
    LOOPS,
    NAN,
    Batch,
    Scene,
    bare,
    batches,
    difference,
    generators,
    grouped,
    noisy_net,
    plain_step,
    poisoned,
    quiet,
    state_of,
)
from stepguard import Guard, GuardConfig, Origin, TrainingHalted
from stepguard.cli.app import app
from stepguard.journal import read_run

DATA = batches(40)
EVERY, PROBATION = 4, 6
Harm = Callable[[Scene], None]


def config(**settings: Any) -> GuardConfig:
    return quiet(**{"snapshot_every": EVERY, "probation": PROBATION, **settings})


def scene(
    optimizer: str = "adamw",
    *,
    schedule: bool = False,
    ema: bool = False,
    clip: float | None = None,
) -> Scene:
    model = noisy_net()
    parameters = model.parameters()
    made: Any = {
        "adamw": lambda: torch.optim.AdamW(parameters, lr=0.01),
        "fused": lambda: torch.optim.AdamW(parameters, lr=0.01, fused=True),
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        "lbfgs": lambda: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2),
    }[optimizer]()
    scheduler = (
        torch.optim.lr_scheduler.OneCycleLR(made, 0.02, total_steps=60) if schedule else None
    )
    average = torch.optim.swa_utils.AveragedModel(model) if ema else None
    return Scene(model, made, scheduler, clip_norm=clip, ema=average)


def run(
    at: Scene,
    steps: list[Any],
    harm: dict[int, Harm] | None = None,
    settings: GuardConfig | None = None,
) -> tuple[Guard, list[Any]]:
    """`guard.step` over the steps, with something done to the state before some of them."""
    settings = settings or config()
    results = []
    extra = {"ema": at.ema} if at.ema is not None else None
    with Guard(
        at.model, at.optimizer, state=extra, config=_clipped(settings, at), **at.close_over()
    ) as guard:
        if at.ema is not None:
            guard.on_commit(lambda: at.ema.update_parameters(at.model))
        for index, micro in enumerate(steps):
            (harm or {}).get(index, lambda _: None)(at)
            results.append(guard.step(at.loss_fn, *micro))
        guard.incidents  # noqa: B018 (reads what is still pending)
    return guard, results


def _clipped(settings: GuardConfig, at: Scene) -> GuardConfig:
    return replace(settings, clip_norm=at.clip_norm)


@torch.no_grad()
def nan_weight(at: Scene) -> None:
    at.model[0].weight[0, 0] = NAN


@torch.no_grad()
def nan_statistics(at: Scene) -> None:
    at.model[1].running_var[0] = NAN


@torch.no_grad()
def nan_moment(at: Scene) -> None:
    state = at.optimizer.state[at.model[0].weight]
    state["exp_avg" if "exp_avg" in state else "momentum_buffer"][0, 0] = NAN


def ruined(batch: Batch) -> Batch:
    """The same batch with no good sample in it."""
    return batch[0] * NAN, batch[1]


def decisions(guard: Guard) -> list[tuple[str, int | None, str | None]]:
    found = [incident.decision for incident in guard.incidents]
    return [(d.action, d.rewound_to, d.data) for d in found if d is not None]


# --- exact
# --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("harm", [nan_weight, nan_statistics, nan_moment])
@pytest.mark.parametrize("optimizer", ["adamw", "fused", "sgd"])
def test_damaged_state_is_repaired_and_the_run_ends_bit_identical_to_one_that_was_never_damaged(
    optimizer: str, harm: Harm
) -> None:
    steps = grouped(DATA, 2)
    damaged, reference = (scene(optimizer, schedule=True, ema=True, clip=1.0) for _ in range(2))
    torch.manual_seed(5)
    bare(reference, steps)
    end = generators()
    torch.manual_seed(5)
    guard, results = run(damaged, steps, {15: harm})
    assert [d[0] for d in decisions(guard)] == ["rewind"] and decisions(guard)[0][2] == "repeat"
    assert difference(state_of(damaged), state_of(reference)) == ""
    assert difference(generators(), end) == ""
    assert all(result.committed for result in results) and guard.steps == len(steps)


@pytest.mark.parametrize("growth", [3, 1000])
def test_scale_of_the_loss_comes_back_with_the_state(growth: int) -> None:
    def scaled() -> Scene:
        at = scene("sgd", clip=1.0)
        at.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=growth)
        return at

    damaged, reference = scaled(), scaled()
    steps = grouped(DATA[:20], 1)
    torch.manual_seed(5)
    bare(reference, steps)
    torch.manual_seed(5)
    guard, _ = run(damaged, steps, {15: nan_weight})
    assert [d[2] for d in decisions(guard)] == ["repeat"]
    assert difference(state_of(damaged), state_of(reference)) == ""


@pytest.mark.slow
def test_damaged_state_is_repaired_for_an_optimizer_that_evaluates_several_times() -> None:
    damaged, reference = scene("lbfgs"), scene("lbfgs")
    steps = grouped(DATA[:16], 1)
    torch.manual_seed(5)
    bare(reference, steps)
    torch.manual_seed(5)
    guard, _ = run(damaged, steps, {13: nan_weight})
    assert decisions(guard) == [("rewind", 12, "repeat")]
    assert difference(state_of(damaged), state_of(reference)) == ""


def flaky(at: Scene, bad: set[int]) -> Callable[[Scene, Any], Tensor]:
    """A loss that is NaN at some calls and never again: what a failing memory cell looks like."""
    calls = iter(range(10_000))

    def loss(scene: Scene, batch: Any) -> Tensor:
        value = nn.functional.cross_entropy(scene.model(batch[0]), batch[1])
        return value * NAN if next(calls) in bad else value

    at.loss = loss
    return loss


@pytest.mark.parametrize("optimizer", ["adamw", "fused", "sgd"])
def test_step_that_failed_by_chance_is_run_again_and_nothing_shows(optimizer: str) -> None:
    failing, reference = (scene(optimizer, schedule=True, ema=True) for _ in range(2))
    steps = grouped(DATA[:20], 2)
    torch.manual_seed(5)
    bare(reference, steps)
    end = generators()
    flaky(failing, {7})
    torch.manual_seed(5)
    guard, results = run(failing, steps, settings=config(locate=True))
    assert [d[0] for d in decisions(guard)] == ["retry"]
    assert difference(state_of(failing), state_of(reference)) == ""
    assert difference(generators(), end) == ""
    assert results[3].committed and results[3].incident is guard.incidents[0]


def test_step_that_fails_again_is_skipped_and_not_run_a_third_time() -> None:
    at = scene()
    with Guard(at.model, at.optimizer, config=config(locate=True)) as guard:
        guard._driver.transaction._decider._find = lambda step, reading: Origin(
            step=step.index, phase="loss", reproduced=False
        )
        results = [
            guard.step(at.loss_fn, batch) for batch in [*DATA[:3], poisoned(DATA[3]), *DATA[4:6]]
        ]
        assert [d[0] for d in decisions(guard)] == ["retry", "skip"]
    assert [r.committed for r in results] == [
        True,
        True,
        True,
        False,
        True,
        True,
    ] and guard.steps == 6


# --- past the data
# --------------------------------------------------------------------------------------------------


def learnable(count: int, seed: int = 3) -> list[Batch]:
    """Data with something to learn, so that a loss has a level to fall from."""
    source = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 16, 6, generator=source)
    return [(x, x[:, :3].argmax(-1)) for x in inputs]


def raise_lr(at: Scene) -> None:
    for group in at.optimizer.param_groups:
        group["lr"] *= 2000


@pytest.mark.parametrize("loop", LOOPS)
def test_jump_of_the_learning_rate_is_undone_with_what_it_did_to_the_weights(loop: str) -> None:
    at, data = scene("sgd"), learnable(70)
    settings = config(snapshot_every=8, probation=10, anomalies="act")
    if loop == "step":
        guard, _ = run(at, grouped(data, 1), {40: raise_lr}, settings)
    else:
        with stepguard.watch(at.model, at.optimizer, config=settings) as guard:
            for index, batch in enumerate(data):
                if index == 40:
                    raise_lr(at)
                plain_step(at, (batch,))
    first = guard.incidents[0]
    assert first.decision is not None and first.decision.action == "rewind"
    assert first.decision.rewound_to in (24, 32)
    assert at.optimizer.param_groups[0]["lr"] == 0.05
    at.model.eval()
    with torch.no_grad():
        assert float(at.loss_fn(data[0])) < 0.9  # 1.1 is what guessing gives


@pytest.mark.parametrize("optimizer", ["adamw", "fused"])
def test_watched_loop_goes_on_from_the_good_state_with_the_next_batch(optimizer: str) -> None:
    at, reference = scene(optimizer), scene(optimizer)
    at.model[3].p = reference.model[3].p = 0.0
    with stepguard.watch(at.model, at.optimizer, config=config()) as guard:
        for index, batch in enumerate(DATA[:20]):
            if index == 14:
                nan_weight(at)
            plain_step(at, (batch,))
        found = guard.incidents
    (decision,) = [incident.decision for incident in found]
    assert decision is not None and (decision.action, decision.data) == ("rewind", "skip")
    back = decision.rewound_to
    assert back == 12  # the newest state without the damage
    bare(reference, grouped(DATA[:back], 1))
    bare(reference, grouped(DATA[15:20], 1))
    assert difference(state_of(at), state_of(reference)) == ""
    assert guard.steps == back + 5


def test_data_that_keeps_failing_never_costs_good_weights() -> None:
    at, reference = scene(), scene()
    at.model[3].p = reference.model[3].p = 0.0
    steps = grouped([*DATA[:16], *[ruined(DATA[0])] * 40], 1)
    with pytest.raises(TrainingHalted, match="were dropped"):
        run(at, steps)
    bare(reference, grouped(DATA[:16], 1))
    assert difference(state_of(at), state_of(reference)) == ""


def test_rewinds_of_one_trouble_go_further_back_each_time(tmp_path: Path) -> None:
    at = scene()
    with pytest.raises(TrainingHalted):
        run(
            at,
            grouped(DATA[:40], 1),
            dict.fromkeys(range(22, 40), nan_weight),
            config(run_dir=tmp_path),
        )
    record = read_run(tmp_path)
    places = [note["to"] for note in record.notes if note["type"] == "rewind"]
    assert len(places) >= 2 and places == sorted(places, reverse=True) and len(set(places)) >= 2
    assert len({incident.id for incident in record.incidents}) == len(record.incidents)
    shown = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert shown.exit_code == 0 and "rewound to step" in shown.output


def test_loss_that_depends_on_the_loop_is_not_run_again_as_if_it_did_not(tmp_path: Path) -> None:
    at = scene()
    present: list[Batch] = []

    def loss(_: int) -> Tensor:
        inputs, targets = present[-1]
        return nn.functional.cross_entropy(at.model(inputs), targets)

    with Guard(at.model, at.optimizer, config=config(run_dir=tmp_path)) as guard:
        for index, batch in enumerate(DATA[:20]):
            if index == 14:
                nan_weight(at)
            present.append(batch)
            guard.step(loss, index)
        assert [d[:1] for d in decisions(guard)] == [("rewind",)]
        back = decisions(guard)[0][1]
        assert back is not None and guard.steps == back + 5
    said = [note["summary"] for note in read_run(tmp_path).notes if note.get("kind") == "rewind"]
    assert any("depends on more than the batch" in line for line in said)


def test_batch_that_was_written_to_is_not_run_again() -> None:
    at, held = scene(), torch.empty(4, 6)

    def steps() -> Any:
        for inputs, targets in DATA[:20]:
            yield ((held.copy_(inputs), targets),)

    guard, _ = run(at, steps(), {14: nan_weight})
    assert [d[2] for d in decisions(guard)] == ["skip"]


def test_repetition_that_led_past_a_fault_serves_for_the_next_one() -> None:
    damaged, reference = scene(), scene()
    steps = grouped(DATA, 1)
    torch.manual_seed(5)
    bare(reference, steps)
    torch.manual_seed(5)
    faults: dict[int, Harm] = {18: nan_weight, 30: nan_weight}
    guard, _ = run(damaged, steps, faults, config(snapshot_every=16, probation=5))
    assert decisions(guard) == [("rewind", 16, "repeat")] * 2
    assert difference(state_of(damaged), state_of(reference)) == ""
