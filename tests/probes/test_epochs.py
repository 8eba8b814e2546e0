"""SG929: passes over the data and workers that repeat what they should draw anew."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

import stepguard
from stepguard import Guard, GuardConfig, Probes
from stepguard.journal import read_run

EPOCHS, ROWS, SIZE = 3, 48, 4


class Noisy(Dataset[Tensor]):
    """Numbers with noise that a function draws."""

    def __init__(self, noise: Callable[[Noisy, int], float]) -> None:
        self.noise = noise
        self.generator = torch.Generator().manual_seed(3)
        self.inner: list[dict[str, Any]] = [
            {"rng": np.random.default_rng(3), "state": np.random.RandomState(3)}
        ]
        self.python = random.Random(3)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((SIZE,), index / ROWS) + self.noise(self, index)


def silent(folder: Path, epochs: Iterator[DataLoader[Tensor]] | list[DataLoader[Tensor]]) -> str:
    """What a watched run over these loaders was told."""
    torch.manual_seed(0)
    net = nn.Linear(SIZE, SIZE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    config = GuardConfig(run_dir=folder, probes=Probes(look_every=4), terminal="quiet")
    with stepguard.watch(net, optimizer, config=config) as guard:
        for loader in epochs:
            for batch in loader:
                optimizer.zero_grad()
                (net(batch) - batch.roll(1, 1)).square().mean().backward()
                optimizer.step()
        assert guard.armed
    found = [str(n["summary"]) for n in read_run(folder).notes if n.get("kind") == "silent"]
    return "; ".join(found)


def loaded(noise: Callable[[Noisy, int], float], **settings: object) -> DataLoader[Tensor]:
    return DataLoader(
        Noisy(noise), batch_size=SIZE, shuffle=True, multiprocessing_context="fork", **settings
    )


OWN: dict[str, Callable[[Noisy, int], float]] = {
    "torch.Generator": lambda data, _: float(torch.randn((), generator=data.generator)),
    "numpy Generator": lambda data, _: float(data.inner[0]["rng"].normal()),
    "numpy RandomState": lambda data, _: float(data.inner[0]["state"].normal()),
    "random.Random": lambda data, _: data.python.gauss(0.0, 1.0),
}


@pytest.mark.parametrize("noise", OWN.values(), ids=OWN)
def test_generator_of_the_data_set_gives_all_workers_the_same(
    noise: Callable[[Noisy, int], float], tmp_path: Path
) -> None:
    told = silent(tmp_path, [loaded(noise, num_workers=2, persistent_workers=True)])
    assert (
        told.startswith("SG929") and "all 2 workers" in told and "that the data set holds" in told
    )


def test_single_worker_that_begins_every_epoch_alike_is_told(tmp_path: Path) -> None:
    told = silent(tmp_path, [loaded(OWN["numpy Generator"], num_workers=1)] * EPOCHS)
    assert told.startswith("SG929") and "the first worker of two epochs" in told


def reseeded(data: Noisy, index: int) -> float:
    data.generator.manual_seed(index)
    return float(torch.randn((), generator=data.generator))


HEALTHY: dict[str, Callable[[Noisy, int], float]] = {
    "nothing is drawn": lambda data, _: 0.0,
    "global generators": lambda data, _: (
        float(torch.randn(())) + random.random() + float(np.random.normal())
    ),
    "seeded by the index": reseeded,
}


@pytest.mark.parametrize("noise", HEALTHY.values(), ids=HEALTHY)
@pytest.mark.parametrize("persistent", [False, True])
def test_healthy_workers_are_not_told(
    noise: Callable[[Noisy, int], float], persistent: bool, tmp_path: Path
) -> None:
    loader = loaded(noise, num_workers=2, persistent_workers=persistent)
    assert silent(tmp_path, [loader] * EPOCHS) == ""


def with_sampler(seeds: list[int], loader_of: type[RandomSampler]) -> Iterator[DataLoader[Tensor]]:
    data = Noisy(HEALTHY["nothing is drawn"])
    for seed in seeds:
        sampler = loader_of(data, generator=torch.Generator().manual_seed(seed))
        yield DataLoader(data, batch_size=SIZE, sampler=sampler)


def test_shuffle_with_the_seed_of_the_epoch_before_is_told(tmp_path: Path) -> None:
    told = silent(tmp_path / "wrong", with_sampler([1, 1, 1], RandomSampler))
    assert told.startswith("SG929") and "RandomSampler gave the same indices" in told
    assert silent(tmp_path / "twin", with_sampler([1, 2, 3], RandomSampler)) == ""


def test_order_that_is_not_shuffled_may_repeat(tmp_path: Path) -> None:
    data = Noisy(HEALTHY["nothing is drawn"])
    assert silent(tmp_path, [DataLoader(data, batch_size=SIZE)] * EPOCHS) == ""


def test_data_that_a_rewind_delivers_again_is_not_told(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = Noisy(HEALTHY["nothing is drawn"])
    loader = DataLoader(data, batch_size=SIZE, shuffle=True)
    net = nn.Linear(SIZE, SIZE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    config = GuardConfig(run_dir=tmp_path, probes=Probes(look_every=2), terminal="quiet")
    with Guard(net, optimizer, loader=loader, config=config) as guard:
        rows = guard.loader
        assert rows is not None
        for number, batch in enumerate(rows):
            guard.step(lambda b: (net(b) - b.roll(1, 1)).square().mean(), batch)
            if number == 0:
                guard.save()
            if number == 7:
                break
        assert guard.restore()
        for batch in rows:
            guard.step(lambda b: (net(b) - b.roll(1, 1)).square().mean(), batch)
        assert guard.armed
    assert [n for n in read_run(tmp_path).notes if n.get("kind") == "silent"] == []
