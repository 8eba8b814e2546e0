"""Every family, in a fixed order."""

from __future__ import annotations

from importlib import import_module

from zoo.healthy.training import FAMILIES, Family

MODULES = (
    "finetuning",
    "reinforcement",
    "adversarial",
    "representation",
    "continual",
    "schedules",
    "losses",
    "sequences",
    "structure",
    "precision",
    "own_state",
    "frameworks",
    "running",
)


def load() -> dict[str, Family]:
    """All families by name."""
    for name in MODULES:
        import_module(f"zoo.healthy.{name}")
    return FAMILIES


def chosen(names: list[str] | None = None) -> list[Family]:
    """The named families; a group or a part of a name stands for all it fits. Everything when no
    name is given.
    """
    families = list(load().values())
    if not names:
        return families
    for name in names:
        if not any(_fits(name, one) for one in families):
            raise SystemExit(
                f"no family fits {name!r}; there are {', '.join(one.name for one in families)}."
            )
    return [one for one in families if any(_fits(name, one) for name in names)]


def _fits(name: str, one: Family) -> bool:
    return name == one.group or name in one.name
