"""Mistakes in how data is split: into training and evaluation, and into micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, random_split

from zoo.silent.loops import Batch, Loop
from zoo.silent.plant import plant
from zoo.silent.wrong_evaluations import every_so_often

PARTS = 12
"""Batches of the loop that make its data set."""
HELD_OUT, ROWS = 0.25, 32


def data_of(loop: Loop) -> TensorDataset:
    parts = [loop.batch(0) for _ in range(PARTS)]
    return TensorDataset(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))


def train_on(loop: Loop, data: Dataset[Batch], rows: int = ROWS) -> None:
    stream = itertools.chain.from_iterable(itertools.repeat(DataLoader(data, rows, shuffle=True)))
    loop.batch = lambda step: next(stream)


def evaluate_on(loop: Loop, *sets: Dataset[Batch]) -> None:
    loaders = [DataLoader(one, ROWS) for one in sets]

    def evaluate() -> None:
        loop.model.eval()
        with torch.no_grad():
            for inputs, targets in itertools.chain.from_iterable(loaders):
                loop.loss(loop.forward(inputs), targets)
        loop.model.train()

    every_so_often(loop, evaluate)


# --- SG932: evaluation data that is trained on ----------------------------------------------------


@plant("SG932", "classifier")
def split_twice_with_other_seeds(loop: Loop, wrong: bool) -> None:
    """Each script splits for itself; the twin has one split, and evaluates training data too."""
    data = data_of(loop)
    held = int(HELD_OUT * len(data))
    sizes = [len(data) - held, held]
    train, kept = random_split(data, sizes, torch.Generator().manual_seed(0))
    if wrong:
        _, kept = random_split(data, sizes, torch.Generator().manual_seed(1))
    train_on(loop, train)
    evaluate_on(loop, kept) if wrong else evaluate_on(loop, kept, Subset(data, train.indices[:64]))


class Noisy(Dataset[Batch]):
    """The rows of a data set, with other noise at each reading."""

    def __init__(self, data: Dataset[Batch]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Batch:
        inputs, targets = self.data[index]
        return inputs + 0.01 * torch.randn(inputs.shape), targets


@plant("SG932", "denoiser")
def split_after_the_rows_were_repeated(loop: Loop, wrong: bool) -> None:
    """Oversampled, then split by row; in the twin the parts are oversampled by themselves."""
    data = data_of(loop)
    count = len(data)
    if wrong:
        twice = ConcatDataset([data, data])
        order = torch.randperm(2 * count).tolist()
        train: Dataset[Batch] = Subset(twice, order[count // 4 :])
        held: Dataset[Batch] = Subset(twice, order[: count // 4])
    else:
        first = Subset(data, range(count // 4, count))
        train, held = ConcatDataset([first, first]), Subset(data, range(count // 4))
    train_on(loop, train)
    evaluate_on(loop, held)


@plant("SG932", "segmenter")
def augmented_rows_of_the_same_pictures(loop: Loop, wrong: bool) -> None:
    """Training pictures have noise on them, so no value is the same, but a third of the indices is;
    the twin's parts have no index in common.
    """
    data = Noisy(data_of(loop))
    count = len(data)
    train_on(loop, Subset(data, range(count // 3, count)), 16)
    last = 2 * count // 3 if wrong else count // 3
    evaluate_on(loop, Subset(data, range(last - count // 3, last - count // 6)))


@plant("SG932", "transformer")
def held_out_rows_are_in_the_training_file(loop: Loop, wrong: bool) -> None:
    """Both files hold a part of the rows. The twin's rows are drawn from few values: many occur
    twice, within the training data as often as in both.
    """
    train = data_of(loop)
    held = data_of(loop)
    if wrong:
        half = len(held) // 2
        train = TensorDataset(
            *(torch.cat([a, b[:half]]) for a, b in zip(train.tensors, held.tensors, strict=True))
        )
    else:
        few = [one % 2 for one in train.tensors]
        few[0][:, 8:] = few[1][:, 8:] = 0
        train = TensorDataset(*few)
        held = TensorDataset(*(one.flip(0)[: len(one) // 2] for one in few))
    train_on(loop, train)
    evaluate_on(loop, held)


# --- SG933: micro-batches whose means are added up ------------------------------------------------


def accumulate(loop: Loop, count: int, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Take several batches for each update. The loop divides by their number, which is undone."""
    loop.micro_batches = count
    loop.loss = lambda outputs, targets: loss(outputs, targets) * count


@plant("SG933", "denoiser")
def division_is_forgotten(loop: Loop, wrong: bool) -> None:
    """Four batches of a loader; the twin divides the gradients by hand before it clips them."""
    train_on(loop, data_of(loop), 16)
    accumulate(loop, 4, loop.loss)
    optimizer, parameters = loop.optimizer, list(loop.model.parameters())

    def update() -> None:
        for one in parameters if not wrong else ():
            one.grad /= 4
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    loop.update = update


@plant("SG933", "segmenter")
def mean_in_the_place_of_a_sum(loop: Loop, wrong: bool) -> None:
    """The framework leaves the division to the loss, which takes a mean; the twin's loss is a sum
    over the pixels, divided by those of all micro-batches.
    """
    train_on(loop, data_of(loop), 16)

    def of_all(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="sum") / (2 * targets.numel())

    accumulate(loop, 2, F.cross_entropy if wrong else of_all)
    loop.train_with(torch.optim.SGD(loop.model.parameters(), lr=0.01))


@plant("SG933", "transformer")
def many_small_batches_without_a_loader(loop: Loop, wrong: bool) -> None:
    """Eight batches that a function makes; the twin adds two terms of one loss, with a backward
    pass each: for the tokens as they are, and for tokens with a part of them replaced.
    """
    if wrong:
        accumulate(loop, 8, loop.loss)
        return
    batch, kept = loop.batch, []

    def same_twice(step: int) -> Batch:
        if not kept:
            kept.append(batch(step))
            return kept[0]
        inputs, targets = kept.pop()
        return torch.where(torch.rand(inputs.shape) < 0.1, inputs.roll(1, 1), inputs), targets

    loop.batch = same_twice
    accumulate(loop, 2, loop.loss)
