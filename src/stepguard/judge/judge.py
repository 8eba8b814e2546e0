"""Judge a Reading. Pure: the same Reading and History give the same Verdict on every rank."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from operator import mul
from statistics import median

from stepguard.judge.history import (
    BACK_SHARE,
    FIRST_LOSSES,
    LEAST_SPREAD,
    MATURE,
    MOVED,
    RUNAWAY,
    ZERO_STEPS,
    History,
    Weights,
)
from stepguard.records.codec import record
from stepguard.records.incident import OK, Reading, Verdict, VerdictKind
from stepguard.records.settings import GuardConfig

# --- Judge finite anomalies: a jump of the loss, a slow rise, a learning rate that was not
# configured.


DRIFT_SIGMAS = 4.0
DRIFT_SHARE = 0.01
"""Share of the window's first loss that is always expected as noise."""


def spike(reading: Reading, history: History, sigmas: float) -> Verdict:
    """Judge a loss far above its usual level in one step."""
    loss = reading.judged_loss
    known = len(history.losses)
    # a few losses that were all exactly 0 (a penalty that begins there) show no usual level
    if loss is None or (known < MATURE and not any(history.losses)):
        return OK
    # Deviations that make a spike, after so many losses.
    if known < FIRST_LOSSES:
        # for so few losses: the first updates may well leave a start that happened to be good
        spike_limit = max(sigmas, 1000.0)
    elif known < MATURE:
        # A run of a few steps has no noise estimate worth the name, so it takes more to be
        # suspicious
        spike_limit = max(sigmas, 10.0)
    else:
        spike_limit = sigmas
    rise = loss - history.level
    # a deviation is never less than this share of the median, and takes longer to compute
    if rise <= 0 or rise <= spike_limit * LEAST_SPREAD * abs(median(history.losses)):
        return OK
    excess = rise / history.spread
    if not excess > spike_limit:
        return OK
    why = _runs_away(reading, history) or _has_diverged(reading, history)
    # times what one loss in twenty exceeds: a heavy-tailed loss does not stand out by its tail
    if not why and len(history.losses) >= MATURE and excess < 4.0 * history.tail:
        return OK
    usual = f"its usual {history.level:.4g}"
    summary = f"loss {loss:.4g} is {excess:.3g} deviations above {usual}"
    evidence = {"loss": loss, "level": history.level, "deviations": excess}
    if why and reading.update_ratio is not None:
        evidence["update_ratio"] = reading.update_ratio
    return _told("spike", summary, why, **evidence)


def _incident(kind: VerdictKind, summary: str, **evidence: float | int | str) -> Verdict:
    return Verdict(kind=kind, severity="incident", summary=summary, evidence=evidence or None)


def _note(kind: VerdictKind, summary: str, **evidence: float | int | str) -> Verdict:
    return replace(_incident(kind, summary, **evidence), severity="note")


def _told(kind: VerdictKind, summary: str, why: str, **evidence: float | int | str) -> Verdict:
    """An incident where `why` shows that the weights caused it, else a suspicion."""
    if why:
        return _incident(kind, f"{summary}; {why}", **evidence)
    return replace(_incident(kind, summary, **evidence), severity="suspicion")


def _runs_away(reading: Reading, history: History) -> str:
    """What shows that the weights caused it and not the data, in words; empty if nothing."""
    loss = reading.judged_loss
    losses = list(history.losses)
    largest = max(map(abs, losses))
    if loss is None or not largest or loss < RUNAWAY * largest:
        return ""
    # a batch can be hard, but it does not move the weights
    ratio = reading.update_ratio
    # update as a share of the weights' norm; a healthy one is about 0.001
    if ratio is not None and ratio >= 0.3:
        return f"the last update changed the weights by {ratio:.3g} of their norm"
    # update as a share of the weights' norm; a smaller one cannot make a loss run away
    if ratio is not None and ratio < 0.01:
        return ""
    earlier = max(map(abs, losses[:-1]), default=0.0)
    # times every loss before it that the last loss must be, where the update is not known
    if earlier and losses[-1] >= 5.0 * earlier:
        return f"the loss before was already {losses[-1] / earlier:.3g} times every earlier one"
    return ""


