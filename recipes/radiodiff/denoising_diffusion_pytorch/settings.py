"""The configuration file, and what its precision settings really lead to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from omegaconf import OmegaConf

from stepguard.preflight import Subject, Tracked, check

Settings = Any
"""Nested settings with attribute access; reads are remembered (`stepguard.preflight.Tracked`)."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> Settings:
    """The file, with `key.sub=value` on top; a key that is not in the file is an error."""
    config = OmegaConf.load(path)
    OmegaConf.set_struct(config, True)
    changed = OmegaConf.merge(config, OmegaConf.from_dotlist(list(overrides)))
    values = OmegaConf.to_container(changed)
    assert isinstance(values, dict)
    return Tracked({str(key): value for key, value in values.items()})


def accelerator_for(config: Settings) -> Accelerator:
    """`fp16` and `bf16` name a dtype. `amp` alone does what the original did: it opens autocast
    without one.
    """
    trainer = config.trainer
    named = "fp16" if trainer.fp16 else "bf16" if trainer.bf16 else "no"
    accelerator = Accelerator(
        mixed_precision=named,
        # else several processes without a GPU do not find each other
        cpu=not torch.accelerator.is_available(),
        dataloader_config=DataLoaderConfiguration(
            split_batches=True
        ),  # else the schedule runs once for every process
    )
    if trainer.amp and named == "no":
        accelerator.native_amp = True
    return accelerator


def precision_report(trainer: Any) -> tuple[str, bool]:
    """The state of the run from its live objects, and whether a probe agrees with everything that
    was asked for.
    """
    accelerator, settings = trainer.accelerator, trainer.config.trainer
    found = check(
        Subject(
            model=trainer.model,
            optimizer=trainer.optimizer.optimizer,
            scaler=accelerator.scaler,
            autocast=accelerator,
            config={"trainer": {name: settings[name] for name in ("amp", "fp16", "bf16", "lr")}},
        ),
        only=("precision", "scaler"),
    )
    failed = found.of("fail")
    aligned = found.alignment == "aligned" and not failed
    lines = [
        "=== Current Configuration ===",
        f"AMP enabled: {settings.amp}",
        f"FP16 enabled: {settings.fp16}",
        f"Learning rate: {settings.lr:g}",
        "=== Accelerate Configuration ===",
        f"Mixed precision: {accelerator.mixed_precision}",
        f"Distributed type: {accelerator.distributed_type.value}",
        f"Processes: {accelerator.num_processes} on {accelerator.device.type}",
        "=== Configuration Status ===",
        "Configuration is properly aligned" if aligned else "Configuration is NOT aligned",
        *(f"   {why}" for why in found.alignment_why),
    ]
    for outcome in failed:
        lines += [f"   {outcome.id}: {'; '.join(outcome.evidence)}", f"   {outcome.fix}"]
    return "\n".join(lines), aligned
