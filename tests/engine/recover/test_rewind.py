"""Going back: to a state that was good, exactly where the fault is gone, past the bad data where it
is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from typer.testing import CliRunner

import stepguard
from engine.parts import each, incident_of, origin_of, step_of
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
    plain_net,
    plain_step,
    poisoned,
    quiet,
    state_of,
)
from stepguard import Guard, GuardConfig, TrainingHalted
from stepguard.cli.app import app
from stepguard.engine.incident.closer_look import accept, stored_trouble
from stepguard.engine.recover.rewind import (
    compare_with_best,
    good_micro_batches,
    loss_function_changed,
    proven_guilty,
    share_of,
    without_samples,
)
from stepguard.engine.recover.snapshots import RANDOM_NUMBERS, KeptSteps
from stepguard.journal import read_run
from stepguard.records import Incident, Reading
from stepguard.state.snapshot import Snapshot

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


HARMS = [nan_weight, nan_statistics, nan_moment]


def decisions(guard: Guard) -> list[tuple[str, int | None, str | None]]:
    found = [incident.decision for incident in guard.incidents]
    return [(d.action, d.rewound_to, d.data) for d in found if d is not None]


@pytest.mark.parametrize(("optimizer", "harm"), each(["adamw", "fused", "sgd"], HARMS))
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
        guard._driver.transaction._decider._find = lambda step, reading: origin_of(
            step=step.index, phase="loss", reproduced=False
        )
        data = [*DATA[:3], poisoned(DATA[3]), *DATA[4:6]]
        results = [guard.step(at.loss_fn, batch) for batch in data]
        assert [d[0] for d in decisions(guard)] == ["retry", "skip"]
    assert [r.committed for r in results] == [True, True, True, False, True, True]
    assert guard.steps == 6


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


# --- when a snapshot is taken


@pytest.mark.parametrize("harm", [nan_weight, nan_moment])
def test_damage_in_the_first_steps_is_repaired_from_a_snapshot_on_probation(harm: Harm) -> None:
    damaged, reference = scene(), scene()
    torch.manual_seed(5)
    bare(reference, grouped(DATA[:12], 1))
    torch.manual_seed(5)
    guard, _ = run(damaged, grouped(DATA[:12], 1), {3: harm}, quiet())
    assert decisions(guard) == [("rewind", 1, "repeat")]
    assert difference(state_of(damaged), state_of(reference)) == ""
    assert [(s.step, s.standing) for s in guard._rewinder.snapshots.ring.snapshots] == [
        (1, "young"),
        (8, "young"),
    ]


@pytest.mark.parametrize("optimizer", ["adamw", "fused"])
def test_watched_loop_goes_on_from_the_good_state_with_the_next_batch(optimizer: str) -> None:
    at, reference = scene(optimizer), scene(optimizer)
    at.model[3].p = reference.model[3].p = 0.0
    with stepguard.watch(at.model, at.optimizer, config=config()) as guard:
        for index, batch in enumerate(DATA[:20]):
            if index == 14:
                nan_weight(at)
            plain_step(at, (batch,))
        assert decisions(guard) == [("rewind", 12, "skip")]  # the newest state without the damage
    bare(reference, grouped([*DATA[:12], *DATA[15:20]], 1))
    assert difference(state_of(at), state_of(reference)) == ""
    assert guard.steps == 12 + 5


def test_batch_that_was_written_to_is_not_run_again() -> None:
    held = torch.empty(4, 6)
    steps: Any = (((held.copy_(inputs), targets),) for inputs, targets in DATA[:20])
    guard, _ = run(scene(), steps, {14: nan_weight})
    assert [d[2] for d in decisions(guard)] == ["skip"]


def test_data_that_keeps_failing_never_costs_good_weights() -> None:
    at, reference = scene(), scene()
    at.model[3].p = reference.model[3].p = 0.0
    bad = (DATA[0][0] * NAN, DATA[0][1])  # no good sample in it
    with pytest.raises(TrainingHalted, match="were dropped"):
        run(at, grouped([*DATA[:16], *[bad] * 40], 1))
    bare(reference, grouped(DATA[:16], 1))
    assert difference(state_of(at), state_of(reference)) == ""


def test_damage_that_comes_back_is_not_repaired_from_the_same_snapshot_for_ever() -> None:
    with pytest.raises(TrainingHalted, match="every rewind has been tried at step 1"):
        run(scene(), grouped(DATA[:12], 1), dict.fromkeys(range(3, 12), nan_weight), quiet())


def test_state_that_does_not_fit_turns_snapshots_off_and_says_so_once(tmp_path: Path) -> None:
    settings = config(snapshot_memory=10, run_dir=tmp_path)
    guard, _ = run(scene(), grouped(DATA[:20], 1), settings=settings)
    assert guard.armed
    notes = [
        note["summary"] for note in read_run(tmp_path).notes if note.get("kind") == "snapshots"
    ]
    assert len(notes) == 1 and "copies of it do not fit" in notes[0]


def test_object_that_cannot_be_kept_turns_snapshots_off_and_not_the_guard(tmp_path: Path) -> None:
    class Broken:
        def state_dict(self) -> Any:
            raise RuntimeError("not now")

        def load_state_dict(self, state: Any) -> None: ...

    at = scene()
    with Guard(
        at.model, at.optimizer, state={"odd": Broken()}, config=config(run_dir=tmp_path)
    ) as guard:
        for batch in DATA[:10]:
            assert guard.step(at.loss_fn, batch).committed
        assert guard.armed
    assert any(
        "no snapshots: not now" in str(note.get("summary")) for note in read_run(tmp_path).notes
    )


def test_object_without_a_state_is_refused_with_its_name() -> None:
    at = scene()
    with pytest.raises(stepguard.ConfigError, match=r"state\['ema'\] is a int"):
        Guard(at.model, at.optimizer, state={"ema": 3})


# --- when a snapshot is good


@pytest.fixture
def guard() -> Iterator[Guard]:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guard(model, optimizer, config=quiet(probation=10, snapshot_every=1000)) as made:
        yield made


def _taken(guard: Guard) -> Snapshot:
    snapshot = guard._rewinder.snapshots.take()
    assert snapshot is not None
    return snapshot


def test_high_loss_is_a_divergence_only_where_the_weights_confirm_it(guard: Guard) -> None:
    history = guard._context.history
    probation = guard._rewinder.probation
    guard.step(lambda batch: guard._context.model(batch[0]).square().mean(), DATA[0])
    history.first[:] = [2.0]
    history.best = 2.0
    history.losses.extend([1e6] * 9)
    history.diverged_at = 1
    assert not probation.divergence()
    with torch.no_grad():
        for parameter in guard._context.model.parameters():
            parameter.mul_(50.0)
    assert "grown to" in probation.divergence()
    history.diverged_at = None
    history.losses.extend([1.0] * 9)
    history.best = 1.0
    assert not probation.divergence()


def test_exploded_weights_are_a_divergence_where_the_loss_shows_nothing(guard: Guard) -> None:
    model = guard._context.model
    guard.step(lambda batch: 0.0 * model(batch[0]).sum() + 1.0, DATA[0])
    assert not guard._rewinder.probation.divergence()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e17)
    assert "grown to" in guard._rewinder.probation.divergence()
    snapshot = _taken(guard)
    guard._rewinder.probation.commit(11)
    assert snapshot.standing == "bad"


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class _Capped(nn.Module):
    """A sentinel buffer whose name is the end of a parameter's name."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((3,), math.inf))
        self.sub = _Scaled()
        self.out = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.sub(torch.minimum(x, self.get_buffer("scale"))))
        return found


