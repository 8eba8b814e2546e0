"""Putting an incident on record: its folder, the capsule, the journal, the readable log, the
terminal.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from stepguard.engine.context import Context
from stepguard.engine.incident.lost_samples import note_lost
from stepguard.engine.protect import spare
from stepguard.records import Incident
from stepguard.records.codec import dumps, to_plain
from stepguard.state.atomic import write_file
from stepguard.state.capsule import write_capsule
from stepguard.state.step import Step

MOST_CAPSULES = 20
"""Capsules a run keeps; later incidents of a run that fails all the time are recorded without."""


def record(context: Context, incident: Incident, step: Step) -> Incident:
    """On record, as far as that can be: the step stays vetoed whatever fails here."""
    context.unrecorded = None
    return spare(incident, partial(context.say, "output"), write_down, context, incident, step)


def write_down(context: Context, incident: Incident, step: Step) -> Incident:
    """Everything that outlives the process first, the screen last."""
    incident = _with_capsule(context, incident, step)
    context.incidents.append(incident)
    if context.journal is not None:
        context.journal.write_incident(incident)
        _write_folder(context, incident)
    note_lost(context, step, incident)
    if context.human is not None:
        context.human.incident(incident)
    context.outlet.incident(incident)
    context.terminal.incident(incident)
    return incident


def _write_folder(context: Context, incident: Incident) -> None:
    try:
        write_file(_folder(context, incident) / "incident.json", dumps(to_plain(incident)).encode())
    except (
        Exception
    ) as fault:  # a full disk must not cost the veto, nor what else is told of the incident
        summary = (
            f"the folder of incident {incident.id} could not be written: "
            f"{type(fault).__name__}: {fault}"
        )
        context.say("output", summary)


def incident_folder(run_dir: Path, name: str, rank: int) -> Path:
    """Where an incident of this name goes."""
    return run_dir / "incidents" / (f"{name}-rank{rank}" if rank else name)


def _folder(context: Context, incident: Incident) -> Path:
    assert context.config.run_dir is not None
    return incident_folder(Path(context.config.run_dir), incident.id, incident.rank)


def _with_capsule(context: Context, incident: Incident, step: Step) -> Incident:
    config = context.config
    wanted = config.run_dir is not None and config.capsule != "off" and step.replayable
    if not wanted or config.capsule == "off" or len(context.incidents) >= MOST_CAPSULES:
        return incident
    folder = _folder(context, incident) / "capsule"
    if folder.exists():
        return incident
    try:
        kept = write_capsule(
            folder,
            step,
            incident.reading,
            verdict=incident.verdict,
            build=config.build,
            keep=config.capsule,
            limit_bytes=config.capsule_limit,
        )
    except Exception as fault:  # a full disk or an odd tensor must not cost the incident
        context.say(
            "capsule", f"no capsule of incident {incident.id}: {type(fault).__name__}: {fault}"
        )
        return incident
    if not kept:
        summary = (
            f"no capsule: the step is larger than {config.capsule_limit} bytes "
            f"(GuardConfig.capsule_limit)"
        )
        context.say("capsule", summary)
        return incident
    return replace(incident, capsule=str(folder.relative_to(Path(str(config.run_dir)))))
