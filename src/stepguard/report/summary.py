"""Summarize a run in one plain record: counts, kinds of incidents, what led to them, events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, median
from typing import Any, Protocol, TypeVar

from stepguard.records import Finding, GuardConfig, Incident
from stepguard.records.codec import dumps, to_jsonable
from stepguard.records.decision import Action
from stepguard.records.place import place_and_phase
from stepguard.report import phrases
from stepguard.report.panel import next_commands
from stepguard.report.step_lines import StepLine, committed, finite_values
from stepguard.report.timeline import Event, timeline

LEAD_UP = 32
"""Steps shown before the first incident."""

T = TypeVar("T")


class Record(Protocol):
    """A journal read back, as `journal.read_run` gives it; anything with these fields will do."""

    @property
    def path(self) -> object: ...
    @property
    def header(self) -> Mapping[str, Any]: ...
    @property
    def steps(self) -> Sequence[StepLine]: ...
    @property
    def incidents(self) -> Sequence[Incident]: ...
    @property
    def notes(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def torn(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentGroup:
    """Incidents that are the same trouble again."""

    verdict: str
    summary: str
    first_step: int
    last_step: int
    count: int
    consecutive: int
    """The longest stretch of this kind without a step in between."""
    where: str = ""
    culprits: str = ""
    code: str = ""
    title: str = ""
    certainty: str = ""
    evidence: tuple[str, ...] = ()
    actions: dict[Action, int] = field(default_factory=dict)
    lr: tuple[float, ...] = ()
    """Learning rate of each parameter group at the first of them."""
    commands: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipActivity:
    """How often clipping was at work, and how hard."""

    steps: int
    clipped: int
    mean_factor: float | None = None
    """Mean over the clipped steps of what the gradients were multiplied by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What `stepguard report` shows."""

    journal: str
    header: dict[str, Any]
    changed_settings: dict[str, Any]
    """Settings of the guard that are not the default."""
    restarts: int
    """How often the run was started again with the same journal."""
    steps: int
    committed: int
    skipped: int
    calibrations: int
    """Steps that GradScaler dropped while it searched its scale; normal, so not skipped ones."""
    bad_steps: int
    first_bad: int | None
    last_bad: int | None
    longest_stretch: int
    first_loss: float | None
    best_loss: float | None
    last_loss: float | None
    seconds_per_step: float | None
    groups: tuple[IncidentGroup, ...]
    norms_before: tuple[float, ...]
    """Gradient norms of the committed steps just before the first incident."""
    losses_before: tuple[float, ...]
    followed_before: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """What the user followed in the same steps, by name."""
    clip: ClipActivity | None
    timeline: tuple[Event, ...]
    torn: int


def summarize(record: Record) -> RunSummary:
    """Summarize a journal. Pure: the same record gives the same summary."""
    calibrations = calibration_steps(record.steps, record.incidents)
    made = committed(record.steps)
    losses = finite_values(made, "loss")
    seconds = finite_values(record.steps, "seconds")
    bad = _bad_steps(record, calibrations)
    before: list[StepLine] = []
    if bad:
        before = [line for line in made if line["step"] < bad[0]][-LEAD_UP:]
    return RunSummary(
        journal=str(record.path),
        header={key: value for key, value in record.header.items() if key not in ("v", "type")},
        changed_settings=changed_settings(record.header),
        restarts=sum(line.get("type") == "run" for line in record.notes),
        steps=len(record.steps),
        committed=len(made),
        skipped=len(record.steps) - len(made) - len(calibrations),
        calibrations=len(calibrations),
        bad_steps=len(bad),
        first_bad=_first(bad),
        last_bad=_first(bad[::-1]),
        longest_stretch=longest_stretch(bad),
        first_loss=_first(losses),
        best_loss=min(losses, default=None),
        last_loss=_first(losses[::-1]),
        seconds_per_step=median(seconds) if seconds else None,
        groups=group_incidents(record.incidents),
        norms_before=_column(before, "grad_norm"),
        losses_before=_column(before, "loss"),
        followed_before=_followed(before),
        clip=_clip_activity(record.steps),
        timeline=timeline(record.header, record.steps, record.incidents, record.notes),
        torn=record.torn,
    )


def _first(values: Sequence[T]) -> T | None:
    return values[0] if values else None


def render_json(summary: RunSummary) -> str:
    """One line of strict JSON; non-finite numbers are null beside a `_kind`."""
    return dumps(to_jsonable(summary))


def calibration_steps(steps: Iterable[StepLine], incidents: Iterable[Incident]) -> set[int]:
    """Not committed, with a loss scale, and no incident: GradScaler was looking for its scale."""
    dropped = set()
    for line in steps:
        if not line.get("committed", True) and "scale" in line:
            dropped.add(line["step"])
    return dropped - {incident.step for incident in incidents}


def longest_stretch(steps: Sequence[int]) -> int:
    """The most steps in a row; `steps` is sorted and without repeats."""
    longest = 0
    current = 0
    previous = None
    for step in steps:
        if previous is not None and step == previous + 1:
            current += 1
        else:
            current = 1
        longest = max(longest, current)
        previous = step
    return longest


def group_incidents(incidents: Iterable[Incident]) -> tuple[IncidentGroup, ...]:
    """By kind, in the order of their first step."""
    kinds: dict[tuple[str, ...], list[Incident]] = {}
    for incident in incidents:
        kinds.setdefault(phrases.kind_of(incident), []).append(incident)
    return tuple(_group(members) for members in kinds.values())


def _group(members: list[Incident]) -> IncidentGroup:
    first = members[0]
    steps = sorted({member.step for member in members})
    group = IncidentGroup(
        verdict=first.verdict.kind,
        summary=first.verdict.summary,
        first_step=steps[0],
        last_step=steps[-1],
        count=len(members),
        consecutive=longest_stretch(steps),
        actions=dict(Counter(member.decision.action for member in members if member.decision)),
        lr=first.reading.lr,
        commands=tuple(next_commands(first)),
    )
    if first.origin is not None:
        where = place_and_phase(first.origin)
        group = replace(group, where=where, culprits=phrases.culprits(first.origin))
    if first.findings:
        group = _with_cause(group, first.findings[0])
    return group


def _with_cause(group: IncidentGroup, finding: Finding) -> IncidentGroup:
    return replace(
        group,
        code=finding.code,
        title=finding.title,
        certainty=finding.certainty,
        evidence=finding.evidence,
    )


def changed_settings(header: Mapping[str, Any]) -> dict[str, Any]:
    """The guard's settings in the header that differ from the defaults, with dotted names."""
    settings = header.get("settings") or header.get("config") or {}
    if not isinstance(settings, Mapping):
        return {}
    usual = dict(_flat(asdict(GuardConfig())))
    changed = {}
    for name, value in _flat(settings):
        if name not in usual or usual[name] != value:
            changed[name] = value
    return changed


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, tuple):
            # JSON has no tuples: the defaults must compare equal to what was read back.
            yield f"{prefix}{name}", list(value)
        else:
            yield f"{prefix}{name}", value


def _bad_steps(record: Record, calibrations: set[int]) -> list[int]:
    bad = {incident.step for incident in record.incidents}
    for line in record.steps:
        # A crash may have come between the dropped step and the line of its incident.
        if not line.get("committed", True) and line["step"] not in calibrations:
            bad.add(line["step"])
    return sorted(bad)


def _column(lines: Sequence[StepLine], name: str) -> tuple[float, ...]:
    return tuple(float(line[name]) for line in lines if isinstance(line.get(name), int | float))


def _followed(lines: Sequence[StepLine]) -> dict[str, tuple[float, ...]]:
    followed: dict[str, list[float]] = {}
    for line in lines:
        for name, value in (line.get("followed") or {}).items():
            if isinstance(value, int | float):
                followed.setdefault(name, []).append(float(value))
    return {name: tuple(values) for name, values in followed.items()}


def _clip_activity(steps: Sequence[StepLine]) -> ClipActivity | None:
    factors = finite_values(steps, "clip_factor")
    if not factors:
        return None
    clipped = [factor for factor in factors if factor < 1.0]
    mean = fmean(clipped) if clipped else None
    return ClipActivity(steps=len(factors), clipped=len(clipped), mean_factor=mean)
