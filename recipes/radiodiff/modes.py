"""RadioDiff's natural failures: log(0) in the time embedding once in 1001 draws, and autocast that
names no dtype.
"""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

from accelerate import Accelerator

from denoising_diffusion_pytorch.settings import accelerator_for, load_config, precision_report
from denoising_diffusion_pytorch.stages import Stages, build_stages
from recipes.common.expect import Expectation
from recipes.common.experiment import Beforehand, Experiment
from recipes.common.outcome import Mode, Outcome, outcome_of
from train_cond_ldm import Trainer

CONFIGS = Path(__file__).parent / "configs"
SETTINGS: dict[Mode, tuple[str, ...]] = {
    "healthy": ("trainer.guard=original",),
    "unguarded": ("trainer.guard=original", "model.eps=0"),
    "seedfix": ("trainer.guard=original", "model.eps=0", "trainer.treatment=seedfix"),
    "guarded": ("trainer.guard=stable", "model.eps=0"),
}
FULL = ("trainer.results_folder=null", "trainer.log_freq=100000")
SHORT = (
    *FULL,
    "trainer.train_num_steps=48",
    "trainer.ema_update_after_step=24",
    "model.first_stage.steps=40",
    "model.unet.dim=16",
)


@cache
def _first(settings: tuple[str, ...]) -> tuple[Stages, dict[str, object]]:
    """The first stage is the same in every mode; with the random state to begin with."""
    stages = build_stages(load_config(CONFIGS / "radio_train_m.yaml", settings))
    return stages, dict(stages.random_state())


def run(mode: Mode, short: bool) -> Outcome:
    """One mode on the toy cities."""
    settings = SHORT if short else FULL
    began = time.perf_counter()
    stages, beginning = _first(settings)
    stages.set_random_state(beginning)
    config = load_config(CONFIGS / "radio_train_m.yaml", (*settings, *SETTINGS[mode]))
    trainer = Trainer(config, Accelerator(cpu=True), stages=stages)
    history = trainer.train(bar=False)
    return outcome_of(
        mode,
        trainer.model,
        losses=history.losses,
        norms=history.norms,
        metric=trainer.nmse(),
        incidents=trainer.guard.incidents if trainer.guard is not None else (),
        seconds=time.perf_counter() - began,
    )


def look() -> tuple[str, list[str]]:
    """The report's own settings, looked at before the first step."""
    config = load_config(CONFIGS / "radio_report.yaml", (*SHORT, "trainer.guard=original"))
    said, aligned = precision_report(
        Trainer(config, accelerator_for(config), stages=_first(SHORT)[0])
    )
    wanted = ("float16 on cuda", "SG801")
    wrong = ["the settings were called aligned"] if aligned else []
    return said, wrong + [f"{part!r} is not said" for part in wanted if part not in said]


EXPERIMENTS = (
    Experiment(
        name="time-zero",
        title="radiodiff: log(0) in the time embedding",
        run=run,
        expected=Expectation(
            metric="NMSE",
            ops=("aten.log",),
            causes=("SG202",),
            relative=0.10,
            source="cond_unet.py",
        ),
    ),
    Beforehand(
        name="unnamed-precision", title="radiodiff: amp True, fp16 False, before step 0", look=look
    ),
)
