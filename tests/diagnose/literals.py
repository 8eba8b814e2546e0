"""Short ways to write the records a locator would hand over, and tables of cases for rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest

from stepguard.diagnose import RunFacts, diagnose
from stepguard.records import Evidence, Finding, Incident, Operand, Origin, Reading, Verdict

NAN, INF = math.nan, math.inf
HALF = "float16"
Bad = Origin | tuple[Origin | None, dict[str, Any]]
"""Where a step went bad, and what its reading says besides."""

BACKWARD: dict[str, Any] = {"loss": 0.3, "kind": "nonfinite_gradient"}
"""A step whose loss is finite and whose gradients are not."""
CALM: dict[str, Any] = {"loss": 0.5, "grads_finite": True, "kind": "ok", "severity": "ok"}
SPIKE: dict[str, Any] = {"kind": "spike", "loss": 9e4, "grads_finite": True}
UPDATE: dict[str, Any] = CALM | {
    "kind": "nonfinite_parameter",
    "severity": "incident",
    "state_born": True,
}
OWN_OPTIMIZER = UPDATE | {"facts": RunFacts(optimizer="RowNorm")}
"""An update that made a parameter non-finite, by an optimizer without an epsilon in its groups."""
DIVERGED = (6.0, 5.8, 19.9, 292.0, 6112.0)


def tensor(
    name: str, shape: tuple[int, ...], low: float | None, high: float | None, **more: Any
) -> Operand:
    """A floating-point operand; float32 unless told otherwise."""
    dtype = more.pop("dtype", "float32")
    return Operand(name=name, dtype=dtype, shape=shape, min=low, max=high, **more)


def x(value: float, low: float, high: float, **more: Any) -> Operand:
    """An operand whose element at the bad position is known; 0 is among its elements if it is 0."""
    shape = more.pop("shape", (4,))
    more = {"index": (0,) * len(shape), "zeros": int(value == 0), "name": ""} | more
    return tensor(more.pop("name"), shape, low, high, value=value, **more)


def spans(low: float | None, high: float | None, *shape: int, **more: Any) -> Operand:
    """An operand of which only the range is known."""
    return tensor(more.pop("name", ""), shape or (4,), low, high, **more)


def whole(name: str, low: float, high: float, **more: Any) -> Operand:
    return Operand(name=name, dtype="int64", shape=(8,), min=low, max=high, **more)


def number(name: str, value: float) -> Operand:
    """A Python scalar, as the locator describes it."""
    return Operand(name=name, dtype="float", value=value)


def out(shape: tuple[int, ...] = (4,), **counts: Any) -> Operand:
    return Operand(name="out", dtype=counts.pop("dtype", "float32"), shape=shape, **counts)


def origin(phase: str, op: str | None = None, *inputs: Operand, **more: Any) -> Origin:
    return Origin(step=more.pop("step", 1), phase=phase, op=op, inputs=inputs, **more)  # type: ignore[arg-type]


FACTS = {one.name for one in fields(Evidence)}
COUNTS = {"nan", "posinf", "neginf", "dtype"}


def at(phase: str, op: str | None = None, *inputs: Operand, **known: Any) -> Origin:
    """An aten operation. What is known is a count of its output, a measured fact, or a field of
    the origin; operands without a name are `self` and `other`.
    """
    names = iter(("self", "other"))
    named = [one if one.name else replace(one, name=next(names)) for one in inputs]
    counts = {name: known.pop(name) for name in COUNTS & known.keys()}
    facts = Evidence(**{name: known.pop(name) for name in FACTS & known.keys()})
    made = out(known.pop("shape", (4,)), **counts) if counts else None
    return origin(phase, op and f"aten.{op}", *named, output=made, evidence=facts, **known)


def traced_in(autocast: str | None) -> Origin:
    """An origin whose replay ran under autocast to this dtype."""
    return at("loss", "mul", method="replay", autocast=autocast)


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


@dataclass(frozen=True, kw_only=True)
class Cases:
    """What a rule must find, and what it must leave to others."""

    fires: Bad
    says: tuple[str, ...]
    """Fragments of the evidence of `fires`: its numbers."""
    first: dict[str, Bad] = field(default_factory=dict)
    """Its cause comes before all others."""
    measured: dict[str, Bad] = field(default_factory=dict)
    """The same, where only a measured fact tells it from other causes."""
    silent: dict[str, Bad]


def parts(bad: Bad) -> tuple[Origin | None, dict[str, Any]]:
    return (bad, {}) if isinstance(bad, Origin) else bad


def checks(rules: dict[str, Cases]) -> tuple[Callable[..., None], ...]:
    """Three tests of each rule: it fires with its numbers, comes first, and stays silent."""
    each = pytest.mark.parametrize("code", rules)

    def fires(code: str) -> None:
        check_fires(code, rules[code])

    def comes_first(code: str) -> None:
        check_comes_first(code, rules[code])

    def stays_silent(code: str) -> None:
        check_stays_silent(code, rules[code])

    return each(fires), each(comes_first), each(stays_silent)


def check_fires(code: str, cases: Cases) -> None:
    where, reading = parts(cases.fires)
    finding = found(code, where, **reading)
    said = " | ".join(finding.evidence)
    assert [fragment for fragment in cases.says if fragment not in said] == [], said
    assert finding.remedies


def check_comes_first(code: str, cases: Cases) -> None:
    """Operation, node and operands carry the cause; measured facts only confirm it."""
    for name, bad in (cases.first | cases.measured).items():
        where, reading = parts(bad)
        said = findings(where, **reading)
        assert said and said[0].code == code, (name, [one.code for one in said])
        assert said[0].evidence and all(said[0].evidence) and said[0].remedies, name
        assert name in cases.measured or said[0].certainty in ("certain", "likely"), name
        if where is not None and name in cases.first:
            bare = codes(replace(where, evidence=Evidence()), **reading)
            assert bare and bare[0] == code, (f"{name}, nothing measured", bare)


def check_stays_silent(code: str, cases: Cases) -> None:
    for name, bad in cases.silent.items():
        where, reading = parts(bad)
        assert code not in codes(where, **reading), name
