"""`stepguard.verify`: is this checkpoint whole, finite and what it says it is? Nothing in it is
ever executed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from stepguard._errors import ConfigError
from stepguard.records.verification import Problem, Rate, Verification
from stepguard.verification.check import Plan, check

CLOSE = 1e-6
"""Relative difference below which two learning rates are the same number written in two ways."""


def verify(
    path: str | Path,
    *,
    lr: float | None = None,
    plan: Plan | None = None,
    progress: Callable[[int], None] | None = None,
) -> Verification:
    """Verify a checkpoint file, a checkpoint folder, or everything below a folder.

    Reads `.pt` `.pth` `.bin` `.ckpt` (both formats of torch.save, plain pickles), safetensors,
    sharded and transformers folders, DCP folders and sealed checkpoints. What is wrong is in
    `.problems`. A path that does not exist, or that holds nothing that is a checkpoint, raises
    ConfigError: nothing was verified, so nothing is good. With `lr`, a checkpoint whose base
    learning rate is another one has a problem of kind `lr`.
    """
    found = verify_or_empty(path, lr=lr, plan=plan, progress=progress)
    if not found.leaves and not found.problems:
        raise ConfigError(nothing_in(path))
    return found


def verify_or_empty(
    path: str | Path,
    *,
    lr: float | None = None,
    plan: Plan | None = None,
    progress: Callable[[int], None] | None = None,
) -> Verification:
    """The same, for those who want to tell about several paths before they complain about an empty
    one.
    """
    where = Path(path)
    if not where.exists() and not where.is_symlink():
        raise ConfigError(
            f"{where} does not exist; give a checkpoint file, a checkpoint folder or a run "
            f"directory."
        )
    if lr is not None and not (math.isfinite(lr) and lr > 0):
        raise ConfigError(f"lr={lr!r} is no learning rate; give a positive number.")
    found = check(where, plan=plan, progress=progress)
    return found if lr is None else with_lr(found, lr)


def nothing_in(where: str | Path) -> str:
    """For a folder without a checkpoint."""
    return f"nothing to verify in {where}: it holds no checkpoint; give the folder or file of one."


def with_lr(found: Verification, lr: float) -> Verification:
    """The same, with a problem wherever the stored base learning rate is another than `lr`."""
    if found.parts:
        parts = tuple(with_lr(part, lr) for part in found.parts)
        new = tuple(p for part in parts for p in part.problems if p.kind == "lr")
        return replace(found, parts=parts, problems=(*found.problems, *new))
    return replace(found, problems=(*found.problems, *_contradictions(found, lr)))


def _contradictions(found: Verification, lr: float) -> list[Problem]:
    base = base_rates(found.rates)
    if not base or any(math.isclose(rate.value, lr, rel_tol=CLOSE) for rate in base):
        return []
    rate = base[0]
    running = next((r.value for r in found.rates if r.kind in ("lr", "last_lr")), None)
    now = (
        f", running at {running:.4g} when it was saved"
        if running is not None and rate.kind != "lr"
        else ""
    )
    means = {
        "max_lr": "the peak of OneCycleLR (max_lr)",
        "initial_lr": "the base of its schedule (initial_lr)",
        "base_lr": "the base of its schedule (base_lrs)",
    }
    what = means.get(rate.kind, "the learning rate (lr) at the moment it was saved")
    detail = (
        f"{what} is {rate.value:.4g}{now}; you gave {lr:.4g}. Loading this optimizer or scheduler "
        f"state overrides what "
        "the configuration says"
    )
    return [Problem(file=rate.file, kind="lr", tensor=rate.name, detail=detail, role="optimizer")]


def base_rates(rates: tuple[Rate, ...]) -> list[Rate]:
    """The rates a configuration speaks of: OneCycleLR's peak, else the base of the schedule, else
    the rate itself.
    """
    for kind in ("max_lr", "initial_lr", "base_lr", "lr", "last_lr"):
        chosen = [rate for rate in rates if rate.kind == kind]
        if chosen:
            return chosen
    return []
