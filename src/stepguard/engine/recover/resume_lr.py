"""The learning rate of a restored state against the one this program configures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from stepguard.engine.drivers.schedule import members, put_setting
from stepguard.state.tree_json import put_together

RATES = ("lr", "initial_lr", "max_lr", "min_lr")


@dataclass(frozen=True, slots=True)
class RateDifference:
    """For each group, what is configured now and what the restored state brings."""

    configured: tuple[float, ...]
    restored: tuple[float, ...]

    @property
    def factors(self) -> list[float]:
        """What the restored rates have to be multiplied by."""
        return [c / r if r else 1.0 for c, r in zip(self.configured, self.restored, strict=True)]

    def story(self, *, applied: bool) -> str:
        pairs = zip(self.configured, self.restored, strict=True)
        said = [
            f"group {g} is configured with lr {c:.4g} and the checkpoint brings {r:.4g}"
            for g, (c, r) in _odd(pairs)
        ]
        done = (
            "the configured one is applied, at the same place of the schedule "
            "(GuardConfig.resume_lr='config')"
            if applied
            else "the checkpoint's is used; GuardConfig(resume_lr='config') applies the configured "
            "one"
        )
        return f"{'; '.join(said)}: {done}; see `stepguard explain SG802`"


def compare_rates(
    optimizer: Optimizer, saved: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor]
) -> RateDifference | None:
    """Asked before the state is put back. Where a schedule runs, its starting rates are compared."""
    settings = [put_together(group["settings"], tensors) for group in saved]
    if len(settings) != len(optimizer.param_groups):
        return None
    pairs = [
        (_base(live), _base(kept))
        for live, kept in zip(optimizer.param_groups, settings, strict=True)
    ]
    found = RateDifference(tuple(c for c, _ in pairs), tuple(r for _, r in pairs))
    return found if list(_odd(pairs)) else None


def scale_rates(optimizer: Optimizer, scheduler: Any, factors: Sequence[float]) -> None:
    """Multiply each group's learning rates, and what schedulers derive theirs from."""
    for group, factor in zip(optimizer.param_groups, factors, strict=True):
        for key in RATES:
            if isinstance(group.get(key), int | float | Tensor):
                put_setting(group, key, group[key] * factor)
    for member in members(scheduler):
        if hasattr(member, "base_lrs"):
            member.base_lrs = [
                lr * factor for lr, factor in zip(member.base_lrs, factors, strict=False)
            ]


def _base(group: Mapping[str, Any]) -> float:
    """0 for an optimizer that finds its own step size."""
    rate = group.get("initial_lr", group.get("lr"))
    return float(rate) if rate is not None else 0.0


def _odd(pairs: Any) -> list[tuple[int, tuple[float, float]]]:
    return [(g, (c, r)) for g, (c, r) in enumerate(pairs) if not math.isclose(c, r, rel_tol=1e-6)]
