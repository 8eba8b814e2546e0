"""Finite anomalies: a jump of the loss, a slow rise, a learning rate nobody configured.

They are suspicions. A suspicion becomes an incident only with evidence that the weights and not the data did it:
an earlier batch, evaluated again on the present weights, has lost as much, and at least half of what the run had
learned is gone.
"""

from __future__ import annotations

import math
from dataclasses import replace

from stepguard.detect.history import MATURE, History
from stepguard.records.reading import Reading
from stepguard.records.verdict import OK, Verdict

YOUNG_SIGMAS = 10.0
"""A run of a few steps has no noise estimate worth the name, so it takes more to be suspicious."""
NEWBORN, NEWBORN_SIGMAS = 3, 1000.0
"""So few losses know no noise at all, and the first updates may well leave a start that happened to be good."""
DRIFT_LEAST = 32
"""Losses a rise must last before it is called a drift."""
DRIFT_SIGMAS = 4.0
LOST_SHARE = 0.5
"""Share of the progress since the first steps that must be gone before a finite anomaly is acted upon."""
RUINED = 10.0
"""Times the progress of the whole run an earlier batch has lost: the weights are hurt, whatever this batch says."""
WEIGHTS_SHARE = 0.5
"""Of a rise, that may remain on older weights, for the present ones to be blamed."""
ZERO_STEPS = 5


def spike(reading: Reading, history: History, sigmas: float) -> Verdict:
    """A loss far above its usual level in one step."""
    young = len(history.losses) < MATURE
    if reading.judged_loss is None or not history.losses or (young and not any(history.losses)):
        return OK  # a few losses that were all exactly 0 (a penalty that begins there) say nothing about what is much
    limit = max(sigmas, YOUNG_SIGMAS) if young else sigmas
    limit = max(limit, NEWBORN_SIGMAS) if len(history.losses) < NEWBORN else limit
    excess = (reading.judged_loss - history.level) / history.spread
    if not excess > limit:
        return OK
    summary = f"loss {reading.judged_loss:.6g} is {excess:.3g} deviations above its usual {history.level:.6g}"
    evidence: dict[str, float | int | str] = {"loss": reading.judged_loss, "level": history.level, "deviations": excess}
    return _weigh(Verdict(kind="spike", severity="suspicion", summary=summary, evidence=evidence), reading, history)


def drift(reading: Reading, history: History) -> Verdict:
    """A slow steady rise, which rules on single steps never see."""
    values = [*history.losses, reading.judged_loss] if reading.judged_loss is not None else list(history.losses)
    if len(values) < DRIFT_LEAST or history.surrogate:
        return OK  # the divergence from a reference begins at 0 and can only rise
    rise, noise = trend(values)
    if not rise > DRIFT_SIGMAS * max(noise, 0.01 * abs(values[0])):
        return OK
    summary = f"loss has risen by {rise:.4g} over {len(values)} steps ({rise / len(values):+.3g} a step)"
    evidence: dict[str, float | int | str] = {"rise": rise, "steps": len(values), "noise": noise}
    return _weigh(Verdict(kind="drift", severity="suspicion", summary=summary, evidence=evidence), reading, history)


def trend(values: list[float]) -> tuple[float, float]:
    """Rise over the window by least squares, and the standard deviation of what the line leaves over."""
    unit = max(map(abs, values)) or 1.0  # squares of float64 losses beyond 1e154 would overflow
    n, ys = len(values), [value / unit for value in values]
    mean_x, mean_y = (n - 1) / 2, sum(ys) / n
    slope = sum((i - mean_x) * (y - mean_y) for i, y in enumerate(ys)) / sum((i - mean_x) ** 2 for i in range(n))
    left = sum((y - mean_y - slope * (i - mean_x)) ** 2 for i, y in enumerate(ys))
    return slope * (n - 1) * unit, math.sqrt(left / n) * unit


