"""Healthy training of every family is left alone: no intervention, no further call, not one bit."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from zoo.healthy import catalogue, drive, same
from zoo.healthy.training import Family, Learner, Training, single

from benchmarks import harmless
from forked import FULL

FAMILIES = list(catalogue.load().values())
STEPS = 200 if FULL else 120


def compared() -> list[Family]:
    """One family of each group and of each way in; all with STEPGUARD_FULL=1."""
    if FULL:
        return FAMILIES
    shuffled = random.Random(6).sample(FAMILIES, len(FAMILIES))
    one = {part: family for family in shuffled for part in (family.group, family.way)}
    return [family for family in FAMILIES if family in one.values()]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Frameworks warn about small data sets and few workers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("family", compared(), ids=lambda family: family.name)
def test_healthy_training_is_left_alone(family: Family) -> None:
    outcome = drive.compare(family, seed=0, steps=STEPS)
    assert outcome.clean, (
        f"{outcome.interventions} {outcome.extra_calls} {outcome.unequal} {outcome.error}"
    )


def test_there_are_families_enough_for_every_way_in() -> None:
    assert len({family.name.partition(" (")[0] for family in FAMILIES}) >= 40
    assert {family.way for family in FAMILIES} == {"step", "watch", "run", "trainer", "lightning"}


def test_same_seed_gives_the_same_bare_run_and_another_seed_another() -> None:
    (family,) = catalogue.chosen(["dqn (step)"])
    first, again, other = (drive.run_bare(family, seed, 20) for seed in (3, 3, 4))
    assert list(same.differences(first[1], again[1])) == []
    assert list(same.differences(first[1], other[1]))


def ill(seed: int) -> Training:
    """Not healthy at all: one batch is NaN."""
    model = torch.nn.Linear(2, 1)
    learner = Learner(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda x: model(x).square().mean(),
    )
    return single(learner, lambda step: torch.full((4, 2), torch.nan if step == 10 else 1.0))


@pytest.mark.parametrize("way", ["step", "watch"])
def test_an_intervention_is_counted(way: str) -> None:
    """The bench can fail: the guard vetoes the step, the bare run takes it."""
    outcome = drive.compare(Family("ill", "test", way, ill), seed=0, steps=20)  # type: ignore[arg-type]
    assert outcome.interventions and outcome.unequal and not outcome.clean


def test_a_single_bit_is_seen() -> None:
    kept = same.frozen({"weight": torch.tensor([1.0, 0.0])})
    assert list(same.differences(kept, {"weight": torch.tensor([1.0, -0.0])})) == ["weight"]
    nan = {"weight": torch.tensor([torch.nan])}
    assert list(same.differences(nan, {"weight": torch.tensor([torch.nan])})) == []


def test_result_counts_runs_and_steps(tmp_path: Path) -> None:
    path = tmp_path / "harmless.json"
    words = ["--families", "byol,moco", "--seeds", "2", "--steps", "10", "--jobs", "1"]
    assert harmless.main([*words, "--output", str(path)]) == 0
    found = json.loads(path.read_text(encoding="utf-8"))
    names = ("families", "runs", "steps", "interventions")
    assert [found[name] for name in names] == [2, 4, 40, 0]


def test_unknown_family_is_refused() -> None:
    with pytest.raises(SystemExit, match="no family fits 'no_such'"):
        catalogue.chosen(["no_such"])
