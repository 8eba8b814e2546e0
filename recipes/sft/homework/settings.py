"""The configuration file, the Trainer's arguments, and what a run was started with."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from transformers import TrainingArguments

from stepguard.check.settings import Tracked, plain
from stepguard.integrations.transformers import half_precision

Settings = Any
"""Nested settings with attribute access; `stepguard.check.settings.Tracked` remembers reads."""

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "train.yaml"
PACKAGES = ("torch", "transformers", "accelerate", "peft", "stepguard")
MODES = ("stable", "callback", "seedfix", "original")


def load_config(path: Path, overrides: Sequence[str] = ()) -> Settings:
    """The file, with `key.sub=value` on top; a key that is not in the file is an error."""
    config = OmegaConf.load(path)
    OmegaConf.set_struct(config, True)
    values = OmegaConf.to_container(
        OmegaConf.merge(config, OmegaConf.from_dotlist(list(overrides)))
    )
    assert isinstance(values, dict)
    _one_of("guard.mode", values["guard"]["mode"], MODES)
    _one_of("guard.preflight", values["guard"]["preflight"], ("stop", "warn"))
    _one_of("guard.remedy", values["guard"]["remedy"], ("float32", "stop"))
    return Tracked({str(key): value for key, value in values.items()})


def _one_of(key: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise SystemExit(f"{key}={value!r} is not known; use {', '.join(allowed)}.")


def arguments(config: Settings, *, bar: bool) -> TrainingArguments:
    """Every key of `args`; `bf16: auto` takes what this machine is good at."""
    given = {key: config.args[key] for key in config.args}
    if given["bf16"] == "auto":
        del given["bf16"]
        given.update(half_precision())
    given["save_strategy"] = given["save_strategy"] or "no"  # YAML reads no as False
    accelerated = torch.accelerator.is_available()
    given["use_cpu"] = not accelerated  # transformers refuses bf16 on a CPU without it
    return TrainingArguments(**given, disable_tqdm=not bar, dataloader_pin_memory=accelerated)


def record(config: Settings, folder: Path) -> Path:
    """Settings, seeds and versions of this run as `run.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.json"
    versions = {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
    facts = {"settings": plain(config), "versions": versions}
    path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return path
