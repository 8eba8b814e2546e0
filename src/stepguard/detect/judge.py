"""Judge a Reading. Pure: the same Reading and History give the same Verdict on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable

from stepguard.detect import anomalies
from stepguard.detect.history import History
from stepguard.records.reading import Reading
from stepguard.records.settings import GuardConfig
from stepguard.records.verdict import OK, Severity, Verdict, VerdictKind

STATE_KINDS: dict[str, VerdictKind] = {
    "param": "nonfinite_parameter",
    "buffer": "nonfinite_buffer",
    "opt": "nonfinite_optimizer_state",
}
LEAST_SCALE = 1.0
"""A GradScaler below this no longer protects anything: the gradients themselves overflow."""
MOST_NAMED = 3


def judge(reading: Reading, history: History, config: GuardConfig) -> Verdict:
    """Say the gravest thing that is true of this step."""
    # bad state makes the loss bad, and a bad loss the gradient: the first one is the cause
    tests: tuple[Callable[[], Verdict], ...] = (
        lambda: _missed(reading),
        lambda: _state(reading),
        lambda: _loss(reading),
        lambda: _gradient(reading, config),
        lambda: anomalies.impossible_lr(reading),
        lambda: _anomaly(reading, history, config),
        lambda: anomalies.nothing_learned(reading, history),
        lambda: anomalies.lr_mismatch(reading, history),
    )
    for test in tests:
        verdict = test()
        if verdict.kind != "ok":
            return verdict
    return OK


def _anomaly(reading: Reading, history: History, config: GuardConfig) -> Verdict:
    """Judge a finite step that is unlike those before it."""
    if config.anomalies == "off":
        return OK
    if config.spike_sigmas is not None:
        verdict = anomalies.spike(reading, history, config.spike_sigmas)
        if verdict.kind != "ok":
            return verdict
    return anomalies.drift(reading, history)


def alarming(reading: Reading) -> bool:
    """Does the cheap reading ask for a closer look? True for everything non-finite."""
    if reading.alarm or reading.bad_state or not reading.grads_finite:
        return True
    watched = (reading.loss, reading.grad_norm, *reading.micro_losses)
    return any(value is not None and not math.isfinite(value) for value in watched)


def _missed(reading: Reading) -> Verdict:
    if not reading.missed:
        return OK
    return Verdict(kind="nonfinite_parameter", severity="incident", summary=reading.missed)


def _state(reading: Reading) -> Verdict:
    if not reading.bad_state:
        return OK
    first = reading.bad_state[0]
    what = first
    if len(reading.bad_state) > 1:
        what += f" and {len(reading.bad_state) - 1} more"
    when = "was non-finite before this step"
    if reading.state_born:
        when = "became non-finite in this step"
    kind = STATE_KINDS[first.partition(":")[0]]
    return Verdict(kind=kind, severity="incident", summary=f"{what} {when}")


def _loss(reading: Reading) -> Verdict:
    if reading.loss is None or (math.isfinite(reading.loss) and not reading.bad_micro_batches):
        return OK
    summary = _describe_loss(reading)
    if reading.loss_overflow:
        summary += (
            ", because finite values were added up beyond the range of its dtype; every gradient "
            "is finite, so the step is made; add up in float32: loss.float().sum()"
        )
        return Verdict(kind="loss_overflow", severity="note", summary=summary)
    if reading.bad_inputs:
        summary += f"; the batch holds non-finite values in {', '.join(reading.bad_inputs)}"
        return Verdict(kind="nonfinite_input", severity="incident", summary=summary)
    return Verdict(kind="nonfinite_loss", severity="incident", summary=summary)


def _describe_loss(reading: Reading) -> str:
    """Say how the loss is bad, in which of its components and in which micro-batches."""
    said = f"loss is {_nan_or_infinite(reading)}"
    names = [name for name, value in reading.components.items() if not math.isfinite(value)]
    if names:
        said += f" ({', '.join(names)})"
    if reading.bad_micro_batches and len(reading.micro_losses) > 1:
        # people count from 1
        numbers = ", ".join(str(index + 1) for index in reading.bad_micro_batches)
        said += f" in micro-batch {numbers} of {len(reading.micro_losses)}"
    return said


def _nan_or_infinite(reading: Reading) -> str:
    values = [reading.micro_losses[i] for i in reading.bad_micro_batches] or [reading.loss or 0.0]
    if any(map(math.isnan, values)):
        return "nan"
    return "infinite"


def _gradient(reading: Reading, config: GuardConfig) -> Verdict:
    # GradScaler overflows on purpose while it looks for its scale
    if reading.overflow and not reading.grads_finite:
        return _overflow(reading, config)
    if not reading.grads_finite:
        return _bad_gradient(reading)
    if reading.grad_norm is not None and not math.isfinite(reading.grad_norm):
        summary = (
            "every gradient element is finite, but their fp32 norm overflows: clipping would "
            "zero the update"
        )
        return Verdict(kind="infinite_norm", severity="incident", summary=summary)
    return OK


def _bad_gradient(reading: Reading) -> Verdict:
    names = ", ".join(reading.bad_grads[:MOST_NAMED]) or "unnamed"
    more = len(reading.bad_grads) + reading.unnamed_grads - MOST_NAMED
    if more > 0:
        names += f" and {more} more"
    loss = "not known" if reading.loss is None else f"{reading.loss:.4g}"
    summary = f"gradient is non-finite ({names}) while the loss is {loss}"
    return Verdict(kind="nonfinite_gradient", severity="incident", summary=summary)


def _overflow(reading: Reading, config: GuardConfig) -> Verdict:
    """Judge gradients that overflow because of the loss scale alone."""
    scale = reading.scale or 1.0
    kind: VerdictKind = "scale_calibration"
    severity: Severity = "note"
    summary = f"GradScaler calibration: gradients overflow at scale {scale:g}"
    if config.loss_scale is not None:
        kind = "nonfinite_gradient"
        severity = "incident"
        effect = "makes the gradients overflow; without it they are finite"
        summary = f"the static loss scale {scale:g} {effect}"
    elif scale < LEAST_SCALE:
        kind = "scaler_collapse"
        severity = "incident"
        summary = f"GradScaler has fallen to {scale:g} and the gradients still overflow"
    return Verdict(kind=kind, severity=severity, summary=summary, evidence={"scale": scale})
