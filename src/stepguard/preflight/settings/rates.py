"""The learning rates that a configuration names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepguard._errors import ConfigError
from stepguard.preflight.settings.keys import NAMES, Setting, as_number, flat, last_part
from stepguard.preflight.settings.settings_file import read_settings

RATE_NAMES = (*NAMES["lr"], "init_lr")


def rate_settings(settings: Mapping[str, Any]) -> list[Setting]:
    """Every setting that is called a learning rate, whatever its value is."""
    return [leaf for leaf in flat(settings) if last_part(leaf.key) in RATE_NAMES]


def configured_rate(path: Path) -> float:
    """The one learning rate of a configuration file; several different ones are refused by name."""
    rates = {}
    for leaf in rate_settings(read_settings(path)):
        rate = as_number(leaf.value)
        if rate is not None:
            rates[leaf.key] = rate
    if not rates:
        raise ConfigError(
            f"--config {path} names no learning rate ({', '.join(RATE_NAMES)}); give --lr."
        )
    if len(set(rates.values())) > 1:
        listed = ", ".join(f"{name}={rate:g}" for name, rate in rates.items())
        raise ConfigError(
            f"--config {path} names several learning rates ({listed}); give the one that counts by "
            "--lr."
        )
    return next(iter(rates.values()))