def drift(reading: Reading, history: History) -> Verdict:
    """Judge a slow steady rise, which tests of single steps never see."""
    if history.surrogate:
        # the divergence from a reference begins at 0 and can only rise
        return OK
    loss = reading.judged_loss
    values = [*history.losses] if loss is None else [*history.losses, loss]
    count = len(values)
    # losses a rise must last before it is called a drift
    if count < 32:
        return OK
    least = DRIFT_SIGMAS * DRIFT_SHARE * abs(values[0])
    # most runs do not rise at all, which one pass shows; with a margin for its rounding
    if sum(map(mul, _rise_weights(count), values)) < 0.99 * least:
        return OK
    rise, noise = trend(values)
    if not rise > max(DRIFT_SIGMAS * noise, least):
        return OK
    summary = f"loss has risen by {rise:.4g} over {count} steps ({rise / count:+.3g} a step)"
    why = _has_diverged(reading, history)
    return _told("drift", summary, why, rise=rise, steps=count, noise=noise)


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
    return f"the run began at {history.began_at:.4g}, and {shown}" if shown else ""


@cache
def _rise_weights(count: int) -> tuple[float, ...]:
    """The least-squares weights of N values, for the rise."""
    middle = (count - 1) / 2
    squares = sum((x - middle) ** 2 for x in range(count))
    return tuple((x - middle) * (count - 1) / squares for x in range(count))


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
    """Judge a learning rate that is NaN or infinite."""
    group = next(group for group, rate in enumerate(reading.lr) if not math.isfinite(rate))
    rate = reading.lr[group]
    summary = f"group {group} runs with lr {rate}: the update would make every weight non-finite"
    return _incident("lr_mismatch", summary, group=group, lr=rate)


def lr_mismatch(reading: Reading, history: History) -> Verdict:
    """Judge a learning rate at least twice as high as anything configured or seen before."""
    group = history.excess_lr(reading.lr)
    if group is None:
        return OK
    rate = reading.lr[group]
    ceiling = history.ceiling(group)
    known = f"the highest configured or seen before is {ceiling:.4g}"
    summary = f"group {group} runs with lr {rate:.4g}; {known}"
    return _note("lr_mismatch", summary, group=group, lr=rate, ceiling=ceiling)


def nothing_learned(reading: Reading, history: History) -> Verdict:
    """Judge a batch without a target, and a loss and gradient that stay exactly 0."""
    if reading.labels == 0:
        return _note("no_labels", "no target of this step counts: nothing is learned")
    silent = reading.judged_loss == 0.0 and not reading.grad_norm
    # once: where it comes again the loss is 0 by intention, as of a hinge or a solved task
    if silent and history.zero_losses + 1 == ZERO_STEPS and not history.zero_stretches:
        summary = (
            f"loss and gradient have been exactly 0 for {ZERO_STEPS} steps: nothing is learned "
            "from them (reported once)"
        )
        return _note("zero_loss", summary)
    return OK


# --- Judge a Reading. Pure: the same Reading and History give the same Verdict on every rank.


STATE_KINDS: dict[str, VerdictKind] = {
    "param": "nonfinite_parameter",
    "buffer": "nonfinite_buffer",
    "opt": "nonfinite_optimizer_state",
}
MOST_NAMED = 3


