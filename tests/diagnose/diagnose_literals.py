"""Short ways to write the records a locator would hand over."""

from __future__ import annotations

import math
from typing import Any

from stepguard.diagnose import RunFacts, diagnose
from stepguard.records import Evidence, Finding, Incident, Operand, Origin, Reading, Verdict

NAN, INF = math.nan, math.inf


def tensor(
    name: str, shape: tuple[int, ...], low: float | None, high: float | None, **more: Any
) -> Operand:
    """A floating-point operand; float32 unless told otherwise."""
    return Operand(
        name=name, dtype=more.pop("dtype", "float32"), shape=shape, min=low, max=high, **more
    )


def number(name: str, value: float) -> Operand:
    """A Python scalar, as the locator describes it."""
    return Operand(name=name, dtype="float", value=value)


def out(shape: tuple[int, ...] = (4,), **counts: Any) -> Operand:
    return Operand(name="out", dtype=counts.pop("dtype", "float32"), shape=shape, **counts)


def origin(phase: str, op: str | None = None, *inputs: Operand, **more: Any) -> Origin:
    return Origin(step=more.pop("step", 1), phase=phase, op=op, inputs=inputs, **more)  # type: ignore[arg-type]


def traced_in(autocast: str | None) -> Origin:
    """An origin whose replay ran under autocast to this dtype."""
    return origin("loss", "aten.mul", method="replay", evidence=Evidence(autocast=autocast))


def findings(
    where: Origin | None = None,
    *,
    kind: str = "nonfinite_loss",
    severity: str = "incident",
    facts: RunFacts | None = None,
    summary: str = "",
    said: dict[str, float | int | str] | None = None,
    **reading: Any,
) -> tuple[Finding, ...]:
    """Diagnose a bad step: NaN loss and bad gradients unless the reading says otherwise."""
    defaults: dict[str, Any] = {"step": 1, "loss": NAN, "grads_finite": False}
    verdict = Verdict(kind=kind, severity=severity, summary=summary, evidence=said)  # type: ignore[arg-type]
    incident = Incident(
        id="i", step=1, verdict=verdict, reading=Reading(**(defaults | reading)), origin=where
    )
    return diagnose(incident, facts) if facts is not None else diagnose(incident)


def codes(*args: Any, **kwargs: Any) -> list[str]:
    return [finding.code for finding in findings(*args, **kwargs)]


def found(code: str, *args: Any, **kwargs: Any) -> Finding:
    """The finding of this code; fails with what was found instead."""
    everything = findings(*args, **kwargs)
    match = [finding for finding in everything if finding.code == code]
    assert match, f"{code} not among {[f.code for f in everything]}"
    return match[0]


BACKWARD: dict[str, Any] = {"loss": 0.3, "kind": "nonfinite_gradient"}
"""A step whose loss is finite and whose gradients are not."""


Bad = tuple[Origin | None, dict[str, Any]]


def at_second(
    name: str, value: float, low: float, high: float, shape: tuple[int, ...] = (4,), **more: Any
) -> Operand:
    """An operand whose element at the bad position is known."""
    return tensor(name, shape, low, high, index=(1,) * len(shape), value=value, **more)


def div(above: Operand, below: Operand, **more: Any) -> Origin:
    return origin(more.pop("phase", "forward"), "aten.div", above, below, **more)


def nll(*inputs: Operand, **more: Any) -> Origin:
    return origin("loss", "aten.nll_loss_forward", *inputs, **more)


SCORES = tensor("self", (8, 5), -3.0, -0.1)


def labels(low: float, high: float) -> Operand:
    return Operand(name="target", dtype="int64", shape=(8,), min=low, max=high)


HALF = "float16"

UPDATE: dict[str, Any] = {
    "loss": 0.5,
    "grads_finite": True,
    "kind": "nonfinite_parameter",
    "state_born": True,
}

CALM: dict[str, Any] = {"loss": 0.5, "grads_finite": True, "kind": "ok", "severity": "ok"}


def backward(op: str, node: str, *inputs: Operand, **more: Any) -> Origin:
    return origin("backward", op, *inputs, node=node, **more)


def at(
    name: str, value: float, low: float, high: float, shape: tuple[int, ...] = (4,), **more: Any
) -> Operand:
    """An operand whose element at the bad position is known."""
    return tensor(name, shape, low, high, index=(0,) * len(shape), value=value, **more)


HUGE = Evidence(huge_parameter="param:biaffine.U", finite_in="float64", batch_max=3.0)

OWN_OPTIMIZER = {
    "grads_finite": True,
    "loss": 1.0,
    "kind": "nonfinite_parameter",
    "state_born": True,
    "facts": RunFacts(optimizer="RowNorm"),
}
"""An update that made a parameter non-finite, by an optimizer without an epsilon in its groups."""


def divided_by_a_norm(dtype: str) -> Origin:
    operands = (
        tensor(name, (), 0.0, 0.0, dtype=dtype, zeros=1, value=0.0, index=())
        for name in ("self", "other")
    )
    evidence = Evidence(
        zero_denominator=True, denominator_from="aten.clamp_min", zero_numerator=True
    )
    return origin(
        "optimizer", "aten.div", *operands, output=out((), dtype=dtype, nan=1), evidence=evidence
    )


FROM_BATCH = Evidence(argument="negative", argument_root="batch:t")

DIVERGED = (6.0, 5.8, 19.9, 292.0, 6112.0)


def huge_in_bfloat16(finite_in: str | None = None) -> Origin:
    """A layer norm of 3e20, on a batch that holds nothing unusual."""
    wide = tensor("input", (4, 8), -3e20, 3e20, dtype="bfloat16")
    made = out((4, 8), nan=32, dtype="bfloat16")
    evidence = Evidence(half_precision=True, batch_max=4.2, finite_in=finite_in)
    return origin(
        "forward",
        "aten.native_layer_norm",
        wide,
        number("eps", 1e-5),
        output=made,
        evidence=evidence,
    )


def division(low: float, high: float, *, dtype: str = "float32", **evidence: Any) -> Origin:
    divisor = tensor("other", (4,), low, high, zeros=1, index=(3,), value=0.0, dtype=dtype)
    return origin(
        "loss",
        "aten.div",
        tensor("self", (4,), 0.1, 0.5, index=(3,), value=0.3),
        divisor,
        output=out(posinf=1),
        evidence=Evidence(zero_denominator=True, **evidence),
    )


NO_COUNTS = {
    "logarithm of a length": division(
        0.0, 2.83, denominator_from="aten.log", denominator_root="batch:length"
    ),
    "logarithm of lengths that are all 1": division(
        0.0, 0.0, denominator_from="aten.log", denominator_root="batch:length"
    ),
    "weights between 0 and 3": division(
        0.0, 3.0, denominator_root="batch:mask", denominator_fractional=True
    ),
    "whole numbers below 0": division(-2.0, 3.0, denominator_root="batch:label"),
    "integers below 0": division(-2.0, 3.0, dtype="int64"),
}
