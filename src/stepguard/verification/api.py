"""`stepguard.verify`: is a checkpoint complete, finite and unaltered? Nothing in it is executed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from stepguard._errors import ConfigError
from stepguard.records.verification import Problem, Rate, Verification
from stepguard.verification.path_check import Plan, check_path

CLOSE = 1e-6
"""Relative difference below which two learning rates are the same number written in two ways."""
RATE_ORDER = ("max_lr", "initial_lr", "base_lr", "lr", "last_lr")
"""Which stored rate a configuration means: OneCycleLR's peak, else the schedule's base, else lr."""
RATE_MEANINGS = {
    "max_lr": "the peak of OneCycleLR (max_lr)",
    "initial_lr": "the base of its schedule (initial_lr)",
    "base_lr": "the base of its schedule (base_lrs)",
    "lr": "the learning rate (lr) at the moment it was saved",
    "last_lr": "the learning rate (lr) at the moment it was saved",
}


def verify(
    path: str | Path,
    *,
    lr: float | None = None,
    plan: Plan | None = None,
    progress: Callable[[int], None] | None = None,
) -> Verification:
    """Verify a checkpoint file, a checkpoint folder, or everything below a folder.

        assert stepguard.verify("runs/a/checkpoints").ok

    Reads `.pt` `.pth` `.bin` `.ckpt` (both formats of torch.save, plain pickles), safetensors,
    sharded and transformers folders, DCP folders and sealed checkpoints. What is wrong is in
    `.problems`. A path that does not exist, or that holds no checkpoint, raises ConfigError:
    nothing was verified, so nothing is good. With `lr`, a checkpoint with another base learning
    rate has a problem of kind `lr`.
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
    """Verify as `verify` does, but return an empty result for a folder without a checkpoint."""
    where = Path(path)
    if not where.exists() and not where.is_symlink():
        raise ConfigError(
            f"{where} does not exist; give a checkpoint file, a checkpoint folder or a run "
            f"directory."
        )
    if lr is not None and not (math.isfinite(lr) and lr > 0):
        raise ConfigError(f"lr={lr!r} is not a learning rate; give a positive number.")
    found = check_path(where, plan=plan, progress=progress)
    if lr is None:
        return found
    return with_lr(found, lr)


def nothing_in(where: str | Path) -> str:
    """Return the message for a folder without a checkpoint."""
    return f"nothing to verify in {where}: it holds no checkpoint; give the folder or file of one."


def with_lr(found: Verification, lr: float) -> Verification:
    """Add a problem wherever the stored base learning rate is not `lr`."""
    if not found.parts:
        problem = _contradiction(found, lr)
        if problem is None:
            return found
        return replace(found, problems=(*found.problems, problem))
    parts = tuple(with_lr(part, lr) for part in found.parts)
    problems = list(found.problems)
    for part in parts:
        problems.extend(problem for problem in part.problems if problem.kind == "lr")
    return replace(found, parts=parts, problems=tuple(problems))


def base_rates(rates: tuple[Rate, ...]) -> list[Rate]:
    """Return the rates that a configuration speaks of."""
    for kind in RATE_ORDER:
        chosen = [rate for rate in rates if rate.kind == kind]
        if chosen:
            return chosen
    return []


def _contradiction(found: Verification, lr: float) -> Problem | None:
    base = base_rates(found.rates)
    if not base or any(math.isclose(rate.value, lr, rel_tol=CLOSE) for rate in base):
        return None
    rate = base[0]
    detail = (
        f"{RATE_MEANINGS[rate.kind]} is {rate.value:.4g}{_when_saved(rate, found.rates)}; you gave "
        f"{lr:.4g}. Loading this optimizer or scheduler state overrides what the configuration says"
    )
    return Problem(file=rate.file, kind="lr", tensor=rate.name, detail=detail, role="optimizer")


def _when_saved(base: Rate, rates: tuple[Rate, ...]) -> str:
    """Say at which rate the run was, where that is not the base rate itself."""
    if base.kind == "lr":
        return ""
    for rate in rates:
        if rate.kind in ("lr", "last_lr"):
            return f", running at {rate.value:.4g} when it was saved"
    return ""