def judge(reading: Reading, history: History, config: GuardConfig) -> Verdict:
    """Say the gravest thing that is true of this step."""
    # bad state makes the loss bad, and a bad loss the gradient: the first one is the cause
    if reading.missed:
        return _incident("nonfinite_parameter", reading.missed)
    if reading.bad_state:
        what = reading.bad_state[0]
        kind = STATE_KINDS[what.partition(":")[0]]
        if len(reading.bad_state) > 1:
            what += f" and {len(reading.bad_state) - 1} more"
        when = "was non-finite before this step"
        if reading.state_born:
            when = "became non-finite in this step"
        return _incident(kind, f"{what} {when}")
    if reading.loss is not None and not (
        math.isfinite(reading.loss) and all(map(math.isfinite, reading.micro_losses))
    ):
        return _loss(reading)
    if not reading.grads_finite or not math.isfinite(reading.grad_norm or 0.0):
        return _gradient(reading, config)
    if not all(map(math.isfinite, reading.lr)):
        return impossible_lr(reading)
    verdict = _anomaly(reading, history, config)
    if verdict.kind == "ok":
        verdict = nothing_learned(reading, history)
    if verdict.kind == "ok":
        verdict = lr_mismatch(reading, history)
    return verdict


def _anomaly(reading: Reading, history: History, config: GuardConfig) -> Verdict:
    """Judge a finite step that is unlike those before it."""
    if config.probes.anomalies == "off":
        return OK
    if config.probes.spike_sigmas is not None:
        verdict = spike(reading, history, config.probes.spike_sigmas)
        if verdict.kind != "ok":
            return verdict
    return drift(reading, history)


def alarming(reading: Reading) -> bool:
    """Does the cheap reading ask for a closer look? True for everything non-finite."""
    if reading.alarm or reading.bad_state or not reading.grads_finite:
        return True
    watched = (reading.loss or 0.0, reading.grad_norm or 0.0, *reading.micro_losses)
    return not all(map(math.isfinite, watched))


def _loss(reading: Reading) -> Verdict:
    # say how the loss is bad, in which of its components and in which micro-batches
    values = [reading.micro_losses[i] for i in reading.bad_micro_batches] or [reading.loss or 0.0]
    summary = "loss is nan"
    if not any(map(math.isnan, values)):
        summary = "loss is infinite"
    names = [name for name, value in reading.components.items() if not math.isfinite(value)]
    if names:
        summary += f" ({', '.join(names)})"
    if reading.bad_micro_batches and len(reading.micro_losses) > 1:
        # people count from 1
        numbers = ", ".join(str(index + 1) for index in reading.bad_micro_batches)
        summary += f" in micro-batch {numbers} of {len(reading.micro_losses)}"
    if reading.loss_overflow:
        summary += (
            ", because finite values were added up beyond the range of its dtype; every gradient "
            "is finite, so the step is made; add up in float32: loss.float().sum()"
        )
        return _note("loss_overflow", summary)
    if reading.bad_inputs:
        summary += f"; the batch holds non-finite values in {', '.join(reading.bad_inputs)}"
        return _incident("nonfinite_input", summary)
    return _incident("nonfinite_loss", summary)


def _gradient(reading: Reading, config: GuardConfig) -> Verdict:
    # GradScaler overflows on purpose while it looks for its scale
    if reading.overflow and not reading.grads_finite:
        # judge gradients that overflow because of the loss scale alone
        scale = reading.scale or 1.0
        if config.loss_scale is not None:
            effect = "makes the gradients overflow; without it they are finite"
            summary = f"the static loss scale {scale:g} {effect}"
            return _incident("nonfinite_gradient", summary, scale=scale)

        # below 1 it no longer protects anything: the gradients themselves overflow
        if scale < 1.0:
            summary = f"GradScaler has fallen to {scale:g} and the gradients still overflow"
            return _incident("scaler_collapse", summary, scale=scale)
        summary = f"GradScaler calibration: gradients overflow at scale {scale:g}"
        return _note("scale_calibration", summary, scale=scale)
    if not reading.grads_finite:
        names = ", ".join(reading.bad_grads[:MOST_NAMED]) or "unnamed"
        more = len(reading.bad_grads) + reading.unnamed_grads - MOST_NAMED
        if more > 0:
            names += f" and {more} more"
        loss = "not known" if reading.loss is None else f"{reading.loss:.4g}"
        summary = f"gradient is non-finite ({names}) while the loss is {loss}"
        return _incident("nonfinite_gradient", summary)
    summary = (
        "every gradient element is finite, but their fp32 norm overflows: clipping would zero the "
        "update"
    )
    return _incident("infinite_norm", summary)


