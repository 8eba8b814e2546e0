"""The report's own tests of a run, as an automatic verdict: norms, losses, accuracy, answers,
warnings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What the model can do on questions it was not trained on."""

    loss: float
    accuracy: float
    answer_rate: float


def verdict(
    lines: Sequence[dict[str, Any]], true_losses: Sequence[float], scores: Scores, warnings: int
) -> tuple[list[str], bool]:
    """One sentence a test, and whether all of them are passed.

    A log line is the mean of many steps, in which a single loss of 0 does not show.
    """
    norms = [line["grad_norm"] for line in lines if "grad_norm" in line]
    losses, steps = [line["loss"] for line in lines], len(true_losses)
    finite = sum(map(math.isfinite, norms))
    positive = sum(math.isfinite(loss) and loss > 0.0 for loss in losses)
    zeros = sum(loss == 0.0 for loss in true_losses)
    falling = len(losses) < 2 or losses[-1] < losses[0]
    tests = [
        (finite == len(norms), f"gradient norms are finite in {finite} of {len(norms)} log lines"),
        (positive == len(losses), f"losses are positive in {positive} of {len(losses)} log lines"),
        (not zeros, f"the loss is 0 in {zeros} of {steps} steps"),
        (
            falling,
            f"the loss went from {losses[0]:.4g} to {losses[-1]:.4g}"
            if losses
            else "nothing was logged",
        ),
        (scores.accuracy > 0.0, f"accuracy {scores.accuracy:.3f}"),
        (scores.answer_rate > 0.0, f"answer rate {scores.answer_rate:.3f}"),
    ]
    said = [f"{'ok  ' if passed else 'FAIL'} {sentence}" for passed, sentence in tests]
    said.append(
        f"     {warnings} warnings and incidents in {steps} steps, validation loss "
        f"{scores.loss:.4f}"
    )
    return said, all(passed for passed, _ in tests)
