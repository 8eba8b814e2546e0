"""Finite anomalies: a jump of the loss, a slow rise, a learning rate nobody configured.

They are told, and by default that is all: hard data, a new task, a policy or a discriminator that
moved look the same from outside. A loss that runs away is an incident, which needs more than a high
loss: the last update changed the weights by a large part of their norm, or the loss has grown
manifold twice in a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from stepguard.detect.history import MATURE, History
from stepguard.records.reading import Reading
from stepguard.records.verdict import OK, Verdict

YOUNG_SIGMAS = 10.0
"""A run of a few steps has no noise estimate worth the name, so it takes more to be suspicious."""
NEWBORN, NEWBORN_SIGMAS = 3, 1000.0
"""So few losses know no noise at all, and the first updates may well leave a start that happened to
be good.
"""
DRIFT_LEAST = 32
"""Losses a rise must last before it is called a drift."""
DRIFT_SIGMAS = 4.0
RUNAWAY = 10.0
"""Times every loss remembered that a loss must be to count as running away."""
RUNAWAY_BEFORE = 5.0
"""Times every earlier loss that the loss of the step before must have been, where nothing is known
of the update.
"""
LARGE_UPDATE = 0.3
"""Of the norm of the weights: a healthy update changes them by a thousandth."""
STOOD_STILL = 0.01
"""Of the norm of the weights: an update below it cannot have made a loss run away."""
LASTING = 3
"""Suspicious steps in a row before the weights can be blamed."""
WEIGHTS_SHARE = 0.5
"""Of a rise, that must be seen on an earlier batch too, and may remain on older weights, for the
present ones to be blamed.
"""
SAME_LOSS = 0.1
"""Relative difference up to which a step still gives the loss it gave: dropout and kernels differ a
little.
"""
MOVED = 0.5
"""Of their norm: how far the weights must have moved from a good state, where no step can be run
again.
"""
ZERO_STEPS = 5


def spike(reading: Reading, history: History, sigmas: float) -> Verdict:
    """A loss far above its usual level in one step."""
    young = len(history.losses) < MATURE
    if reading.judged_loss is None or not history.losses or (young and not any(history.losses)):
        # a few losses that were all exactly 0 (a penalty that begins there) say nothing about what
        # is much
        return OK
    limit = max(sigmas, YOUNG_SIGMAS) if young else sigmas
    limit = max(limit, NEWBORN_SIGMAS) if len(history.losses) < NEWBORN else limit
    excess = (reading.judged_loss - history.level) / history.spread
    if not excess > limit:
        return OK
    summary = (
        f"loss {reading.judged_loss:.6g} is {excess:.3g} deviations above its usual "
        f"{history.level:.6g}"
    )
    evidence: dict[str, float | int | str] = {
        "loss": reading.judged_loss,
        "level": history.level,
        "deviations": excess,
    }
    why = _runs_away(reading, history) or _has_diverged(reading, history)
    if not why:
        return Verdict(kind="spike", severity="suspicion", summary=summary, evidence=evidence)
    if reading.update_ratio is not None:
        evidence["update_ratio"] = reading.update_ratio
    return Verdict(
        kind="spike", severity="incident", summary=f"{summary}; {why}", evidence=evidence
    )


def _runs_away(reading: Reading, history: History) -> str:
    """What shows that the weights and not the data did it, in words; empty where nothing does."""
    loss = reading.judged_loss
    losses = list(history.losses)
    largest = max(map(abs, losses))
    if loss is None or not largest or loss < RUNAWAY * largest:
        return ""
    ratio = reading.update_ratio
    if ratio is not None and ratio >= LARGE_UPDATE:
        return f"the last update changed the weights by {ratio:.3g} of their norm"
    if ratio is not None and ratio < STOOD_STILL:
        return ""
    earlier = max(map(abs, losses[:-1]), default=0.0)
    if earlier and losses[-1] >= RUNAWAY_BEFORE * earlier:
        return f"the loss before was already {losses[-1] / earlier:.3g} times every earlier one"
    return ""


def drift(reading: Reading, history: History) -> Verdict:
    """A slow steady rise, which rules on single steps never see."""
    values = (
        [*history.losses, reading.judged_loss]
        if reading.judged_loss is not None
        else list(history.losses)
    )
    if len(values) < DRIFT_LEAST or history.surrogate:
        return OK  # the divergence from a reference begins at 0 and can only rise
    rise, noise = trend(values)
    if not rise > DRIFT_SIGMAS * max(noise, 0.01 * abs(values[0])):
        return OK
    summary = (
        f"loss has risen by {rise:.4g} over {len(values)} steps ({rise / len(values):+.3g} a step)"
    )
    evidence: dict[str, float | int | str] = {"rise": rise, "steps": len(values), "noise": noise}
    why = _has_diverged(reading, history)
    if why:
        return Verdict(
            kind="drift", severity="incident", summary=f"{summary}; {why}", evidence=evidence
        )
    return Verdict(kind="drift", severity="suspicion", summary=summary, evidence=evidence)


def worth_measuring(reading: Reading, history: History) -> bool:
    """Is the loss so high that the weights are looked at? That reads every parameter, so not for
    every spike.
    """
    loss = reading.judged_loss
    if loss is None or not history.losses:
        return False
    return loss >= RUNAWAY * max(map(abs, history.losses)) or history.level > history.far_limit


def _has_diverged(reading: Reading, history: History) -> str:
    """A level far above the start, on weights that have left where they were; empty where that is
    not shown.
    """
    if not history.level > history.far_limit:
        return ""
    moved, ratio = reading.weights_moved, reading.update_ratio
    if moved is not None and not moved < MOVED:
        return (
            f"the run began at {history.began_at:.6g}, and its weights have moved by "
            f"{moved:.3g} of their norm"
        )
    if ratio is not None and ratio >= LARGE_UPDATE:
        return (
            f"the run began at {history.began_at:.6g}, and the last update was {ratio:.3g} of "
            f"the weights' norm"
        )
    return ""


def trend(values: list[float]) -> tuple[float, float]:
    """Rise over the window by least squares, and the standard deviation of what the line leaves
    over.
    """
    unit = max(map(abs, values)) or 1.0  # squares of float64 losses beyond 1e154 would overflow
    n, ys = len(values), [value / unit for value in values]
    mean_x, mean_y = (n - 1) / 2, sum(ys) / n
    slope = sum((i - mean_x) * (y - mean_y) for i, y in enumerate(ys)) / sum(
        (i - mean_x) ** 2 for i in range(n)
    )
    left = sum((y - mean_y - slope * (i - mean_x)) ** 2 for i, y in enumerate(ys))
    return slope * (n - 1) * unit, math.sqrt(left / n) * unit


def impossible_lr(reading: Reading) -> Verdict:
    """A learning rate that is NaN or infinite: the update would ruin every weight."""
    for group, rate in enumerate(reading.lr):
        if not math.isfinite(rate):
            summary = (
                f"group {group} runs with lr {rate}: the update would make every weight non-finite"
            )
            evidence: dict[str, float | int | str] = {"group": group, "lr": rate}
            return Verdict(
                kind="lr_mismatch", severity="incident", summary=summary, evidence=evidence
            )
    return OK


def lr_mismatch(reading: Reading, history: History) -> Verdict:
    """A learning rate at least twice as high as anything configured or seen before."""
    group = history.excess_lr(reading.lr)
    if group is None:
        return OK
    rate, ceiling = reading.lr[group], history.ceiling(group)
    summary = (
        f"group {group} runs with lr {rate:.4g}; the highest configured or seen before is "
        f"{ceiling:.4g}"
    )
    evidence: dict[str, float | int | str] = {"group": group, "lr": rate, "ceiling": ceiling}
    return Verdict(kind="lr_mismatch", severity="note", summary=summary, evidence=evidence)


def nothing_learned(reading: Reading, history: History) -> Verdict:
    """No target in the batch, or a loss and gradient that stay exactly 0."""
    if reading.labels == 0:
        return Verdict(
            kind="no_labels",
            severity="note",
            summary="no target of this step counts: nothing is learned",
        )
    silent = reading.judged_loss == 0.0 and not reading.grad_norm
    if silent and history.zero_losses + 1 == ZERO_STEPS:
        summary = (
            f"loss and gradient have been exactly 0 for {ZERO_STEPS} steps: nothing is learned"
        )
        return Verdict(kind="zero_loss", severity="note", summary=summary)
    return OK


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """What was measured about a suspicious step, with `anomalies="act"` only; None where it could
    not be.
    """

    lasting: int
    """Suspicious steps in a row, this one included: as many different batches."""
    earlier_then: float | None = None
    """The loss of an earlier healthy batch when it was new."""
    earlier_now: float | None = None
    """The same batch on the present weights."""
    own_then: float | None = None
    """The loss of a step that began from a snapshot, when it ran."""
    own_now: float | None = None
    """The same step on the same weights, evaluated now: another number means that the loss function
    changed.
    """
    older_loss: float | None = None
    """This very batch on the weights of a good snapshot."""
    older_step: int | None = None
    moved: float | None = None
    """Distance of the present weights from those of a good snapshot, over their norm."""


def weights_did_it(verdict: Verdict, reading: Reading, history: History, signs: Signs) -> Verdict:
    """An incident, if independent signs agree that the weights and neither the data nor the loss
    function did it.
    """
    why_not = _first_doubt(verdict, reading, history, signs)
    if why_not:
        return replace(verdict, severity="note", summary=f"{verdict.summary}; {why_not}")
    measured = {
        "repeat_loss": signs.earlier_now,
        "older_loss": signs.older_loss,
        "older_step": signs.older_step,
        "moved": signs.moved,
    }
    evidence = {
        **(verdict.evidence or {}),
        **{name: value for name, value in measured.items() if value is not None},
    }
    summary = f"{verdict.summary}; {_blame(signs)}"
    return replace(verdict, severity="incident", summary=summary, evidence=evidence)


def _first_doubt(verdict: Verdict, reading: Reading, history: History, signs: Signs) -> str:
    """The first thing that speaks against blaming the weights; empty when all signs agree."""
    loss = reading.judged_loss
    if loss is None or history.best is None:
        return "there is no loss to judge by"
    if not verdict.bad and not loss > history.ruin_limit:
        return "what the run has learned is not lost"
    if not verdict.bad and signs.lasting < LASTING:
        return f"it has lasted {signs.lasting} of {LASTING} steps"
    if signs.earlier_now is None or signs.earlier_then is None:
        return _doubt_from_outside(signs)
    rise = loss - history.best
    if not _rose_too(signs.earlier_then, signs.earlier_now, rise, history):
        return (
            f"an earlier batch gives {signs.earlier_now:.6g} and gave {signs.earlier_then:.6g}: "
            f"not the weights"
        )
    if signs.own_then is None or signs.own_now is None:
        return "no earlier step can be run again on the weights it had"
    if not math.isclose(signs.own_then, signs.own_now, rel_tol=SAME_LOSS, abs_tol=SAME_LOSS * rise):
        return (
            f"an earlier step, on the weights it had, gives {signs.own_now:.6g} and gave "
            f"{signs.own_then:.6g}: "
            "the loss function changed"
        )
    if signs.older_loss is None or not signs.older_loss - history.best <= WEIGHTS_SHARE * rise:
        return "this batch is as hard for earlier weights"
    return ""


def _rose_too(then: float, now: float, rise: float, history: History) -> bool:
    """Has an earlier batch lost as much, or manifold what it gave?"""
    if not math.isfinite(now):
        return True
    enough = min(WEIGHTS_SHARE * rise, RUNAWAY * max(abs(then), history.best_noise))
    return now - then >= enough


def _doubt_from_outside(signs: Signs) -> str:
    """Where no step can be run again: only weights that are far from where they were good can be
    blamed.
    """
    if signs.moved is None:
        return "nothing is known of earlier weights"
    if math.isfinite(signs.moved) and signs.moved < MOVED:
        return f"the weights have moved by {signs.moved:.3g} of their norm since they were good"
    return ""


def _blame(signs: Signs) -> str:
    if signs.earlier_now is not None and signs.older_loss is not None:
        return (
            f"an earlier batch gives {signs.earlier_now:.6g} and gave {signs.earlier_then:.6g}, "
            f"and on the weights of "
            f"step {signs.older_step} this batch gives {signs.older_loss:.6g}: the weights are hurt"
        )
    return f"the weights have moved by {signs.moved:.3g} of their norm since they were good"
