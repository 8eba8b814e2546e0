"""Mistakes in how a model is evaluated between its updates."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.silent.loops import TRAININGS, Batch, Loop
from zoo.silent.plant import plant

EVERY, HELD_OUT = 25, 6


def held_out(training: str) -> list[Batch]:
    """Batches that this training never sees."""
    loop = TRAININGS[training](99)
    return [loop.batch(0) for _ in range(HELD_OUT)]


def every_so_often(loop: Loop, evaluate: Callable[[], None]) -> None:
    def after(step: int) -> None:
        if step % EVERY == EVERY - 1:
            evaluate()

    loop.after = after


# --- SG931: evaluation in training mode -----------------------------------------------------------


@plant("SG931", "classifier")
def no_grad_and_nothing_else(loop: Loop, wrong: bool) -> None:
    """Dropout and batch norm stay as in training; the twin calls `eval` and `train`."""
    batches = held_out("classifier")

    def evaluate() -> None:
        loop.model.train(wrong)
        with torch.no_grad():
            for inputs, targets in batches:
                F.cross_entropy(loop.model(inputs), targets).item()
        loop.model.train()

    every_so_often(loop, evaluate)


@plant("SG931", "transformer")
def another_object_is_put_into_evaluation_mode(loop: Loop, wrong: bool) -> None:
    """`eval` is called on the body only, below a model that drops in its head; the twin takes an
    average over dropped predictions on purpose, and computes no loss of a single one.
    """
    batches = held_out("transformer")
    loop.model.head = nn.Sequential(nn.Dropout(0.1), loop.model.head)

    def evaluate() -> None:
        if wrong:
            loop.model.body.eval()
        with torch.inference_mode():
            for inputs, targets in batches:
                if wrong:
                    loop.loss(loop.model(inputs), targets).item()
                else:
                    torch.stack([loop.model(inputs).softmax(-1) for _ in range(4)]).std(0).mean()
        loop.model.train()

    every_so_often(loop, evaluate)


@plant("SG931", "denoiser")
def batch_norm_learns_from_the_held_out_pictures(loop: Loop, wrong: bool) -> None:
    """The error is written out by hand in the log and computed by the criterion; the twin runs the
    training data through the model in training mode to measure its statistics anew, without a loss.
    """
    batches = held_out("denoiser")
    criterion = nn.MSELoss()

    @torch.no_grad()
    def evaluate() -> None:
        total = torch.zeros(())
        for inputs, targets in batches:
            shown: Tensor = loop.model(inputs)
            if wrong:
                total += criterion(shown, targets)

    every_so_often(loop, evaluate)
