"""Judge finite anomalies: a jump of the loss, a slow rise, a learning rate that was not configured.

They are told, and by default that is all: hard data, a new task, a policy or a discriminator that
moved look the same from outside. A loss that runs away is an incident, which needs more than a high
loss: the last update changed the weights by a large part of their norm, or the loss has grown many
times twice in a row.
"""

from __future__ import annotations

import math

from stepguard.detect.history import MATURE, ZERO_STEPS, History, Weights
from stepguard.records.reading import Reading
from stepguard.records.verdict import OK, Verdict, VerdictKind

YOUNG_SIGMAS = 10.0
"""A run of a few steps has no noise estimate worth the name, so it takes more to be suspicious."""
NEWBORN = 3
"""Losses below which nothing is known of the noise."""
NEWBORN_SIGMAS = 1000.0
"""For so few losses: the first updates may well leave a start that happened to be good."""
DRIFT_LEAST = 32
"""Losses a rise must last before it is called a drift."""
DRIFT_SIGMAS = 4.0
RUNAWAY = 10.0
"""Times every loss remembered that a loss must be to count as running away."""
RUNAWAY_BEFORE = 5.0
"""Times every loss before it that the last loss must be, where the update is not known."""
LARGE_UPDATE = 0.3
"""Of the norm of the weights: a healthy update changes them by a thousandth."""
STOOD_STILL = 0.01
"""Of the norm of the weights: an update below it cannot have made a loss run away."""
HEAVY_TAIL = 4.0
"""Times what one loss in twenty exceeds: a heavy-tailed loss does not stand out by its tail."""


def spike(reading: Reading, history: History, sigmas: float) -> Verdict:
    """Judge a loss far above its usual level in one step."""
    loss = reading.judged_loss
    if loss is None or not _knows_a_level(history):
        return OK
    excess = (loss - history.level) / history.spread
    if not excess > _spike_limit(len(history.losses), sigmas):
        return OK
    why = _runs_away(reading, history) or _has_diverged(reading, history)
    if not why and len(history.losses) >= MATURE and excess < HEAVY_TAIL * history.tail:
        return OK
    usual = f"its usual {history.level:.6g}"
    summary = f"loss {loss:.6g} is {excess:.3g} deviations above {usual}"
    evidence: dict[str, float | int | str] = {
        "loss": loss,
        "level": history.level,
        "deviations": excess,
    }
    if why and reading.update_ratio is not None:
        evidence["update_ratio"] = reading.update_ratio
    return _told("spike", summary, why, evidence)


def _knows_a_level(history: History) -> bool:
    """A few losses that were all exactly 0 (a penalty that begins there) show no usual level."""
    if len(history.losses) < MATURE:
        return any(history.losses)
    return True


def _spike_limit(known: int, sigmas: float) -> float:
    """Deviations that make a spike, after so many losses."""
    if known < NEWBORN:
        return max(sigmas, NEWBORN_SIGMAS)
    if known < MATURE:
        return max(sigmas, YOUNG_SIGMAS)
    return sigmas


def _told(
    kind: VerdictKind, summary: str, why: str, evidence: dict[str, float | int | str]
) -> Verdict:
    """An incident where `why` shows that the weights caused it, else a suspicion."""
    if not why:
        return Verdict(kind=kind, severity="suspicion", summary=summary, evidence=evidence)
    return Verdict(kind=kind, severity="incident", summary=f"{summary}; {why}", evidence=evidence)


