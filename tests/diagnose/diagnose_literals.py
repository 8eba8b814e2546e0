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
