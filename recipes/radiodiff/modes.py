"""RadioDiff's natural failure in four modes: without a floor of the time, log(0) in the embedding once in 1001 draws."""

from __future__ import annotations

import time
from pathlib import Path

from accelerate import Accelerator
from train_cond_ldm import Trainer, load_config

from recipes.common.expect import Expectation
from recipes.common.outcome import Mode, Outcome, Watchman, damage
from recipes.verify import Experiment

CONFIG = Path(__file__).parent / "configs" / "radio_train_m.yaml"
SETTINGS: dict[Mode, tuple[str, ...]] = {
    "healthy": ("trainer.guard=original",),
    "unguarded": ("trainer.guard=original", "model.eps=0"),
    "seedfix": ("trainer.guard=original", "model.eps=0", "trainer.treatment=seedfix"),
    "guarded": ("trainer.guard=stable", "model.eps=0"),
}
ALWAYS = ("trainer.results_folder=null", "trainer.log_every=100000", "trainer.save_every=100000")


def run(mode: Mode, short: bool) -> Outcome:
    """One mode on the toy cities."""
    steps = 60 if short else 300
    first = 60 if short else 250
    began = time.perf_counter()
    config = load_config(
        CONFIG, (*SETTINGS[mode], *ALWAYS, f"trainer.train_num_steps={steps}", f"model.first_stage.steps={first}")
    )
    trainer = Trainer(config, Accelerator(cpu=True))
    history = trainer.train(bar=False)
    seen = Watchman()
    for loss, norm in zip(history.losses, history.norms, strict=True):
        seen.step(loss, norm)
    parameters, buffers, tensors = damage(trainer.model)
    return Outcome(
        mode=mode,
        losses=tuple(history.losses),
        first_bad=seen.first_bad,
        metric=trainer.nmse(),
        bad_parameters=parameters,
        bad_buffers=buffers,
        tensors=tensors,
        incidents=trainer.guard.incidents if trainer.guard is not None else (),
        seconds=time.perf_counter() - began,
    )


EXPERIMENTS = (
    Experiment(
        name="time-zero",
        title="radiodiff: log(0) in the time embedding",
        run=run,
        expected=Expectation(
            metric="NMSE", ops=("aten.log",), causes=("SG202",), relative=0.10, source="cond_unet.py"
        ),
    ),
)
