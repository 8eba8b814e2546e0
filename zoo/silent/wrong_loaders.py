"""Mistakes in how data is shuffled and augmented: the same random numbers again and again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info

from zoo.silent.loops import Batch, Loop
from zoo.silent.plant import plant

PARTS = 20
"""Batches of an epoch."""


class Rows(Dataset[Batch]):
    """Examples of a training, each with a little noise on it."""

    def __init__(self, loop: Loop, noise: Callable[[int], float] = lambda index: 0.0) -> None:
        parts = [loop.batch(0) for _ in range(PARTS)]
        self.inputs = torch.cat([inputs for inputs, _ in parts])
        self.targets = torch.cat([targets for _, targets in parts])
        self.rows = len(parts[0][0])
        self.noise = noise
        self.rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Batch:
        inputs: Tensor = self.inputs[index]
        if inputs.is_floating_point():
            inputs = inputs + 0.01 * self.noise(index)
        return inputs, self.targets[index]


def train_on(loop: Loop, epochs: Iterator[Any]) -> None:
    """Take one batch after another from these loaders."""
    stream = itertools.chain.from_iterable(epochs)
    loop.batch = lambda step: next(stream)  # type: ignore[no-any-return]


# --- SG929: epochs and workers that draw the same random numbers ----------------------------------


def own_generator(worker: int) -> None:
    """What a `worker_init_fn` should do."""
    info: Any = get_worker_info()
    info.dataset.rng = np.random.default_rng(torch.initial_seed())


@plant("SG929", "classifier")
def generator_is_copied_to_every_worker(loop: Loop, wrong: bool) -> None:
    """One made in `__init__`; the twin makes one for each worker."""
    rows = Rows(loop)
    rows.noise = lambda index: float(rows.rng.normal())
    loader = DataLoader(
        rows,
        batch_size=rows.rows,
        shuffle=True,
        num_workers=2,
        multiprocessing_context="fork",
        worker_init_fn=None if wrong else own_generator,
    )
    train_on(loop, itertools.repeat(loader))


def all_alike(worker: int) -> None:
    np.random.seed(42)


@plant("SG929", "denoiser")
def workers_are_seeded_alike(loop: Loop, wrong: bool) -> None:
    """`np.random.seed(42)` in every worker; the twin seeds each example by its index."""

    def seeded(index: int) -> float:
        np.random.seed(index)
        return float(np.random.normal())

    rows = Rows(loop, (lambda index: float(np.random.normal())) if wrong else seeded)
    loader = DataLoader(
        rows,
        batch_size=rows.rows,
        shuffle=True,
        num_workers=2,
        multiprocessing_context="fork",
        persistent_workers=True,
        worker_init_fn=all_alike if wrong else None,
    )
    train_on(loop, itertools.repeat(loader))


@plant("SG929", "transformer")
def seed_is_set_in_every_epoch(loop: Loop, wrong: bool) -> None:
    """The same order in each; the twin seeds an epoch by its number."""
    rows = Rows(loop)

    def epochs() -> Iterator[Any]:
        for epoch in itertools.count():
            seed = torch.Generator().manual_seed(0 if wrong else epoch)
            yield DataLoader(rows, batch_size=rows.rows, shuffle=True, generator=seed)

    train_on(loop, epochs())


@plant("SG929", "segmenter")
def epoch_of_the_sampler_is_never_set(loop: Loop, wrong: bool) -> None:
    """The same shard in the same order; the twin calls `set_epoch`, and validates on fixed data."""
    rows = Rows(loop)
    sampler = DistributedSampler(rows, num_replicas=2, rank=0)
    loader = DataLoader(rows, batch_size=rows.rows, sampler=sampler)
    held_out = DataLoader(rows, rows.rows, sampler=DistributedSampler(rows, 2, 1))

    def epochs() -> Iterator[Any]:
        for epoch in itertools.count():
            if not wrong:
                sampler.set_epoch(epoch)
                for inputs, targets in held_out:
                    with torch.no_grad():
                        loop.model.eval()
                        loop.loss(loop.forward(inputs), targets)
                        loop.model.train()
            yield loader

    train_on(loop, epochs())
