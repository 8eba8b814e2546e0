"""Settings and loops of recipes/latent_dlm that are small enough for a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

TINY = (
    "model.hidden_size=16",
    "model.cond_dim=16",
    "model.n_blocks=1",
    "model.n_heads=2",
    "model.max_seq_len=8",
    "model.vocab_size=12",
    "model.latent_dim=4",
    "data.max_samples=160",
    "training.num_train_steps=6",
    "training.eval_batch_size=8",
    "logging.num_eval_batches=1",
    "logging.log_freq=3",
    "logging.eval_freq=3",
    "logging.save_freq=3",
)


def places(tmp_path: Path) -> tuple[str, ...]:
    return (
        f"data.folder={tmp_path}/data",
        f"logging.save_dir={tmp_path}/out",
        f"logging.log_dir={tmp_path}/logs",
    )


def settings(*overrides: str, name: str = "mmdit_stable") -> Any:
    from latentDLM_mmdit.settings import load_config

    return load_config(name, (*TINY, *overrides))


def quiet(*overrides: str) -> Any:
    """A stable loop that writes nothing."""
    from latentDLM_mmdit.ranks import Ranks
    from latentDLM_mmdit.train_mmdit_stable import build_loop

    config = settings(
        "data.folder=null", "logging.save_dir=null", "training.check=false", *overrides
    )
    return build_loop(config, Ranks())


def same(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    a, b = first.state_dict(), second.state_dict()
    return all(torch.equal(a[name], b[name]) for name in a)
