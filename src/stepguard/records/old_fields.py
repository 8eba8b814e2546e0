"""Read incidents that an earlier version wrote: fields that have another name or form by now."""

from __future__ import annotations

from typing import Any


def upgrade_incident(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of an incident as the present records name them; what is new stays as it is."""
    upgraded = dict(fields)
    decision = fields.get("decision")
    if isinstance(decision, dict) and decision.get("action") == "warn":
        upgraded["decision"] = {**decision, "action": "note"}
    origin = fields.get("origin")
    if isinstance(origin, dict) and "notes" in origin:
        upgraded["origin"] = _with_remarks(origin)
    findings = fields.get("findings")
    if isinstance(findings, list):
        upgraded["findings"] = [_with_certainty(finding) for finding in findings]
    return upgraded


def _with_remarks(origin: dict[str, Any]) -> dict[str, Any]:
    """`notes` mixed sentences with tokens such as `masked_rows=2`: only the sentences are kept."""
    notes = origin.get("notes") or ()
    remarks = [note for note in notes if isinstance(note, str) and _is_sentence(note)]
    rest = {name: value for name, value in origin.items() if name != "notes"}
    return {"remarks": remarks, **rest}


def _is_sentence(note: str) -> bool:
    first_word = note.partition(" ")[0]
    return " " in note and "=" not in first_word


def _with_certainty(finding: Any) -> Any:
    """`confidence` was a number between 0 and 1 that nothing had measured."""
    if not isinstance(finding, dict) or "confidence" not in finding:
        return finding
    rest = {name: value for name, value in finding.items() if name != "confidence"}
    return {"certainty": _certainty(finding["confidence"]), **rest}


def _certainty(confidence: Any) -> str:
    if not isinstance(confidence, int | float) or confidence <= 0.5:
        return "possible"
    return "certain" if confidence >= 0.9 else "likely"
