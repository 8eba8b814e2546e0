"""Made-up runs: losses in, verdicts out."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import Any

from stepguard.judge import History, judge
from stepguard.records import GuardConfig, Reading, Verdict

CONFIG = GuardConfig()
SETTLED = [2.0 + 2.0 * math.exp(-i / 20) + 0.05 * math.sin(i) for i in range(100)]
"""The losses of a run that has converged."""


def reading(step: int, loss: float | None = 1.0, **more: Any) -> Reading:
    """A healthy step but for what is given."""
    micro = () if loss is None else (loss,)
    return Reading(
        **{
            "step": step,
            "loss": loss,
            "micro_losses": micro,
            "grad_norm": 1.0,
            "lr": (0.1,),
            **more,
        }
    )


def play(losses: Iterable[float], history: History | None = None) -> list[Verdict]:
    """Judge and commit one loss after the other, whatever the verdict."""
    history = History() if history is None else history
    verdicts = []
    for step, loss in enumerate(losses, start=history.committed):
        seen = reading(step, loss)
        verdicts.append(judge(seen, history, CONFIG))
        history.add(seen)
    return verdicts


def played(losses: Iterable[float]) -> History:
    history = History()
    play(losses, history)
    return history


def healthy(kind: str, seed: int, steps: int = 300) -> list[float]:
    """Losses of runs in which nothing is wrong."""
    noise = random.Random(f"{kind}{seed}")
    shapes = {
        "falling": lambda i: 1.0 + 3.0 * math.exp(-i / 50) + noise.gauss(0, 0.1),
        "noisy": lambda i: (1.0 + 3.0 * math.exp(-i / 50)) * math.exp(noise.gauss(0, 0.2)),
        "negative": lambda i: -3.0 + noise.gauss(0, 0.5),
        "falling through zero": lambda i: 5.0 - 0.05 * i + noise.gauss(0, 0.2),
        "flat": lambda i: 2.5,
        "zero": lambda i: 0.0,
        "tiny": lambda i: 1e-9 * (1 + noise.gauss(0, 0.3)),
        "huge": lambda i: 1e30 * (1 + noise.gauss(0, 0.1)),
        "near the end of float64": lambda i: 1e307 * (1 + noise.gauss(0, 0.1)),
    }
    return [shapes[kind](i) for i in range(steps)]


HEALTHY = (
    "falling",
    "noisy",
    "negative",
    "falling through zero",
    "flat",
    "zero",
    "tiny",
    "huge",
    "near the end of float64",
)


def slow_rise(seed: int, start: int = 200, steps: int = 60, slope: float = 0.03) -> list[float]:
    """A healthy run whose loss then creeps up a little every step."""
    noise = random.Random(seed)
    return [
        2.0 + 2.0 * math.exp(-i / 40) + slope * max(0, i - start) + noise.gauss(0, 0.08)
        for i in range(start + steps)
    ]
