"""Recipes as their users run them: from their own folder, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import forked

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"
TINY = {
    "latent_dlm": (
        "model.hidden_size=16 model.cond_dim=16 model.n_blocks=1 model.n_heads=2 "
        "model.max_seq_len=8 model.vocab_size=12 model.latent_dim=4 data.max_samples=160 "
        "training.num_train_steps=6 training.eval_batch_size=8 logging.num_eval_batches=1 "
        "logging.log_freq=3 logging.eval_freq=3 logging.save_freq=3"
    ),
    "radiodiff": (
        "model.image_size=16 model.first_stage.steps=2 model.unet.dim=8 data.batch_size=4 "
        "trainer.train_num_steps=6 trainer.ema_update_after_step=1 "
        "trainer.save_and_sample_every=3 trainer.log_freq=3"
    ),
    "sft": (
        "model.hidden_size=16 model.num_hidden_layers=1 model.num_attention_heads=2 "
        "model.num_key_value_heads=1 model.base_steps=2 data.train=64 data.valid=8 "
        "args.max_steps=6 args.per_device_train_batch_size=4 args.warmup_steps=2 "
        "args.logging_steps=1 args.save_steps=3"
    ),
}
"""Settings of a recipe that make it small enough for a test."""


def run(
    recipe: str | Path,
    *arguments: str,
    module: str | None = None,
    ranks: int = 0,
    imports: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS` in the recipe's folder or a copy of it, or `python -m MODULE ARGUMENTS` in
    the repository's.
    """
    words = [*(("-m", module) if module else ()), *arguments]
    folder = ROOT if module and module.startswith("recipes") else RECIPES / recipe
    given = {"ranks": ranks, "imports": imports, "seconds": 280}
    return forked.python(words, folder=folder, variables=variables(), **given)


def variables() -> dict[str, str]:
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    paths = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "PATH": programs}
    return {**os.environ, **paths, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
