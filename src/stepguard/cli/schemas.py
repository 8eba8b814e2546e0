"""What commands print with `--json` and the tools of `mcp` answer, and the JSON schema of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from stepguard.diagnose.engine import Explained
from stepguard.records import Incident
from stepguard.records.checks import Preflight, Verification
from stepguard.records.codec import IN_PLACE, KIND_SUFFIX, KINDS, fields_with_text
from stepguard.records.incident import Action, VerdictKind, place_and_phase
from stepguard.records.probes import WhatIf
from stepguard.report.story import Ending, Story
from stepguard.report.summary import RunComparison, RunSummary, summarize


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One run of a folder."""

    run: str
    path: str
    """The run directory: what to give to `incidents` or `stepguard report`."""
    state: Ending | None = None
    """How the run ended, or that it is running."""
    steps: int | None = None
    """Committed steps that still count."""
    loss: float | None = None
    """The last loss."""
    incidents: int | None = None
    last_step: int | None = None
    began: float | None = None
    """Seconds since 1970."""
    error: str | None = None
    """Why the run cannot be read; everything else is empty then."""


def run_row(name: str, path: str, story: Story) -> RunRow:
    """The newest run of a folder in short."""
    run = story.latest
    summary = summarize(run)
    return RunRow(
        run=name,
        path=path,
        state=summary.state,
        steps=summary.lanes[0].committed - summary.lanes[0].left,
        loss=summary.last_loss,
        incidents=summary.incidents,
        last_step=run.last_step,
        began=run.began,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunList:
    """Every run below the folders."""

    runs: tuple[RunRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentRow:
    """One incident, in short."""

    id: str
    step: int
    kind: VerdictKind
    summary: str
    """What was wrong with the step."""
    codes: tuple[str, ...]
    """Causes, the most certain first."""
    title: str
    """The first cause in a few words."""
    where: str
    """Where the first bad value originated."""
    action: Action | None
    """What was done about it."""
    proven_fix: bool
    """A change of the code was run on the step, and the step was finite: ask `fix` for it."""
    path: str | None
    """What to give to the other tools."""
    can_replay: bool


def incident_row(incident: Incident, path: str | None, can_replay: bool) -> IncidentRow:
    """The incident in short; `path` is its folder, if it is there."""
    first = incident.findings[:1]
    return IncidentRow(
        id=incident.id,
        step=incident.step,
        kind=incident.verdict.kind,
        summary=incident.verdict.summary,
        codes=tuple(finding.code for finding in incident.findings),
        title=first[0].title if first else "",
        where=place_and_phase(incident.origin) if incident.origin is not None else "",
        action=incident.decision.action if incident.decision is not None else None,
        proven_fix=any(remedy.proven for finding in first for remedy in finding.remedies),
        path=path,
        can_replay=can_replay,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Incidents:
    """The report of a run, and its newest incidents."""

    total: int
    """How many the run has; the newest are listed."""
    incidents: tuple[IncidentRow, ...]
    report: RunSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedIncident:
    """What was recorded about one incident."""

    path: str
    incident: Incident
    gradients: dict[str, Any] | None = None
    """Gradient norms by module in the steps before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """Every code of a finding."""

    codes: dict[str, str]
    """Code -> title."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What was found in each path."""

    ok: bool
    paths: tuple[Verification, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The bad step, run again."""

    reproduced: bool
    """False: the step is finite here."""
    incident: Incident


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """The bad step, as it was or with the change."""

    summary: str
    """What was wrong with it; with the change, what came of it."""
    loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """A change of the user's code with which the bad step was run."""

    step: int
    code: str
    """Code of the cause that it answers."""
    source: str | None
    """Line where the bad value originated."""
    title: str
    """What the change does."""
    before: Tried
    after: Tried
    diff: str
    """A unified diff, for `git apply`."""
    applied: tuple[str, ...]
    """Files that were written."""


TOOLS: dict[str, Any] = {
    "runs": RunList,
    "incidents": Incidents,
    "evidence": RecordedIncident,
    "explain": Explained | Codes,
    "verify": Verification,
    "replay": Replayed,
    "whatif": WhatIf,
    "check": Preflight,
    "fix": Fixed,
}
COMMANDS: dict[str, Any] = {
    "report": RunSummary | RunList,
    "compare": RunComparison,
    "explain": Explained | list[Explained],
    "replay": Incident,
    "fix": Fixed,
    "whatif": WhatIf,
    "verify": Verified,
    "check": Preflight,
}
PROPERTIES = {Verification: ("ok", "corrupt"), Preflight: ("ok",)}
"""Properties that are printed with the fields of a record."""
NUMBER = {
    "description": "A number. One that is not finite is null, with its kind in a field beside it "
    f"whose name ends in {KIND_SUFFIX}; in a table of numbers the kind may be the value.",
    "anyOf": [
        {"type": ["number", "null"]},
        {"enum": list(KINDS)},
        {"type": "object", "required": [IN_PLACE]},
    ],
}


texts_of: Callable[[Any], dict[str, tuple[str, str]]] = cache(fields_with_text)


class _Documented(GenerateJsonSchema):
    """Describes records by their docstrings and fields by the text below them."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def dataclass_schema(self, schema: Any) -> dict[str, Any]:
        made, record = super().dataclass_schema(schema), schema["cls"]
        made["description"] = (record.__doc__ or "").partition("\n")[0]
        for name, (_, text) in texts_of(record).items():
            if text and name in made["properties"]:
                made["properties"][name]["description"] = text
        for name in PROPERTIES.get(record, ()):
            text = getattr(record, name).__doc__
            made["properties"][name] = {"type": "boolean", "description": text}
        return made


@cache
def schema_of(answer: Any) -> dict[str, Any]:
    """The JSON schema of a record as the codec writes it."""
    made = TypeAdapter(answer).json_schema(mode="serialization", schema_generator=_Documented)
    known: dict[str, Any] = made.setdefault("$defs", {})
    if "$ref" in made:
        # readers want an object at the root
        made |= known[made.pop("$ref").rpartition("/")[2]]
    strict: dict[str, Any] = _numbers(made)
    strict["$defs"]["Number"] = NUMBER
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **strict}


def _numbers(value: Any) -> Any:
    """The schema with NUMBER for every number."""
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "number":
        kept = {key: item for key, item in value.items() if key != "type"}
        return kept | {"$ref": "#/$defs/Number"}
    return {key: _numbers(item) for key, item in value.items()}
