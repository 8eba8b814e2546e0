"""The natural failures of the joint diffusion: a schedule in bfloat16, a static loss scale in
float16, Adam's epsilon.

Failure 1: a time above 0.998 is exactly 1 in bfloat16, and the masking schedule divides by zero;
once in 512 samples. Failure 2: `loss.loss_scale=65536` overflows float16 gradients. The norm is
infinite, and `isnan` lets it pass. Failure 3: an epsilon of 1e-8 is 0 in float16. It is seen before
the first step.
"""

from __future__ import annotations

import time
from functools import partial

from latentDLM_mmdit import train_mmdit, train_mmdit_stable
from latentDLM_mmdit.loop import Loop
from latentDLM_mmdit.preflight import look_first
from latentDLM_mmdit.ranks import Ranks
from latentDLM_mmdit.settings import load_config
from recipes.common.expect import Expectation
from recipes.common.experiment import Beforehand, Experiment
from recipes.common.outcome import Mode, Outcome, outcome_of

COMMON = (
    "data.folder=null",
    "logging.save_dir=null",
    "logging.log_freq=100000",
    "logging.eval_freq=100000",
    "training.precision=pure",
    "training.check=false",
    "training.train_batch_size=16",
    "training.gradient_accumulation_steps=1",
    "training.warmup_steps=50",
    "training.warmup_share=1.0",
    "loss.latent_loss_weight=1.0",
    "optimizer.lr=1e-3",
    "optimizer.grad_clip_norm=1.0",
    "logging.num_eval_batches=8",
)
REPORT = ("training.loop=report", "loss.normalize_latents=true", "loss.limit=clamp")
CAST = "model.schedule_dtype=model"
HALF = ("training.dtype=fp16", "optimizer.eps=1e-4", "loss.reduction=sequence")
SCALE = "loss.loss_scale=65536"
SMALL = ("model.hidden_size=32", "model.cond_dim=32", "model.n_blocks=1", "data.max_samples=512")
EARLY = ("training.seed=4", "training.warmup_steps=4")
"""The first time above 0.998 is drawn at step 11."""

SCHEDULE: dict[Mode, tuple[str, ...]] = {
    "healthy": ("training.loop=bare",),
    "unguarded": ("training.loop=bare", CAST),
    "seedfix": (*REPORT, CAST),
    "guarded": ("training.loop=stepguard", CAST),
}
LOSS_SCALE: dict[Mode, tuple[str, ...]] = {
    "healthy": (*HALF, "training.loop=original", "loss.loss_scale=256"),
    "unguarded": (*HALF, "training.loop=original", SCALE),
    "seedfix": (*HALF, *REPORT, SCALE),
    "guarded": (*HALF, "training.loop=stepguard", SCALE),
}


def loop_of(settings: tuple[str, ...]) -> Loop:
    """The loop that the settings ask for, of the script that has it."""
    config = load_config("mmdit_stable", (*COMMON, *settings))
    script = train_mmdit if config.training.loop in ("original", "bare") else train_mmdit_stable
    return script.build_loop(config, Ranks())


def run(
    modes: dict[Mode, tuple[str, ...]], sizes: tuple[tuple[str, ...], ...], mode: Mode, short: bool
) -> Outcome:
    """One mode on the toy texts. `sizes`: settings of the full form and of the short one."""
    began = time.perf_counter()
    loop = loop_of((*modes[mode], *sizes[short]))
    history = loop.train(bar=False)
    guard = getattr(loop, "guard", None)
    return outcome_of(
        mode,
        loop.session.trainer,
        losses=history.losses,
        norms=history.norms,
        metric=loop.session.evaluate()["eval_loss"],
        incidents=guard.incidents if guard is not None else (),
        seconds=time.perf_counter() - began,
    )


def look() -> tuple[str, list[str]]:
    """float16 weights with the usual epsilon."""
    settings = ("training.dtype=fp16", "loss.loss_scale=256", "training.loop=stepguard")
    config = load_config("mmdit_stable", (*COMMON, *settings))
    said, sound = look_first(train_mmdit_stable.build_session(config, Ranks()))
    wrong = ["the run would have been let start"] if sound else []
    return said, wrong + ([] if "optimizer.eps" in said else ["optimizer.eps is not named"])


EXPERIMENTS = (
    Experiment(
        name="schedule",
        title="latent_dlm: the masking schedule in bfloat16",
        run=partial(
            run,
            SCHEDULE,
            (("training.num_train_steps=300",), (*SMALL, *EARLY, "training.num_train_steps=16")),
        ),
        expected=Expectation(
            metric="eval loss",
            ops=("aten.reciprocal", "aten.log1p"),
            causes=("SG302",),
            relative=0.01,
            source="noise.py",
        ),
    ),
    Experiment(
        name="loss-scale",
        title="latent_dlm: static loss scale 65536 in float16",
        run=partial(
            run,
            LOSS_SCALE,
            (("training.num_train_steps=150",), (*SMALL, "training.num_train_steps=8")),
        ),
        expected=Expectation(
            metric="eval loss",
            ops=("aten.mm",),
            causes=("SG301",),
            relative=0.02,
            source="mmdit.py",
        ),
    ),
    Beforehand(
        name="epsilon", title="latent_dlm: float16 weights with eps 1e-8, before step 0", look=look
    ),
)