def test_sentinel_buffer_does_not_excuse_a_parameter_whose_name_ends_alike() -> None:
    model = _Capped()
    average = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    settings = quiet(snapshot_every=1, probation=2)
    with Guard(model, optimizer, state={"average": average}, config=settings) as guard:
        for step in range(12):
            if step == 8:
                with torch.no_grad():
                    model.sub.scale[1] = math.nan
            result = guard.step(lambda b: model(b).square().mean(), torch.randn(4, 3))
            assert bool(model.sub.scale.isfinite().all())
            if result.incident is not None:
                assert result.incident.decision is not None
                assert (step, result.incident.decision.rewound_to) == (8, 6)
        bad = {"model/scale", "model/sub.scale", "extra:average/module.scale"}
        meant = guard._rewinder.probation.meant_nonfinite(bad)
    assert meant == {"model/scale", "extra:average/module.scale"}
    assert len(guard.incidents) == 1


def test_accepted_slot_of_one_parameter_does_not_excuse_that_of_another(guard: Guard) -> None:
    context = guard._context
    first, second = context.parameters[:2]
    context.optimizer.state[first] = {"exp_avg": torch.full_like(first, math.nan)}
    context.optimizer.state[second] = {"exp_avg": torch.zeros_like(second)}
    assert stored_trouble(context) == ["opt:exp_avg"]
    accept(context, ["opt:exp_avg"])
    assert stored_trouble(context) == []
    saved = {"optimizer/0.weight/exp_avg", "optimizer/0.bias/exp_avg"}
    assert guard._rewinder.probation.meant_nonfinite(saved) == {"optimizer/0.weight/exp_avg"}
    context.optimizer.state[second]["exp_avg"].fill_(math.inf)
    assert stored_trouble(context) == ["opt:exp_avg"]


# --- where a rewind goes


# --- what is proven guilty of a step