def impossible_lr(reading: Reading) -> Verdict:
    """A learning rate that is NaN or infinite: the update would ruin every weight."""
    for group, rate in enumerate(reading.lr):
        if not math.isfinite(rate):
            summary = f"group {group} runs with lr {rate}: the update would make every weight non-finite"
            evidence: dict[str, float | int | str] = {"group": group, "lr": rate}
            return Verdict(kind="lr_mismatch", severity="incident", summary=summary, evidence=evidence)
    return OK


def lr_mismatch(reading: Reading, history: History) -> Verdict:
    """A learning rate at least twice as high as anything configured or seen before."""
    group = history.excess_lr(reading.lr)
    if group is None:
        return OK
    rate, ceiling = reading.lr[group], history.ceiling(group)
    summary = f"group {group} runs with lr {rate:.4g}; the highest configured or seen before is {ceiling:.4g}"
    evidence: dict[str, float | int | str] = {"group": group, "lr": rate, "ceiling": ceiling}
    return Verdict(kind="lr_mismatch", severity="note", summary=summary, evidence=evidence)


def nothing_learned(reading: Reading, history: History) -> Verdict:
    """No target in the batch, or a loss and gradient that stay exactly 0."""
    if reading.labels == 0:
        return Verdict(kind="no_labels", severity="note", summary="no target of this step counts: nothing is learned")
    silent = reading.judged_loss == 0.0 and not reading.grad_norm
    if silent and history.zero_losses + 1 == ZERO_STEPS:
        summary = f"loss and gradient have been exactly 0 for {ZERO_STEPS} steps: nothing is learned"
        return Verdict(kind="zero_loss", severity="note", summary=summary)
    return OK


def _weigh(verdict: Verdict, reading: Reading, history: History) -> Verdict:
    """Suspicion stays one until the loss of an earlier batch on the present weights is known."""
    again = reading.repeat_loss
    if again is None and history.jumped_lately(reading.step):
        again = reading.judged_loss  # the learning rate jumped just before: evidence enough
    if again is None:
        return verdict
    lost = _lost_share(again, history) if math.isfinite(again) else math.inf
    evidence = {**(verdict.evidence or {}), "repeat_loss": again, "lost_share": lost}
    now = again if reading.judged_loss is None else reading.judged_loss
    enough = max(0.5 * (now - history.level), float(evidence.get("noise", 0.0)))
    before = history.level if reading.repeat_before is None else reading.repeat_before
    ruined = (again - before) / _progress(history) >= RUINED
    if not math.isfinite(again) or ruined or (lost >= LOST_SHARE and again - before > enough):
        summary = f"{verdict.summary}; an earlier batch now gives {again:.6g}: the weights are hurt"
        return replace(verdict, severity="incident", summary=summary, evidence=evidence)
    summary = f"{verdict.summary}; an earlier batch still gives {again:.6g}: the data did it"
    return replace(verdict, severity="note", summary=summary, evidence=evidence)


def fared_better(verdict: Verdict, history: History, when: int, loss: float) -> Verdict:
    """An incident, if this very batch gave a usual loss on the weights of that step.

    Steps lie between, in which noisy training may well lose some on one batch: it takes more than all it ever gained.
    """
    evidence = dict(verdict.evidence or {})
    now = float(evidence["loss"])
    lost = _lost_share(now, history)
    if lost < RUINED or not loss - history.level <= WEIGHTS_SHARE * (now - history.level):
        return verdict
    first = verdict.summary.partition("; ")[0]
    summary = f"{first}; on the weights of step {when} this batch gives {loss:.6g}: some weights are hurt"
    evidence |= {"older_loss": loss, "older_step": when, "lost_share": lost}
    return replace(verdict, severity="incident", summary=summary, evidence=evidence)


def _progress(history: History) -> float:
    """What the run has learned so far, in terms of its loss; never 0."""
    assert history.best is not None
    return max(history.began_at - history.best, history.spread)


def _lost_share(loss: float, history: History) -> float:
    """How many times that progress this loss would undo."""
    assert history.best is not None
    return (loss - history.best) / _progress(history)
