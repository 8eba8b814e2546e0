"""The configuration: Hydra's files and overrides, read once, and what its words may be."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from stepguard.check.settings import Tracked

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LOSS_TYPES = ("unconditional", "l2t", "t2l", "sequential", "random")
ALLOWED: dict[str, tuple[str, ...]] = {
    "data.source": ("toy", "real"),
    "data.on_unreadable": ("zero", "refuse"),
    "model.type": ("mmdit",),
    "model.diffusion_process": ("mdlm",),
    "model.latent_diffusion_process": ("continuous",),
    "model.schedule_dtype": ("model", "float32"),
    "model.latent_beta_schedule": ("cosine", "linear", "sigmoid"),
    "model.latent_parameterization": ("epsilon", "x0", "v"),
    "training.dtype": tuple(DTYPES),
    "training.precision": ("pure", "mixed"),
    "training.loop": ("bare", "original", "report", "stepguard"),
    "training.lr_schedule": ("cosine", "constant"),
    "training.backend": ("auto", "gloo", "nccl"),
    "training.resume_lr": ("config", "checkpoint"),
    "loss.loss_type": LOSS_TYPES,
    "loss.weighting": ("none", "mdlm"),
    "loss.reduction": ("token", "sequence"),
    "loss.limit": ("none", "clamp", "soft"),
    "optimizer.name": ("adamw", "adam"),
}

Settings = Any
"""Nested settings with attribute access; `stepguard.check.settings.Tracked` remembers reads."""


def load_config(name: str, overrides: Sequence[str] = (), folder: Path = CONFIGS) -> Settings:
    """`configs/NAME.yaml` with `key.sub=value` on top; a key that is not in the file is an error of
    Hydra's.
    """
    with initialize_config_dir(str(folder.resolve()), version_base="1.3"):
        composed = compose(name, overrides=list(overrides))
    values = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(values, dict)
    return checked({str(key): value for key, value in values.items()})


def checked(values: dict[str, Any]) -> Settings:
    """The settings, once every word in them is one that is known."""
    for key, allowed in ALLOWED.items():
        section, _, name = key.partition(".")
        if name not in values[section]:
            continue  # of the other configuration
        value = values[section][name]
        if value not in allowed:
            raise SystemExit(f"{key}={value!r} is not known; use one of {', '.join(allowed)}.")
    return Tracked(values)


def from_command_line(
    description: str, name: str, arguments: Sequence[str] | None = None
) -> Settings | None:
    """Hydra's own way to call: --config-name, --config-dir, --cfg job, and overrides. None: there
    is nothing to run.

    Composed without Hydra's own run folder: each rank would make another one.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--config-name", "-cn", default=name, help=f"file in configs/, by default {name}"
    )
    parser.add_argument("--config-dir", "-cd", type=Path, default=CONFIGS)
    parser.add_argument("--cfg", choices=["job"], help="print the configuration and end")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    options = parser.parse_intermixed_args(arguments)
    config = load_config(options.config_name, options.overrides, options.config_dir)
    if options.cfg:
        print(OmegaConf.to_yaml(OmegaConf.create(dict(_plain(config)))), end="")
        return None
    return config


def _plain(config: Settings) -> dict[str, Any]:
    from stepguard.check.settings import plain

    return plain(config)
