"""The reports' command lines as they are typed, in a fresh copy of the recipe's folder; `more`
makes them short.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from recipe_process import RECIPES, typed

SHORT_DIFFUSION = (
    "trainer.train_num_steps=6",
    "trainer.save_and_sample_every=3",
    "model.first_stage.steps=10",
    "model.unet.dim=8",
    "data.batch_size=4",
)
SHORT_READER = ("--epochs", "1", "--batch-size", "2")
SHORT_TEXT = (
    "training.num_train_steps=6",
    "model.hidden_size=16",
    "model.cond_dim=16",
    "model.n_blocks=1",
    "model.n_heads=2",
    "data.max_samples=160",
    "logging.num_eval_batches=1",
)
COMMANDS = [
    (
        "latent_dlm",
        "torchrun --nnodes=1 --nproc_per_node=2 launch_stable_training.py --config-name "
        "mmdit_stable "
        "training.num_train_steps=100 logging.log_freq=10",
        SHORT_TEXT,
        "weights of 2 processes are equal bit for bit",
        "outputs/mmdit-stable/journal.rank1.jsonl",
    ),
    (
        "radiodiff",
        "accelerate launch train_cond_ldm.py --cfg configs/radio_train_m.yaml",
        SHORT_DIFFUSION,
        "6 steps in ",
        "results/model-2.pt",
    ),
    (
        "restran_mhc",
        "python train.py --model restran_mhc --mhc-n 2 --lr 0.0001",
        SHORT_READER,
        "40 steps, loss ",
        "results/restran_mhc_last.pth",
    ),
    (
        "restran_mhc",
        "python train.py",
        SHORT_READER,
        "40 steps, loss ",
        "results/history_restran_mhc.csv",
    ),
    ("restran_mhc", "python diagnose_nan.py", (), "6. recommendations", "results"),
]


@pytest.mark.parametrize(
    ("recipe", "line", "more", "said", "made"), COMMANDS, ids=[c[1] for c in COMMANDS]
)
def test_the_line_of_the_report_runs_as_typed(
    recipe: str, line: str, more: tuple[str, ...], said: str, made: str, tmp_path: Path
) -> None:
    copy = tmp_path / recipe
    shutil.copytree(
        RECIPES / recipe,
        copy,
        ignore=shutil.ignore_patterns("results", "outputs", "train_logs", "__pycache__"),
    )
    ended = typed(copy, line, *more)

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert said in ended.stdout
    assert (copy / made).exists()
