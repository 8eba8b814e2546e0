"""The card of one incident on a web page, as plain text and numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from stepguard.records import Incident, Operand, Origin, Reading
from stepguard.records.place import place_and_phase
from stepguard.report import phrases
from stepguard.report.decision_words import done, effect
from stepguard.report.page_columns import kinds_of
from stepguard.report.panel import SAFETY_NOTES, next_commands
from stepguard.report.story import StoryIncident

DTYPE_EXPONENTS = {
    "float64": (-1074, -1022, 1024),
    "float32": (-149, -126, 128),
    "bfloat16": (-133, -126, 128),
    "float16": (-24, -14, 16),
    "float8_e4m3fn": (-9, -6, 9),
    "float8_e5m2": (-16, -14, 16),
}
"""Powers of two: the least above 0, the least normal one, the first that is too large."""
UNPLACED = "not located: the step could not be run again, or locating is off"
LONGEST_TEXT = 4000
"""Characters of one text of a journal that a card shows; the rest is counted."""


def incident_card(told: StoryIncident) -> dict[str, Any]:
    """Everything the page shows of an incident, without what lies in its folder."""
    incident = told.incident
    card = {
        "id": incident.id,
        "step": incident.step,
        "row": told.row,
        "bad": bad_values(incident.reading),
        "kept": told.kept,
        "title": phrases.verdict_title(incident.verdict.kind),
        "summary": clipped(incident.verdict.summary or incident.verdict.kind),
        "action": incident.decision.action if incident.decision else "",
        "weight": _weight(incident),
        "done": _done(incident),
        "done_more": [],
        "where": None,
        "unplaced": UNPLACED,
        "operands": [],
        "cause": "",
        "culprits": "",
        "findings": [_finding(finding) for finding in incident.findings],
        "facts": _facts(incident.reading, told.ranks),
        "samples": [],
        "heat": None,
        "commands": next_commands(incident),
    }
    if incident.decision is not None:
        card["done_more"] = _done_more(incident)
    if incident.findings:
        card["cause"] = f"{incident.findings[0].code} {clipped(incident.findings[0].title)}"
    if incident.origin is not None:
        card["where"] = _where(incident.origin)
        card["operands"] = _operands(incident.origin)
        card["culprits"] = clipped(phrases.culprits(incident.origin))
    return card


def bad_values(reading: Reading) -> dict[str, int]:
    """Values of the step that are not finite, by the name of their series; the kind of each."""
    named: dict[str, float | None] = {"loss": reading.loss, "grad_norm": reading.grad_norm}
    named |= {f"loss/{name}": value for name, value in reading.components.items()}
    named |= {f"followed/{name}": value for name, value in reading.followed.items()}
    found = {}
    for name, value in named.items():
        if value is not None and not math.isfinite(value):
            found[name] = int(kinds_of(np.array([value]))[0])
    return found


def clipped(text: str) -> str:
    """A text of a journal, which may have any length."""
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[:LONGEST_TEXT]} … ({len(text) - LONGEST_TEXT:,} more characters)"


def _weight(incident: Incident) -> str:
    if incident.decision is not None and incident.decision.action == "note":
        return "note"
    return "bad"


def _done(incident: Incident) -> str:
    if incident.decision is None:
        return "recorded; what was done is not known"
    if incident.decision.action == "rewind" and incident.decision.rewound_to is not None:
        return f"rewound to step {incident.decision.rewound_to}"
    return clipped(done(incident.decision))


def _done_more(incident: Incident) -> list[str]:
    decision = incident.decision
    assert decision is not None
    lines = [effect(incident), decision.reason]
    if decision.lr_factor is not None:
        lines.append(f"every learning rate times {decision.lr_factor:g}")
    if decision.new_scale is not None:
        lines.append(f"loss scale is now {decision.new_scale:g}")
    lines.append(f"{decision.consecutive} in a row, {decision.total} in this run")
    return [clipped(line) for line in lines if line]


def _where(origin: Origin) -> dict[str, Any]:
    remarks = list(origin.remarks)
    if origin.reproduced is True:
        remarks.insert(0, "the replay shows it again")
    elif origin.reproduced is False:
        remarks.insert(0, "the replay does not show it again")
    return {
        "text": clipped(place_and_phase(origin)),
        "context": [clipped(line) for line in origin.context],
        "remarks": [clipped(remark) for remark in remarks],
    }


def _operands(origin: Origin) -> list[dict[str, Any]]:
    shown = [_operand(operand, operand.called) for operand in origin.inputs]
    if origin.output is not None:
        shown.append(_operand(origin.output, "output"))
    return shown


def _operand(operand: Operand, name: str) -> dict[str, Any]:
    limits = DTYPE_EXPONENTS.get(operand.dtype)
    return {
        "name": clipped(name),
        "dtype": operand.dtype,
        "type": f"{operand.dtype} {_shape(operand.shape)}".strip(),
        "span": _span(operand),
        "bad": _bad(operand),
        "at": _at(operand),
        "zeros": operand.zeros,
        "nan": operand.nan,
        "posinf": operand.posinf,
        "neginf": operand.neginf,
        "exponents": [list(pair) for pair in operand.exponents],
        "range": dict(zip(("least", "normal", "most"), limits, strict=True)) if limits else None,
    }


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _span(operand: Operand) -> str:
    if operand.min is None or operand.max is None:
        return ""
    text = f"{phrases.number(operand.min)} to {phrases.number(operand.max)}"
    if operand.zeros:
        text += f", {phrases.count(operand.zeros, 'zero')}"
    return text


def _bad(operand: Operand) -> str:
    counted = {"NaN": operand.nan, "+Inf": operand.posinf, "-Inf": operand.neginf}
    bad = [f"{amount:,} {kind}" for kind, amount in counted.items() if amount]
    if not bad:
        return "none"
    return f"{', '.join(bad)} of {math.prod(operand.shape):,}"


def _at(operand: Operand) -> str:
    if operand.value is None:
        return ""
    value = phrases.number(operand.value)
    if operand.index is None:
        return value
    return f"{value} at [{', '.join(map(str, operand.index))}]"


def _finding(finding: Any) -> dict[str, Any]:
    remedies = []
    for remedy in finding.remedies:
        note = SAFETY_NOTES.get(remedy.safety, "")
        title = clipped(remedy.title) + (f" ({note})" if note else "")
        title += f"; {clipped(remedy.tried)}" if remedy.tried else ""
        remedies.append({"title": title, "snippet": clipped(remedy.snippet)})
    return {
        "code": clipped(finding.code),
        "title": clipped(finding.title),
        "certainty": finding.certainty,
        "evidence": [clipped(sentence) for sentence in finding.evidence],
        "remedies": remedies,
    }


def _facts(reading: Reading, ranks: Sequence[int]) -> list[list[str]]:
    named: dict[str, float | None] = {"loss": reading.loss, **reading.components}
    named |= {"gradient norm": reading.grad_norm, "loss scale": reading.scale}
    named |= reading.followed
    rows = []
    for name, value in named.items():
        if value is not None:
            rows.append([clipped(str(name)), phrases.number(value)])
    if reading.lr:
        rows.append(["learning rate", phrases.rates(reading.lr, clipped(reading.schedule))])
    if reading.bad_grads:
        rows.append(["bad gradients", clipped(phrases.first_few(reading.bad_grads, 6))])
    if reading.bad_state:
        rows.append(["bad state", clipped(phrases.first_few(reading.bad_state, 6))])
    if reading.bad_inputs:
        rows.append(["bad inputs", clipped(phrases.first_few(reading.bad_inputs, 6))])
    if len(ranks) > 1:
        rows.append(["recorded by ranks", phrases.first_few(ranks)])
    if reading.bad_ranks:
        rows.append(["bad on ranks", phrases.first_few(reading.bad_ranks)])
    return rows
