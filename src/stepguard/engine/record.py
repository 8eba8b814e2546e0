"""Putting an incident on record: its folder, the capsule, the journal, the readable log, the terminal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stepguard.engine.context import Context
from stepguard.engine.lost import note_lost
from stepguard.records import Incident
from stepguard.records.codec import dumps, to_plain
from stepguard.state.atomic import write_file
from stepguard.state.capsule import write_capsule
from stepguard.state.step import Step

MOST_CAPSULES = 20
"""Capsules a run keeps; later incidents of a run that fails all the time are recorded without."""


def record(context: Context, incident: Incident, step: Step) -> Incident:
    """Everything that outlives the process first, the screen last."""
    context.unrecorded = None
    incident = _with_capsule(context, incident, step)
    context.incidents.append(incident)
    if context.journal is not None:
        context.journal.write_incident(incident)
        write_file(_folder(context, incident) / "incident.json", dumps(to_plain(incident)).encode())
    note_lost(context, step, incident)
    if context.human is not None:
        context.human.incident(incident)
    context.outlet.incident(incident)
    context.terminal.incident(incident)
    return incident


def incident_folder(run_dir: Path, name: str, rank: int) -> Path:
    """Where an incident of this name goes."""
    return run_dir / "incidents" / (f"{name}-rank{rank}" if rank else name)


def _folder(context: Context, incident: Incident) -> Path:
    assert context.config.run_dir is not None
    return incident_folder(Path(context.config.run_dir), incident.id, incident.rank)


def _with_capsule(context: Context, incident: Incident, step: Step) -> Incident:
    config = context.config
    wanted = config.run_dir is not None and config.capsule != "off" and step.whole
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
        context.note("note", {"step": incident.step, "kind": "capsule", "summary": f"no capsule: {fault}"})
        return incident
    if not kept:
        summary = f"no capsule: the step is larger than {config.capsule_limit} bytes (GuardConfig.capsule_limit)"
        context.note("note", {"step": incident.step, "kind": "capsule", "summary": summary})
        return incident
    return replace(incident, capsule=str(folder.relative_to(Path(str(config.run_dir)))))
