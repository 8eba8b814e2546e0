"""Every planted mistake, by code."""

from __future__ import annotations

from zoo.silent import (
    wrong_data,
    wrong_evaluations,
    wrong_labels,
    wrong_loaders,
    wrong_losses,
    wrong_machines,
    wrong_metrics,
    wrong_models,
    wrong_rewards,
    wrong_routers,
    wrong_splits,
    wrong_starts,
    wrong_updates,
)
from zoo.silent.plant import PLANTS, Plant

MODULES = (
    wrong_data,
    wrong_evaluations,
    wrong_labels,
    wrong_loaders,
    wrong_losses,
    wrong_machines,
    wrong_metrics,
    wrong_models,
    wrong_rewards,
    wrong_routers,
    wrong_splits,
    wrong_starts,
    wrong_updates,
)


def chosen(names: list[str] | None = None) -> list[Plant]:
    """Those with this code, training or name; all where nothing is asked for."""
    plants = sorted(PLANTS, key=lambda one: one.code)
    if not names:
        return plants
    found = []
    for one in plants:
        if any(name in (one.code, one.training, one.name) for name in names):
            found.append(one)
    if not found:
        raise SystemExit(f"no planted mistake fits {names}; there are {sorted(_known(plants))}.")
    return found


def _known(plants: list[Plant]) -> set[str]:
    return {one.code for one in plants} | {one.name for one in plants}
