"""A whole run in one plain record: counts, kinds of incident, what led up to them, and the chain of
events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Protocol

from stepguard.records import GuardConfig, Incident
from stepguard.records.codec import dumps, to_jsonable
from stepguard.report import phrases
from stepguard.report.panel import next_commands
from stepguard.report.timeline import Event, timeline

LEAD_UP = 32
"""Steps shown before the first incident."""

StepLine = Mapping[str, Any]


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
    actions: dict[str, int] = field(default_factory=dict)
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
    """Steps that GradScaler gave up while looking for its scale; normal, so not counted as skipped.
    """
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
    """Pure: the same record gives the same summary."""
    calibrations = calibration_steps(record.steps, record.incidents)
    bad = _bad_steps(record, calibrations)
    committed = [line for line in record.steps if line.get("committed", True)]
    losses = [line["loss"] for line in committed if phrases.finite(line.get("loss"))]
    seconds = [line["seconds"] for line in record.steps if phrases.finite(line.get("seconds"))]
    before = [line for line in committed if not bad or line["step"] < bad[0]][-LEAD_UP:]
    return RunSummary(
        journal=str(record.path),
        header={key: value for key, value in record.header.items() if key not in ("v", "type")},
        changed_settings=changed_settings(record.header),
        restarts=sum(line.get("type") == "run" for line in record.notes),
        steps=len(record.steps),
        committed=len(committed),
        skipped=len(record.steps) - len(committed) - len(calibrations),
        calibrations=len(calibrations),
        bad_steps=len(bad),
        first_bad=bad[0] if bad else None,
        last_bad=bad[-1] if bad else None,
        longest_stretch=longest_stretch(bad),
        first_loss=losses[0] if losses else None,
        best_loss=min(losses, default=None),
        last_loss=losses[-1] if losses else None,
        seconds_per_step=median(seconds) if seconds else None,
        groups=group_incidents(record.incidents),
        norms_before=_column(before, "grad_norm") if bad else (),
        losses_before=_column(before, "loss") if bad else (),
        followed_before=_followed(before) if bad else {},
        clip=_clip_activity(record.steps),
        timeline=timeline(record.header, record.steps, record.incidents, record.notes),
        torn=record.torn,
    )


def render_json(summary: RunSummary) -> str:
    """One line of strict JSON; non-finite numbers are null beside a `_kind`."""
    return dumps(to_jsonable(summary))


def calibration_steps(steps: Iterable[StepLine], incidents: Iterable[Incident]) -> set[int]:
    """Not committed, with a loss scale, and no incident: GradScaler was looking for its scale."""
    answered = {incident.step for incident in incidents}
    dropped = {
        line["step"] for line in steps if not line.get("committed", True) and "scale" in line
    }
    return dropped - answered


def longest_stretch(steps: Sequence[int]) -> int:
    """The most steps in a row; `steps` is sorted and without repeats."""
    longest = current = 1 if steps else 0
    for before, now in pairwise(steps):
        current = current + 1 if now == before + 1 else 1
        longest = max(longest, current)
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
    finding = first.findings[0] if first.findings else None
    return IncidentGroup(
        verdict=first.verdict.kind,
        summary=first.verdict.summary,
        first_step=steps[0],
        last_step=steps[-1],
        count=len(members),
        consecutive=longest_stretch(steps),
        where=f"{first.origin.phase}: {phrases.place(first.origin)}".rstrip(": ")
        if first.origin
        else "",
        culprits=phrases.culprits(first.origin) if first.origin else "",
        code=finding.code if finding else "",
        title=finding.title if finding else "",
        certainty=finding.certainty if finding else "",
        evidence=finding.evidence if finding else (),
        actions=dict(Counter(member.decision.action for member in members if member.decision)),
        lr=first.reading.lr,
        commands=tuple(next_commands(first)),
    )


def changed_settings(header: Mapping[str, Any]) -> dict[str, Any]:
    """The guard's settings in the header that differ from the defaults, with dotted names."""
    settings = header.get("settings") or header.get("config") or {}
    if not isinstance(settings, Mapping):
        return {}
    usual = dict(_flat(asdict(GuardConfig())))
    return {
        name: value for name, value in _flat(settings) if name not in usual or usual[name] != value
    }


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", list(value) if isinstance(value, tuple) else value


def _bad_steps(record: Record, calibrations: set[int]) -> list[int]:
    """Steps with an incident, and steps that were dropped without one (a crash may have come before
    it).
    """
    dropped = {
        line["step"] for line in record.steps if not line.get("committed", True)
    } - calibrations
    return sorted(dropped | {incident.step for incident in record.incidents})


def _column(lines: Sequence[StepLine], name: str) -> tuple[float, ...]:
    return tuple(float(line[name]) for line in lines if isinstance(line.get(name), int | float))


def _followed(lines: Sequence[StepLine]) -> dict[str, tuple[float, ...]]:
    given = [line.get("followed") or {} for line in lines]
    names = dict.fromkeys(name for values in given for name in values)
    return {name: _column(given, name) for name in names}


def _clip_activity(steps: Sequence[StepLine]) -> ClipActivity | None:
    factors = [line["clip_factor"] for line in steps if phrases.finite(line.get("clip_factor"))]
    if not factors:
        return None
    clipped = [factor for factor in factors if factor < 1.0]
    return ClipActivity(
        steps=len(factors), clipped=len(clipped), mean_factor=fmean(clipped) if clipped else None
    )
