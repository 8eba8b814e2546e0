"""From a Reading to a Verdict. Pure: the same Reading and History give the same Verdict on every
rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from stepguard.detect import anomalies
from stepguard.detect.history import History
from stepguard.records.reading import Reading
from stepguard.records.settings import GuardConfig
from stepguard.records.verdict import OK, Verdict, VerdictKind

STATE_KINDS: dict[str, VerdictKind] = {
    "param": "nonfinite_parameter",
    "buffer": "nonfinite_buffer",
    "opt": "nonfinite_optimizer_state",
}
LEAST_SCALE = 1.0
"""A GradScaler below this no longer protects anything: the gradients themselves overflow."""


def judge(reading: Reading, history: History, config: GuardConfig) -> Verdict:
    """The gravest thing that can be said about this step."""
    tests: tuple[Callable[[], Verdict], ...] = (
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
    """A finite step that is unlike those before."""
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


def _state(reading: Reading) -> Verdict:
    if not reading.bad_state:
        return OK
    first = reading.bad_state[0]
    kind = STATE_KINDS[first.partition(":")[0]]
    more = f" and {len(reading.bad_state) - 1} more" if len(reading.bad_state) > 1 else ""
    when = (
        "became non-finite in this step"
        if reading.state_born
        else "was non-finite before this step"
    )
    return Verdict(kind=kind, severity="incident", summary=f"{first}{more} {when}")


def _loss(reading: Reading) -> Verdict:
    if reading.loss is None or (math.isfinite(reading.loss) and not reading.bad_micro_batches):
        return OK
    names = [name for name, value in reading.components.items() if not math.isfinite(value)]
    what = f"loss is {_spell(reading)}" + (f" ({', '.join(names)})" if names else "")
    if reading.bad_micro_batches and len(reading.micro_losses) > 1:
        what += (
            f" in micro-batch {', '.join(map(str, reading.bad_micro_batches))} of "
            f"{len(reading.micro_losses)}"
        )
    if reading.bad_inputs:
        what += f"; the batch holds non-finite values in {', '.join(reading.bad_inputs)}"
        return Verdict(kind="nonfinite_input", severity="incident", summary=what)
    return Verdict(kind="nonfinite_loss", severity="incident", summary=what)


def _gradient(reading: Reading, config: GuardConfig) -> Verdict:
    if not reading.grads_finite:
        return _overflow(reading, config) if reading.overflow else _bad_gradient(reading)
    if reading.grad_norm is not None and not math.isfinite(reading.grad_norm):
        summary = (
            "every gradient element is finite, but their fp32 norm overflows: clipping would "
            "zero the update"
        )
        return Verdict(kind="infinite_norm", severity="incident", summary=summary)
    return OK


def _bad_gradient(reading: Reading) -> Verdict:
    names = ", ".join(reading.bad_grads[:3]) or "unnamed"
    more = f" and {len(reading.bad_grads) - 3} more" if len(reading.bad_grads) > 3 else ""
    summary = f"gradient is non-finite ({names}{more}) while the loss is {reading.loss}"
    return Verdict(kind="nonfinite_gradient", severity="incident", summary=summary)


def _overflow(reading: Reading, config: GuardConfig) -> Verdict:
    scale = reading.scale or 1.0
    evidence: dict[str, float | int | str] = {"scale": scale}
    if config.loss_scale is not None:
        summary = (
            f"the static loss scale {scale:g} makes the gradients overflow; without it they "
            f"are finite"
        )
        return Verdict(
            kind="nonfinite_gradient", severity="incident", summary=summary, evidence=evidence
        )
    if scale < LEAST_SCALE:
        summary = f"GradScaler has fallen to {scale:g} and the gradients still overflow"
        return Verdict(
            kind="scaler_collapse", severity="incident", summary=summary, evidence=evidence
        )
    summary = f"GradScaler calibration: gradients overflow at scale {scale:g}"
    return Verdict(kind="scale_calibration", severity="note", summary=summary, evidence=evidence)


def _spell(reading: Reading) -> str:
    values = [reading.micro_losses[i] for i in reading.bad_micro_batches] or [reading.loss or 0.0]
    return "nan" if any(math.isnan(v) for v in values) else "infinite"