def test_scale_of_the_loss_comes_back_with_the_state() -> None:
    damaged, reference = scene("sgd", clip=1.0), scene("sgd", clip=1.0)
    for at in (damaged, reference):
        at.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)
    steps = grouped(DATA[:20], 1)
    torch.manual_seed(5)
    bare(reference, steps)
    torch.manual_seed(5)
    guard, _ = run(damaged, steps, {15: nan_weight})
    assert [d[2] for d in decisions(guard)] == ["repeat"]
    assert difference(state_of(damaged), state_of(reference)) == ""


def test_earlier_steps_on_earlier_weights_tell_hurt_weights_from_a_changed_loss() -> None:
    model, added = plain_net(), [0.0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss(batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1]) + added[0]

    with Guard(model, optimizer, config=quiet(snapshot_every=4, probation=2)) as guard:
        for batch in DATA[:12]:
            guard.step(loss, batch)
        snapshots = guard._rewinder.snapshots
        weights = [p.detach().clone() for p in model.parameters()]
        assert not loss_function_changed(snapshots)
        added[0] = 5.0
        assert loss_function_changed(snapshots)
        assert all(map(torch.equal, weights, model.parameters()))
        added[0] = 0.0
        step = snapshots.kept.at(11)
        assert step is not None
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-50.0)
        found = compare_with_best(guard._context, snapshots, step.step)
        assert found is not None and found.step in (4, 8)
        assert found.again == found.then
        assert found.now > 2 * found.then
        assert found.this_then < 2 * found.then
        snapshots.ring.clear()
        assert compare_with_best(guard._context, snapshots, step.step) is None
        assert not loss_function_changed(snapshots)


def test_steps_are_kept_within_a_budget_while_their_batches_are_untouched() -> None:
    size = RANDOM_NUMBERS + DATA[0][0].nbytes + DATA[0][1].nbytes
    kept = KeptSteps(3 * size)

    def indices(since: int) -> list[int] | None:
        found = kept.since(since)
        return None if found is None else [each.step.index for each in found]

    for index in range(6):
        kept.keep(step_of(DATA[index], index=index), float(index))
    assert indices(3) == [3, 4, 5] and indices(2) is None  # the oldest are dropped
    kept.forget_before(4)
    batch = (DATA[6][0].clone(), DATA[6][1])
    kept.keep(step_of(batch, index=6), 2.0)
    assert indices(4) == [4, 5, 6]
    step = kept.at(6)
    assert step is not None
    assert step.same(2.0 * (1 + 1e-6)) and not step.same(2.1) and not step.same(None)
    batch[0].add_(1.0)  # a batch that was written to cannot be repeated
    assert kept.at(6) is None and indices(4) is None
    assert [each.step.index for each in kept.take_since(5)] == [5, 6]
    assert indices(4) == [4]
    kept.keep(step_of(DATA[5], index=5, loss_fn=None), 1.0)  # nor a step without its loss function
    assert indices(4) is None and indices(6) == []


def test_only_what_is_proven_guilty_of_a_step_is_dropped() -> None:
    def by_samples(*samples: int, micro_batch: int | None = None, **reading: Any) -> Incident:
        origin = origin_of(samples=samples, micro_batch=micro_batch)
        return incident_of(origin=origin, reading=Reading(step=0, **reading))

    def by_losses(*numbers: int, of: int) -> Incident:
        losses = tuple(NAN if number in numbers else 1.0 for number in range(of))
        return incident_of(reading=Reading(step=0, loss=NAN, micro_losses=losses))

    one, two, four = step_of(DATA[0]), step_of(*DATA[:2]), step_of(*DATA[:4])
    assert proven_guilty(one, by_samples(2)) == "sample 2"
    of_the_second = by_samples(0, 3, micro_batch=1)
    assert proven_guilty(two, of_the_second) == "samples 0, 3 of micro-batch 2 of 2"
    assert proven_guilty(two, by_losses(0, of=2)) == "micro-batch 1 of 2"
    assert proven_guilty(four, by_losses(0, 2, of=4)) == "micro-batches 1, 3 of 4"
    # nothing smaller than the step is guilty where all of it is, or the state
    for whole in (
        by_samples(0, 1, 2, 3),
        by_losses(0, of=1),
        by_samples(1, bad_state=("param:w",)),
    ):
        assert proven_guilty(one, whole) == ""
    assert share_of(two, by_samples(2)) == 1 / 8
    assert share_of(two, by_losses(1, of=2)) == 1 / 2
    assert without_samples(step_of(poisoned(DATA[0])), by_samples(1)) is None  # still not finite
    assert without_samples(one, incident_of()) is None

    def refuses(batch: object) -> Tensor:
        raise ValueError("two samples at least")

    assert good_micro_batches(step_of(DATA[0], loss_fn=refuses)) == []
    assert good_micro_batches(step_of(DATA[0], poisoned(DATA[1]), DATA[2])) == [0, 2]
