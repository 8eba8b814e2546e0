"""Record an incident: its folder, its capsule, the ledger of bad samples and every output."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count, islice
from pathlib import Path

from stepguard.engine.context import Context
from stepguard.engine.incident.samples import note_lost
from stepguard.engine.protect import explain_or_warn
from stepguard.records import Incident
from stepguard.records.codec import dumps, to_plain
from stepguard.state.batch import Step
from stepguard.state.capsule import Window, running_script, write_capsule, write_window
from stepguard.state.files import write_file
from stepguard.tensors.names import parameter_names

GRADIENTS = "gradients.json"
MOST_AT_FAULT = 8
"""Ranks at fault that each keep a folder of one incident; the others have it in their journals."""
CAPSULE_LIMIT = 2**30
"""Bytes; a larger step is recorded without a capsule."""
MOST_CAPSULES = 20
"""Capsules a run keeps; later incidents of a run that fails all the time are recorded without."""

MOST_WINDOWS = 5
"""Capsules that also keep the steps before the bad one: the first ones of a run tell the most."""
MOST_OTHERS = 8
"""Healthy steps beside them, to measure on."""


def record(context: Context, incident: Incident, step: Step) -> Incident:
    """Record an incident as far as possible: the step stays vetoed whatever fails here."""
    return explain_or_warn(
        incident, partial(context.outputs.note, "output"), write_down, context, incident, step
    )


def keep_step(context: Context, incident: Incident, step: Step) -> Incident:
    """Write the capsule of a step before the decision on it is applied."""
    return explain_or_warn(
        incident, partial(context.outputs.note, "output"), _with_capsule, context, incident, step
    )


def write_down(context: Context, incident: Incident, step: Step) -> Incident:
    """Write what outlives the process first, and tell the outputs last."""
    incident = _with_capsule(context, incident, step)
    context.incidents.append(incident)
    if context.outputs.journal is not None and _keeps_folder(context, incident):
        folder = _folder(context, incident)
        try:
            write_file(folder / "incident.json", dumps(to_plain(incident)).encode())
            # Write the gradient norms of each module in the steps before, as far as they are
            # known.
            if not (len(context.incidents) > MOST_CAPSULES):
                named = parameter_names(context.roots, context.optimizer)
                names = {id(parameter): name for parameter, name in named}
                table = context.memory.gradient_norms.table(
                    [names[id(one)] for one in context.parameters]
                )
                if table is not None:
                    write_file(folder / GRADIENTS, dumps(table).encode())
        except Exception as fault:
            # a full disk must not cost the veto, nor what else is told of the incident
            why = f"{type(fault).__name__}: {fault}"
            context.outputs.note(
                "output", f"the folder of incident {incident.id} could not be written: {why}"
            )
    note_lost(context, step, incident)
    context.outputs.incident(incident)
    return incident


def _keeps_folder(context: Context, incident: Incident) -> bool:
    """Ranks that are at fault keep one, and as witnesses the first rank and a healthy one."""
    members = context.agreement.members
    at_fault = incident.reading.bad_ranks
    keep = {members[0], *at_fault[:MOST_AT_FAULT]}
    if at_fault:
        healthy = (rank for rank in members if rank not in at_fault)
        keep.update(islice(healthy, 1))
    return context.agreement.world_rank in keep


def free_id(context: Context, name: str) -> str:
    """`name`, or `name-2`, ...: a step comes again after a rewind, and in a later run here."""
    taken = {incident.id for incident in context.incidents}
    candidate = name
    for number in count(2):
        if candidate not in taken and not _on_disk(context, candidate):
            break
        candidate = f"{name}-{number}"
    return candidate


def _on_disk(context: Context, name: str) -> bool:
    run_dir = context.config.run_dir
    if run_dir is None:
        return False
    return incident_folder(Path(run_dir), name, context.agreement.rank).exists()


def incident_folder(run_dir: Path, name: str, rank: int) -> Path:
    """The folder of an incident of this name."""
    if rank:
        name = f"{name}-rank{rank}"
    return run_dir / "incidents" / name


def _folder(context: Context, incident: Incident) -> Path:
    assert context.config.run_dir is not None
    folder = incident_folder(Path(context.config.run_dir), incident.id, incident.rank)
    with suppress(OSError):  # whoever writes into it says why it cannot be made
        # for this user only: capsules hold training data
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _keep_window(context: Context, incident: Incident, capsule: Path) -> None:
    """Put the steps that led to the bad one beside it, as far as they are known and fit."""
    lead_up = context.memory.lead_up
    if lead_up is None or lead_up.incident != incident.id or lead_up.snapshot is None:
        return
    if context.config.capsule != "full" or len(context.incidents) >= MOST_WINDOWS:
        return
    written = sum(file.stat().st_size for file in capsule.iterdir())
    window = Window(lead_up.snapshot.state, lead_up.steps, lead_up.earlier[-MOST_OTHERS:])
    try:
        why = write_window(capsule, window, CAPSULE_LIMIT - written)
    except Exception as fault:
        # the capsule is whole without it
        why = f"{type(fault).__name__}: {fault}"
    if why:
        context.outputs.note("capsule", f"{incident.id} is kept without the steps before it: {why}")


def _with_capsule(context: Context, incident: Incident, step: Step) -> Incident:
    """Write the capsule of a step that can be replayed, and name it in the incident."""
    config = context.config
    if config.run_dir is None or config.capsule == "off":
        return incident
    if incident.capsule or not step.replayable or len(context.incidents) >= MOST_CAPSULES:
        wants_capsule = False
    else:
        wants_capsule = _keeps_folder(context, incident)
    if not wants_capsule:
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
            limit_bytes=CAPSULE_LIMIT,
        )
    except Exception as fault:
        # a full disk or an odd tensor must not cost the incident
        why = f"{type(fault).__name__}: {fault}"
        context.outputs.note("capsule", f"no capsule of incident {incident.id}: {why}")
        return incident
    if not kept:
        limit = f"{CAPSULE_LIMIT} bytes"
        context.outputs.note("capsule", f"no capsule: the step is larger than {limit}")
        return incident
    _keep_window(context, incident, folder)
    named = config.build is not None or bool(running_script())
    capsule = str(folder.relative_to(Path(config.run_dir)))
    return replace(incident, capsule=capsule, replayable=named)