def _runs_away(reading: Reading, history: History) -> str:
    """What shows that the weights caused it and not the data, in words; empty if nothing."""
    loss = reading.judged_loss
    losses = list(history.losses)
    largest = max(map(abs, losses))
    if loss is None or not largest or loss < RUNAWAY * largest:
        return ""
    # a batch can be hard, but it does not move the weights
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
    """Judge a slow steady rise, which tests of single steps never see."""
    if history.surrogate:
        # the divergence from a reference begins at 0 and can only rise
        return OK
    values = list(history.losses)
    if reading.judged_loss is not None:
        values.append(reading.judged_loss)
    if len(values) < DRIFT_LEAST:
        return OK
    rise, noise = trend(values)
    if not rise > DRIFT_SIGMAS * max(noise, 0.01 * abs(values[0])):
        return OK
    count = len(values)
    summary = f"loss has risen by {rise:.4g} over {count} steps ({rise / count:+.3g} a step)"
    evidence: dict[str, float | int | str] = {"rise": rise, "steps": count, "noise": noise}
    return _told("drift", summary, _has_diverged(reading, history), evidence)


def worth_measuring(reading: Reading, history: History) -> bool:
    """Is the loss so high that the weights are measured? That reads every parameter."""
    loss = reading.judged_loss
    if loss is None or not history.losses:
        return False
    return loss >= RUNAWAY * max(map(abs, history.losses)) or _is_far(history)


def _is_far(history: History) -> bool:
    return bool(history.losses) and history.level > history.progress.far_limit


def _has_diverged(reading: Reading, history: History) -> str:
    """Why the weights caused a level far above the start; empty where that is not shown."""
    weights = Weights(moved=reading.weights_moved, update=reading.update_ratio)
    shown = history.divergence(weights) if weights.known and _is_far(history) else ""
    return f"the run began at {history.began_at:.6g}, and {shown}" if shown else ""


def trend(values: list[float]) -> tuple[float, float]:
    """Rise over the window by least squares, and the standard deviation around that line."""
    # squares of float64 losses beyond 1e154 would overflow
    unit = max(map(abs, values)) or 1.0
    count = len(values)
    mean_x = (count - 1) / 2
    mean_y = sum(value / unit for value in values) / count
    products = 0.0
    squares = 0.0
    for x, value in enumerate(values):
        products += (x - mean_x) * (value / unit - mean_y)
        squares += (x - mean_x) ** 2
    slope = products / squares
    left_over = 0.0
    for x, value in enumerate(values):
        left_over += (value / unit - mean_y - slope * (x - mean_x)) ** 2
    return slope * (count - 1) * unit, math.sqrt(left_over / count) * unit


def impossible_lr(reading: Reading) -> Verdict:
    """Judge a learning rate that is NaN or infinite: the update would ruin every weight."""
    for group, rate in enumerate(reading.lr):
        if not math.isfinite(rate):
            effect = "the update would make every weight non-finite"
            return Verdict(
                kind="lr_mismatch",
                severity="incident",
                summary=f"group {group} runs with lr {rate}: {effect}",
                evidence={"group": group, "lr": rate},
            )
    return OK


def lr_mismatch(reading: Reading, history: History) -> Verdict:
    """Judge a learning rate at least twice as high as anything configured or seen before."""
    group = history.excess_lr(reading.lr)
    if group is None:
        return OK
    rate = reading.lr[group]
    ceiling = history.ceiling(group)
    known = f"the highest configured or seen before is {ceiling:.4g}"
    return Verdict(
        kind="lr_mismatch",
        severity="note",
        summary=f"group {group} runs with lr {rate:.4g}; {known}",
        evidence={"group": group, "lr": rate, "ceiling": ceiling},
    )


def nothing_learned(reading: Reading, history: History) -> Verdict:
    """Judge a batch without a target, and a loss and gradient that stay exactly 0."""
    if reading.labels == 0:
        return Verdict(
            kind="no_labels",
            severity="note",
            summary="no target of this step counts: nothing is learned",
        )
    silent = reading.judged_loss == 0.0 and not reading.grad_norm
    # once: where it comes again the loss is 0 by intention, as of a hinge or a solved task
    if silent and history.zero_losses + 1 == ZERO_STEPS and not history.zero_stretches:
        summary = (
            f"loss and gradient have been exactly 0 for {ZERO_STEPS} steps: nothing is learned "
            "from them (reported once)"
        )
        return Verdict(kind="zero_loss", severity="note", summary=summary)
    return OK
