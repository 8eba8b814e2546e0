"""ResTran's natural failure in four modes: resumed at half of the run with a learning rate that is far too high.

The routing scores grow until exp in the original's Sinkhorn overflows at 88.7. With 30 times the rate the loss is
ruined long before that, and the guard goes back before there is any NaN. With 150 times the rate the very next step
overflows. Either way it goes back to a state that was good by its loss, not merely finite.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from configs.config import Config
from recipes.common.expect import Expectation
from recipes.common.experiment import Experiment
from recipes.common.outcome import Mode, Outcome, Watchman, damage
from src.training.files import Files, states
from src.training.trainer import History, Trainer

ORIGINAL = Config(
    LEARNING_RATE=1e-2,
    BATCH_SIZE=16,
    GRAD_CLIP=5.0,
    MHC_N=4,
    SINKHORN="exp",
    MIX="diag",
    RMS_EPS=1e-20,
    USE_STN=False,
    EPOCHS=6,
    STEPS_PER_EPOCH=40,
    GUARD="original",
)
SHORT = ORIGINAL.with_(STEPS_PER_EPOCH=14, BATCH_SIZE=8, CHANNELS=(4, 8, 16), FRAMES=2, VALIDATION_PLATES=16)


def run(times: float, mode: Mode, short: bool) -> Outcome:
    """One mode on the toy plates; at half of the run it is resumed with `times` the learning rate."""
    config = SHORT if short else ORIGINAL
    if mode == "healthy":
        return _healthy(config)
    if mode == "seedfix":
        config = config.with_(SINKHORN="clamp")
    if mode == "guarded":
        config = config.with_(GUARD="stable")
    return _resumed(config, mode, times)


@cache
def _healthy(config: Config) -> Outcome:
    return _resumed(config, "healthy", 1.0)


def _resumed(config: Config, mode: Mode, times: float) -> Outcome:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        files = Files(Path(folder), "verify")
        trainer = _first_half(config, files)
        trainer.resume(Path(folder) / "verify_last.pth", config.LEARNING_RATE * times)
        _train(trainer, trainer.total_steps)
        trainer.close()
    seen = Watchman()
    for loss, norm in zip(trainer.history.losses, trainer.history.norms, strict=True):
        seen.step(loss, norm)
    parameters, buffers, tensors = damage(trainer.model)
    return Outcome(
        mode=mode,
        losses=tuple(trainer.history.losses),
        first_bad=seen.first_bad,
        metric=trainer.validate()[0],
        bad_parameters=parameters,
        bad_buffers=buffers,
        tensors=tensors,
        incidents=trainer.guard.incidents if trainer.guard is not None else (),
        seconds=time.perf_counter() - began,
    )


def _first_half(config: Config, files: Files) -> Trainer:
    """Trained to the middle and saved. Without a guard nothing differs between the modes, so it is done once."""
    trainer = Trainer(config, files=files)
    if config.GUARD == "stable":
        _train(trainer, trainer.total_steps // 2)
        trainer.save("last")
        return trainer
    state, history = _unguarded_half(config.with_(SINKHORN="exp"))
    files.write("last", state)
    trainer.history.losses += history.losses
    trainer.history.norms += history.norms
    return trainer


@cache
def _unguarded_half(config: Config) -> tuple[dict[str, Any], History]:
    trainer = Trainer(config)
    _train(trainer, trainer.total_steps // 2)
    return states(trainer), trainer.history


def _train(trainer: Trainer, until: int) -> None:
    while trainer.step < until:
        trainer.one_step(trainer.plates.draw(trainer.config.BATCH_SIZE))


EXPECTED = Expectation(
    metric="plate accuracy",
    ops=("aten.exp",),
    causes=("SG504",),
    absolute=0.03,
    source="components.py",
    higher_is_better=True,
    early=True,
)
EXPERIMENTS = (
    Experiment(
        name="resumed",
        title="restran_mhc: resumed with 30 times the learning rate",
        run=partial(run, 30.0),
        expected=EXPECTED,
    ),
    Experiment(
        name="overflow",
        title="restran_mhc: resumed with 150 times the learning rate, exp overflows in Sinkhorn at once",
        run=partial(run, 150.0),
        expected=replace(EXPECTED, early=False),
        in_short=False,
    ),
)
