"""Mistakes in what a run starts from: a resume that brings only a part of the run before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from zoo.silent.loops import CLASSES, FEATURES, ROWS, TRAININGS, Batch, Loop
from zoo.silent.plant import plant


def after_a_run(loop: Loop, training: str, resume: Callable[[Loop], None]) -> Loop:
    """Let this loop go on after another one of its kind, which is returned."""
    before = TRAININGS[training](7)
    loop.before = before
    loop.resume = lambda: resume(before)
    return before


# --- SG923: a resume that did not resume ----------------------------------------------------------


@plant("SG923", "transformer")
def only_the_model_is_loaded(loop: Loop, wrong: bool) -> None:
    """`model.load_state_dict` and nothing else; the twin loads the optimizer too."""

    def resume(before: Loop) -> None:
        loop.model.load_state_dict(before.model.state_dict())
        if not wrong:
            loop.optimizer.load_state_dict(before.optimizer.state_dict())

    after_a_run(loop, "transformer", resume)


@plant("SG923", "classifier")
def schedule_made_anew(loop: Loop, wrong: bool) -> None:
    """The warm-up begins again; the twin loads the schedule."""

    def warm(one: Loop) -> Any:
        schedule = LambdaLR(one.optimizer, lambda step: min(1.0, (step + 1) / 50))
        one.after = lambda step: schedule.step()
        return schedule

    def resume(before: Loop) -> None:
        loop.model.load_state_dict(before.model.state_dict())
        loop.optimizer.load_state_dict(before.optimizer.state_dict())
        schedule = warm(loop)
        if not wrong:
            schedule.load_state_dict(first.state_dict())
            loop.optimizer.load_state_dict(before.optimizer.state_dict())

    first = warm(after_a_run(loop, "classifier", resume))


@plant("SG923", "segmenter")
def runs_again_from_the_best_weights(loop: Loop, wrong: bool) -> None:
    """The weights of an earlier step are loaded without moments; the twin begins anew, in the same
    folder.
    """
    best: dict[str, Any] = {}

    def resume(before: Loop) -> None:
        if wrong:
            loop.model.load_state_dict(best)

    before = after_a_run(loop, "segmenter", resume)

    def keep(step: int) -> None:
        if step == 120:
            best.update({name: one.clone() for name, one in before.model.state_dict().items()})

    before.after = keep


@plant("SG923", "denoiser")
def momentum_left_behind(loop: Loop, wrong: bool) -> None:
    """SGD without its momentum; the twin is a second phase with another optimizer."""

    def resume(before: Loop) -> None:
        loop.model.load_state_dict(before.model.state_dict())

    after_a_run(loop, "denoiser", resume)
    if not wrong:
        loop.train_with(torch.optim.Adam(loop.model.parameters(), lr=1e-3))


@plant("SG923", "classifier")
def data_from_the_beginning(loop: Loop, wrong: bool) -> None:
    """The loader starts at its first batch, in the middle of an epoch; the twin skips what was
    trained on.
    """
    generator = torch.Generator().manual_seed(5)
    centres = torch.randn(CLASSES, FEATURES, generator=generator) * 1.5
    labels = torch.randint(CLASSES, (ROWS * 400,), generator=generator)
    points = centres[labels] + torch.randn(len(labels), FEATURES, generator=generator)
    loader = DataLoader(TensorDataset(points, labels), batch_size=ROWS)

    def feed(one: Loop, skipped: int) -> None:
        batches = iter(loader)
        for _ in range(skipped):
            next(batches)

        def batch(step: int) -> Batch:
            inputs, targets = next(batches)
            return inputs, targets

        one.batch = batch

    def resume(before: Loop) -> None:
        loop.model.load_state_dict(before.model.state_dict())
        loop.optimizer.load_state_dict(before.optimizer.state_dict())
        feed(loop, 0 if wrong else 150)

    feed(after_a_run(loop, "classifier", resume), 0)


# --- SG927: weights that were not loaded, or are not tied -----------------------------------------


def before_the_first_batch(loop: Loop, load: Callable[[], object]) -> None:
    """Call `load` when the loop asks for its first batch, as a lazy restore does."""
    batch, waiting = loop.batch, [load]

    def first(step: int) -> Batch:
        while waiting:
            waiting.pop()()
        return batch(step)

    loop.batch = first


@plant("SG927", "classifier")
def names_of_a_compiled_model(loop: Loop, wrong: bool) -> None:
    """The file has the prefix of torch.compile; the twin's file lacks a new head."""
    state = {name: value.clone() for name, value in loop.model.state_dict().items()}
    if wrong:
        state = {f"_orig_mod.{name}": value for name, value in state.items()}
    else:
        state = {name: value for name, value in state.items() if name.startswith("body.")}
    before_the_first_batch(loop, lambda: loop.model.load_state_dict(state, strict=False))


@plant("SG927", "segmenter")
def frozen_body_without_a_file(loop: Loop, wrong: bool) -> None:
    """A frozen layer that the file does not hold; the twin trains what its file does not hold."""
    frozen = dict(loop.model.named_parameters())
    first = next(iter(frozen))
    state = {name: value.clone() for name, value in loop.model.state_dict().items()}
    del state[first]
    frozen[first].requires_grad_(not wrong)
    before_the_first_batch(loop, lambda: loop.model.load_state_dict(state, strict=False))


@plant("SG927", "denoiser")
def body_loaded_under_the_name_of_the_whole(loop: Loop, wrong: bool) -> None:
    """A part is loaded with the names of the whole; the twin mends it by a second load."""
    state = {name: value.clone() for name, value in loop.model.state_dict().items()}
    body = {name: one for name, one in state.items() if name.startswith("body.")}

    def load() -> None:
        loop.model.body.load_state_dict(body, strict=False)
        if not wrong:
            names = {name.removeprefix("body."): one for name, one in body.items()}
            loop.model.body.load_state_dict(names)

    before_the_first_batch(loop, load)
