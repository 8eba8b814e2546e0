"""Every harm that was once seen on a healthy run or an ordinary bad moment, so that it is never
seen again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stepguard
from scenes import (
    LOOPS,
    NAN,
    Batch,
    Scene,
    bare,
    batches,
    difference,
    plain_net,
    plain_step,
    quiet,
    state_of,
)
from stepguard import Guard, GuardConfig, Policy, Probes, TrainingHalted
from stepguard.journal import read_run

pytestmark = pytest.mark.slow

DATA = batches(60)
LossFn = Callable[[Batch], Tensor]


def loss_of(model: nn.Module) -> LossFn:
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1])


class Clusters:
    """Ten clusters, one class each: a small network learns them to a loss near 0."""

    def __init__(self, seed: int) -> None:
        self._source = torch.Generator().manual_seed(seed)
        self._centres = torch.randn(10, 8, generator=self._source) * 2

    def batch(self) -> Batch:
        labels = torch.randint(10, (64,), generator=self._source)
        return self._centres[labels] + 0.6 * torch.randn(64, 8, generator=self._source), labels


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 10))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> None:
    for batch in data:
        optimizer.zero_grad()
        loss_of(model)(batch).backward()
        optimizer.step()


# --- a run that starts from a converged model
# -------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [1e-2, 3e-3])
@pytest.mark.parametrize("seed", range(4))
def test_run_from_a_converged_model_is_left_alone(seed: int, rate: float) -> None:
    data = Clusters(seed)
    model = network(seed)
    train(model, torch.optim.AdamW(model.parameters(), rate), [data.batch() for _ in range(400)])
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ahead = [data.batch() for _ in range(300)]
    train(model, torch.optim.AdamW(model.parameters(), rate), ahead)
    bare_end = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(start)
    with Guard(model, torch.optim.AdamW(model.parameters(), rate), config=quiet()) as guard:
        for batch in ahead:
            guard.step(loss_of(model), batch)
        assert guard.incidents == () and guard.steps == 300
    assert difference(dict(model.state_dict()), bare_end) == ""


# --- losses that are no measure of error
# ------------------------------------------------------------------------------


def test_generator_and_discriminator_in_one_module_keep_their_own_weights() -> None:
    torch.manual_seed(0)
    pair = nn.ModuleDict(
        {"g": nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)), "d": nn.Linear(2, 1)}
    )
    one = torch.optim.Adam(pair["g"].parameters(), 5e-3)
    two = torch.optim.Adam(pair["d"].parameters(), 5e-3)
    source = torch.Generator().manual_seed(1)
    with Guard(pair, one, config=quiet()) as g, Guard(pair, two, config=quiet()) as d:
        for _ in range(300):
            noise, real = (
                torch.randn(32, 4, generator=source),
                torch.randn(32, 2, generator=source) + 2,
            )
            d.step(
                lambda b: (
                    F.softplus(-pair["d"](b[1])).mean()
                    + F.softplus(pair["d"](pair["g"](b[0]))).mean()
                ),
                (noise, real),
            )
            g.step(lambda b: F.softplus(-pair["d"](pair["g"](b))).mean(), noise)
        assert g.incidents == d.incidents == ()
        assert g.steps == d.steps == 300


def test_new_targets_are_learned_and_not_rewound() -> None:
    model = plain_net()
    with Guard(model, torch.optim.SGD(model.parameters(), 0.1), config=quiet()) as guard:
        for index in range(400):
            inputs, targets = DATA[index % 60]
            guard.step(loss_of(model), (inputs, (targets + index // 100) % 3))
        assert guard.incidents == () and guard.steps == 400


# --- divergence
# --------------------------------------------------------------------------------------------------


def _diverges(folder: Path, loop: str, rate: float, steps: int = 200) -> tuple[Guard, list[float]]:
    """A classifier that learns, and whose rate is then raised until all is lost."""
    data, model = Clusters(3), network(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    config = quiet(run_dir=folder, on_signal="off", checkpoint_every=20)
    scene = Scene(model, optimizer, loss=lambda s, b: loss_of(s.model)(b))
    losses = []
    with (Guard if loop == "step" else stepguard.watch)(model, optimizer, config=config) as guard:
        for index in range(steps):
            if index == 100:
                optimizer.param_groups[0]["lr"] = rate
            batch = data.batch()
            if loop == "step":
                losses.append(guard.step(scene.loss_fn, batch).loss or NAN)
            else:
                losses.append(float(scene.loss_fn(batch).detach()))
                plain_step(scene, (batch,))
        guard.incidents  # noqa: B018 (reads what is still pending)
        guard.save()
    return guard, losses


def _sealed(folder: Path) -> dict[int, dict[str, Any]]:
    found = {}
    for seal in folder.glob("checkpoints/step-*/seal.json"):
        content = json.loads(seal.read_text())["seal"]
        found[content["step"]] = content["health"]
    return found


@pytest.mark.parametrize("rate", [3.0, 30.0], ids=["stays finite", "becomes NaN"])
@pytest.mark.parametrize("loop", ["step", "watch"])
def test_ruin_is_never_called_good_and_never_costs_the_best_state(
    loop: str, rate: float, tmp_path: Path
) -> None:
    _diverges(tmp_path, loop, rate)
    sealed = _sealed(tmp_path)
    good = {step: health for step, health in sealed.items() if health["good"]}
    assert good and all(health["level"] < 0.1 for health in good.values())
    last_good = (tmp_path / "checkpoints" / "last-good").read_text().split()[0]
    assert last_good == f"step-{max(good)}"


@pytest.mark.parametrize("loop", ["step", "watch"])
def test_schedule_that_runs_away_to_chance_is_not_sealed_as_good(loop: str, tmp_path: Path) -> None:
    """A warm-up without an end: everything stays finite, and the loss ends where guessing is."""
    data, model = Clusters(5), nn.Sequential(network(5), nn.Tanh(), nn.Linear(10, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scene = Scene(model, optimizer, loss=lambda s, b: loss_of(s.model)(b))
    config = quiet(run_dir=tmp_path, on_signal="off", checkpoint_every=20)
    with (Guard if loop == "step" else stepguard.watch)(model, optimizer, config=config) as guard:
        for index in range(300):
            if index >= 100:
                optimizer.param_groups[0]["lr"] = min(5.0, 1e-2 * 1.2 ** (index - 100))
            batch = data.batch()
            if loop == "step":
                guard.step(scene.loss_fn, batch)
            else:
                plain_step(scene, (batch,))
        assert guard.incidents == () or {
            i.decision.action for i in guard.incidents if i.decision
        } == {"note"}
        last = guard._context.history.level
    sealed = _sealed(tmp_path)
    good = {step: health["level"] for step, health in sealed.items() if health["good"]}
    assert last > 1.0 and good and max(good.values()) < 0.5
    assert any(not health["good"] for health in sealed.values())


def test_divergence_under_watch_is_told_as_an_incident(tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = torch.Generator().manual_seed(3)
    centres = torch.randn(4, 8, generator=source) * 1.5
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), 2.0, momentum=0.9)
    with stepguard.watch(
        model, optimizer, config=quiet(run_dir=tmp_path, on_signal="off")
    ) as guard:
        for _ in range(200):
            labels = torch.randint(4, (32,), generator=source)
            batch = (centres[labels] + torch.randn(32, 8, generator=source), labels)
            plain_step(Scene(model, optimizer, loss=lambda s, b: loss_of(s.model)(b)), (batch,))
        told = guard.incidents
        assert guard.save() is None
    assert told and {i.decision.action for i in told if i.decision is not None} == {"note"}
    assert told[0].findings[0].code == "SG505"


# --- one folder, two runs
# ---------------------------------------------------------------------------------------------


def _experiment(folder: Path, seed: int, shift: int, steps: int, bad: int | None = None) -> Guard:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    config = quiet(run_dir=folder, on_signal="off")
    with Guard(model, torch.optim.SGD(model.parameters(), 0.1), config=config) as guard:
        for index in range(steps):
            if index == bad:
                model[0].weight.data[0, 0] = NAN
            inputs, targets = DATA[index % 60]
            guard.step(loss_of(model), (inputs, (targets + shift) % 3))
        if bad is None:
            assert guard.save() is not None
    return guard


def test_fresh_run_in_a_used_folder_never_takes_the_other_runs_weights(tmp_path: Path) -> None:
    _experiment(tmp_path, 1, 1, 100)
    guard = _experiment(tmp_path, 2, 0, 110, bad=103)
    decision = guard.incidents[0].decision
    assert decision is not None and decision.action == "rewind"
    assert decision.rewound_to != 100 and decision.data == "repeat"


def test_second_run_in_a_folder_overwrites_nothing(tmp_path: Path) -> None:
    bad = (DATA[0][0] * NAN, DATA[0][1])
    kept = []
    for _ in range(2):
        model = plain_net()
        with Guard(
            model, torch.optim.SGD(model.parameters(), 0.1), config=quiet(run_dir=tmp_path)
        ) as guard:
            for batch in [*DATA[:5], bad, *DATA[5:8]]:
                guard.step(loss_of(model), batch)
            (incident,) = guard.incidents
        kept.append((incident.id, incident.capsule))
    assert len({name for name, _ in kept}) == len({capsule for _, capsule in kept}) == 2
    assert all((tmp_path / str(capsule)).is_dir() for _, capsule in kept)
    runs = [
        line
        for line in (tmp_path / "journal.jsonl").read_text().splitlines()
        if '"type":"run"' in line
    ]
    assert [json.loads(line)["attempt"] for line in runs] == [1, 2]
    assert len({json.loads(line)["run"] for line in runs}) == 2


def test_second_run_leaves_the_checkpoints_of_the_first_alone(tmp_path: Path) -> None:
    _experiment(tmp_path, 1, 0, 20)
    for seed in range(2, 7):
        _experiment(tmp_path, seed, 0, 25 + seed)
    assert (tmp_path / "checkpoints" / "step-20").is_dir()


# --- bad data and restarts
# --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
def test_catching_the_halt_and_saving_saves_the_newest_weights(loop: str) -> None:
    model, reference = plain_net(), plain_net()
    guarded = Scene(model, torch.optim.SGD(model.parameters(), 0.1))
    alone = Scene(reference, torch.optim.SGD(reference.parameters(), 0.1))
    good = [(DATA[i],) for i in range(50)]
    with pytest.raises(TrainingHalted):
        LOOPS[loop](guarded, [*good, *[((DATA[0][0] * NAN, DATA[0][1]),)] * 200])
    bare(alone, good)
    assert difference(state_of(guarded), state_of(alone)) == ""


def test_restart_after_a_stop_goes_on_behind_the_bad_stretch(tmp_path: Path) -> None:
    """The same shard of NaN lies ahead at every start; each start gets further, and the last one
    through.
    """
    ends = []
    for _ in range(4):
        model = plain_net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        config = GuardConfig(
            run_dir=tmp_path,
            terminal="quiet",
            probes=Probes(locate_budget=0),
            on_signal="off",
            capsule="off",
        )
        try:
            with Guard(model, optimizer, config=config) as guard:
                if (tmp_path / "checkpoints" / "last-good").exists():
                    guard.restore()
                while guard.steps < 600:
                    inputs, targets = DATA[guard.steps % 60]
                    bad = 100 <= guard.steps < 400
                    guard.step(loss_of(model), (inputs * NAN if bad else inputs, targets))
                ends.append("through")
                break
        except TrainingHalted as halted:
            ends.append(halted.incident.step)
    assert ends[-1] == "through" and len(ends) <= 4
    stops = [end for end in ends if isinstance(end, int)]
    assert stops == sorted(stops)


def test_policy_stop_leaves_the_newest_good_state_on_disk(tmp_path: Path) -> None:
    model = plain_net()
    config = quiet(run_dir=tmp_path, on_signal="off", policy=Policy(max_consecutive=2))
    with (
        pytest.raises(TrainingHalted),
        Guard(model, torch.optim.SGD(model.parameters(), 0.1), config=config) as guard,
    ):
        for batch in [*DATA[:30], *[(DATA[0][0] * NAN, DATA[0][1])] * 5]:
            guard.step(loss_of(model), batch)
    stored = _sealed(tmp_path)
    assert list(stored) == [33] and stored[33]["good"]
    assert any(
        note.get("kind") == "end" or note["type"] == "end" for note in read_run(tmp_path).notes
    )