# --- Decide whether the weights caused a finite anomaly, and not the data or the loss function.


LASTING = 3
"""Suspicious steps in a row before the weights can be blamed."""
SAME_LOSS = 0.1
"""Relative difference of two losses of one step: dropout and kernels differ a little."""


@record
class Comparison:
    """Losses of an earlier step and of the present one; lower is better, each was evaluated."""

    step: int
    """The step of the snapshot, which is also the earlier step."""
    then: float
    """The earlier step when it ran."""
    again: float
    """The earlier step on the same weights, now: if it differs, the loss function changed."""
    now: float
    """The earlier step on the present weights."""
    this_then: float
    """The present step on the weights of the snapshot."""


def blame_weights(
    verdict: Verdict,
    reading: Reading,
    history: History,
    lasting: int,
    compared: Comparison | None = None,
    moved: float | None = None,
) -> Verdict:
    """Make it an incident if independent signs agree that the weights caused it, else a note.

    `lasting`: suspicious steps in a row, this one included. `moved`: distance of the weights from
    those of a good snapshot, over their norm, where no steps could be `compared`.
    """
    doubt = _first_doubt(verdict, reading, history, lasting, compared, moved)
    if doubt:
        return replace(verdict, severity="note", summary=f"{verdict.summary}; {doubt}")
    evidence = dict(verdict.evidence or {})
    if compared is not None:
        evidence |= {
            "repeat_loss": compared.now,
            "older_loss": compared.this_then,
            "older_step": compared.step,
        }
        blame = (
            f"an earlier batch gives {compared.now:.4g} and gave {compared.then:.4g}, and on the "
            f"weights of step {compared.step} this batch gives {compared.this_then:.4g}: the "
            "weights are damaged"
        )
    else:
        assert moved is not None
        evidence["moved"] = moved
        blame = f"the weights have moved by {moved:.3g} of their norm since they were good"
    summary = f"{verdict.summary}; {blame}"
    return replace(verdict, severity="incident", summary=summary, evidence=evidence)


def _first_doubt(
    verdict: Verdict,
    reading: Reading,
    history: History,
    lasting: int,
    compared: Comparison | None,
    moved: float | None,
) -> str:
    """The first thing that speaks against blaming the weights; empty when all signs agree."""
    loss = reading.judged_loss
    if loss is None or history.best is None:
        return "there is no loss to judge by"
    if not verdict.bad:
        if not loss > history.progress.lost_limit:
            return "what the run has learned is not lost"
        if lasting < LASTING:
            return f"it has lasted {lasting} of {LASTING} steps"
    if compared is None:
        # where no step can be run again, only weights far from where they were good can be blamed
        if moved is None:
            return "nothing is known of earlier weights"
        if math.isfinite(moved) and moved < MOVED:
            return f"the weights have moved by {moved:.3g} of their norm since they were good"
        return ""
    then, now, again = compared.then, compared.now, compared.again
    rise = loss - history.best
    # has the loss of an earlier batch risen as much, or to many times what it was?
    enough = min(BACK_SHARE * rise, RUNAWAY * max(abs(then), history.best_noise))
    if math.isfinite(now) and now - then < enough:
        return f"an earlier batch gives {now:.4g} and gave {then:.4g}: not the weights"
    if not math.isclose(then, again, rel_tol=SAME_LOSS, abs_tol=SAME_LOSS * rise):
        return (
            f"an earlier step, on the weights it had, gives {again:.6g} and gave {then:.6g}: the "
            "loss function changed"
        )
    if not compared.this_then - history.best <= BACK_SHARE * rise:
        return "this batch is as hard for earlier weights"
    return ""
