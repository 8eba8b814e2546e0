"""Plain numbers about the run for the diagnosing rules, which see no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepguard.diagnose import RunFacts
from stepguard.engine.context import Context
from stepguard.engine.incident.update_facts import lost_squares, update_ratio
from stepguard.records import Reading
from stepguard.tensors.dtypes import dtype_name


def run_facts(context: Context, reading: Reading) -> RunFacts:
    """What the rules may know beyond the incident itself."""
    history, optimizer = context.history, context.optimizer
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    eps, betas = group.get("eps"), group.get("betas")
    return RunFacts(
        lr_history=(*history.rates, reading.lr),
        configured_lr=history.configured_lr,
        first_lr=history.first_lr,
        initial_lr=tuple(_initial(group) for group in optimizer.param_groups),
        update_ratio=update_ratio(optimizer, history.rates[-1]) if history.rates else None,
        lost_squares=lost_squares(optimizer),
        losses=tuple(history.losses),
        grad_norms=tuple(history.norms),
        param_dtypes=tuple(sorted({dtype_name(p.dtype) for p in context.parameters})),
        optimizer=type(optimizer).__name__,
        eps=float(eps) if isinstance(eps, int | float) else None,
        betas=tuple(float(b) for b in betas) if isinstance(betas, tuple | list) else (),
        clip_norm=context.config.clip_norm,
        scaling="dynamic"
        if context.scaling()
        else ("static" if context.loss_scale != 1.0 else "none"),
        world_size=context.agreement.size,
        committed=history.committed,
        resumed=context.resumed,
        outlier=_outlier(context),
    )


def _outlier(context: Context) -> tuple[int, str, float] | None:
    seen = context.outliers.committed_one if context.outliers is not None else None
    return (seen.step, seen.name, seen.norm / seen.usual) if seen is not None else None


def _initial(group: Mapping[str, Any]) -> float | None:
    """The highest rate that the group's schedule declares; None where there is no schedule."""
    declared = [group.get(key) for key in ("initial_lr", "max_lr")]
    known = [float(rate) for rate in declared if isinstance(rate, int | float)]
    return max(known, default=None)
