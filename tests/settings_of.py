"""Settings of a guard by one flat name each, so that a test can change any of them by keyword."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stepguard.records import GuardConfig, Snapshots

GROUPS = {
    "snapshot_every": ("snapshots", "every"),
    "snapshots": ("snapshots", "count"),
    "snapshot_memory": ("snapshots", "memory"),
    "probation": ("snapshots", "probation"),
    "look_every": ("probes", "look_every"),
    "locate_budget": ("probes", "locate_budget"),
    "spike_sigmas": ("probes", "spike_sigmas"),
    "anomalies": ("probes", "anomalies"),
    "outliers": ("probes", "outliers"),
    "audit_every": ("probes", "audit_every"),
    "agree_timeout": ("ranks", "timeout"),
    "compare_ranks_every": ("ranks", "compare_every"),
}


def changed(config: GuardConfig, **settings: Any) -> GuardConfig:
    """The same settings with some of them changed; `locate=False` is a budget of 0."""
    if "locate" in settings:
        settings["locate_budget"] = 6.0 if settings.pop("locate") else 0
    for name, value in settings.items():
        if name in GROUPS and not isinstance(value, Snapshots):
            group, field = GROUPS[name]
            config = replace(config, **{group: replace(getattr(config, group), **{field: value})})
        else:
            config = replace(config, **{name: value})
    return config


def config_of(**settings: Any) -> GuardConfig:
    """The default settings with some of them changed."""
    return changed(GuardConfig(), **settings)
