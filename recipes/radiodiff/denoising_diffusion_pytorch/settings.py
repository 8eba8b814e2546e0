"""The configuration file, and what its precision settings really lead to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from omegaconf import OmegaConf

from stepguard.check.preflight import Subject, Tracked, check
from stepguard.check.settings import plain

Settings = Any
"""Nested settings with attribute access; `stepguard.check.settings.Tracked` remembers reads."""


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
    failed, facts = found.of("fail"), dict(found.facts)
    devices = torch.accelerator.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(devices)))
    aligned = found.alignment == "aligned" and not failed
    lines = [
        "=== Current Configuration ===",
        f"AMP enabled: {facts.get('AMP enabled', 'not probed')}",
        f"FP16 enabled: {facts.get('FP16 enabled', 'not probed')}",
        f"Learning rate: {facts['learning rate']}",
        "=== Accelerate Configuration ===",
        f"Mixed precision: {accelerator.mixed_precision}",
        f"Distributed type: {accelerator.distributed_type.value}",
        f"Processes: {accelerator.num_processes} on {accelerator.device.type}",
        f"GPU IDs: {visible if devices else 'none'}",
        "=== Configuration Status ===",
        "Configuration is properly aligned" if aligned else "Configuration is NOT aligned",
        *(f"   {why}" for why in found.alignment_why),
    ]
    for outcome in failed:
        lines += [f"   {outcome.id}: {'; '.join(outcome.evidence)}", f"   {outcome.fix}"]
    return "\n".join(lines), aligned


def changed_since(checkpoint: Path, config: Settings) -> str:
    """How this configuration differs from the one that the checkpoint was trained with."""
    asked = Subject(config=plain(config), checkpoint=checkpoint)
    outcome = check(asked, only=("config.changed",)).outcome("config.changed")
    return "; ".join(outcome.evidence)
