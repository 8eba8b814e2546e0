"""Decide whether the weights caused a finite anomaly, and not the data or the loss function."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from stepguard.detect.anomalies import RUNAWAY
from stepguard.detect.history import MOVED, History
from stepguard.records.reading import Reading
from stepguard.records.verdict import Verdict

LASTING = 3
"""Suspicious steps in a row before the weights can be blamed."""
WEIGHTS_SHARE = 0.5
"""Of a rise: what an earlier batch must show too, and what may remain on older weights."""
SAME_LOSS = 0.1
"""Relative difference of two losses of one step: dropout and kernels differ a little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """What was measured about a suspicious step (`anomalies="act"` only); None where unknown."""

    lasting: int
    """Suspicious steps in a row, this one included: as many different batches."""
    earlier_then: float | None = None
    """The loss of an earlier healthy batch when it was new."""
    earlier_now: float | None = None
    """The same batch on the present weights."""
    own_then: float | None = None
    """The loss of a step that began from a snapshot, when it ran."""
    own_now: float | None = None
    """The same step on the same weights now: if it differs, the loss function changed."""
    older_loss: float | None = None
    """This very batch on the weights of a good snapshot."""
    older_step: int | None = None
    moved: float | None = None
    """Distance of the present weights from those of a good snapshot, over their norm."""


def blame_weights(verdict: Verdict, reading: Reading, history: History, signs: Signs) -> Verdict:
    """Make it an incident if independent signs agree that the weights caused it, else a note."""
    doubt = _first_doubt(verdict, reading, history, signs)
    if doubt:
        return replace(verdict, severity="note", summary=f"{verdict.summary}; {doubt}")
    measured = {
        "repeat_loss": signs.earlier_now,
        "older_loss": signs.older_loss,
        "older_step": signs.older_step,
        "moved": signs.moved,
    }
    evidence = dict(verdict.evidence or {})
    for name, value in measured.items():
        if value is not None:
            evidence[name] = value
    summary = f"{verdict.summary}; {_blame(signs)}"
    return replace(verdict, severity="incident", summary=summary, evidence=evidence)


def _first_doubt(verdict: Verdict, reading: Reading, history: History, signs: Signs) -> str:
    """The first thing that speaks against blaming the weights; empty when all signs agree."""
    loss = reading.judged_loss
    if loss is None or history.best is None:
        return "there is no loss to judge by"
    if not verdict.bad:
        if not loss > history.progress.lost_limit:
            return "what the run has learned is not lost"
        if signs.lasting < LASTING:
            return f"it has lasted {signs.lasting} of {LASTING} steps"
    if signs.earlier_now is None or signs.earlier_then is None:
        return _doubt_by_distance(signs)
    return _doubt_by_losses(signs, signs.earlier_then, signs.earlier_now, loss, history)


def _doubt_by_distance(signs: Signs) -> str:
    """Where no step can be run again, only weights far from where they were good can be blamed."""
    if signs.moved is None:
        return "nothing is known of earlier weights"
    if math.isfinite(signs.moved) and signs.moved < MOVED:
        return f"the weights have moved by {signs.moved:.3g} of their norm since they were good"
    return ""


def _doubt_by_losses(
    signs: Signs, earlier_then: float, earlier_now: float, loss: float, history: History
) -> str:
    """Compare what earlier steps give, on the present weights and on those they had."""
    assert history.best is not None
    rise = loss - history.best
    if not _rose_too(earlier_then, earlier_now, rise, history):
        return (
            f"an earlier batch gives {earlier_now:.6g} and gave {earlier_then:.6g}: not the weights"
        )
    if signs.own_then is None or signs.own_now is None:
        return "no earlier step can be run again on the weights it had"
    if not math.isclose(signs.own_then, signs.own_now, rel_tol=SAME_LOSS, abs_tol=SAME_LOSS * rise):
        return (
            f"an earlier step, on the weights it had, gives {signs.own_now:.6g} and gave "
            f"{signs.own_then:.6g}: the loss function changed"
        )
    if signs.older_loss is None or not signs.older_loss - history.best <= WEIGHTS_SHARE * rise:
        return "this batch is as hard for earlier weights"
    return ""


def _rose_too(then: float, now: float, rise: float, history: History) -> bool:
    """Has the loss of an earlier batch risen as much, or to many times what it was?"""
    if not math.isfinite(now):
        return True
    enough = min(WEIGHTS_SHARE * rise, RUNAWAY * max(abs(then), history.best_noise))
    return now - then >= enough


def _blame(signs: Signs) -> str:
    if signs.earlier_now is not None and signs.older_loss is not None:
        return (
            f"an earlier batch gives {signs.earlier_now:.6g} and gave {signs.earlier_then:.6g}, "
            f"and on the weights of step {signs.older_step} this batch gives "
            f"{signs.older_loss:.6g}: the weights are hurt"
        )
    return f"the weights have moved by {signs.moved:.3g} of their norm since they were good"
