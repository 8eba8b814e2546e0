"""Record an incident: its folder, its capsule, the ledger of bad samples and every output."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

from stepguard.checkpoints.seal import list_entries
from stepguard.diagnose import diagnose as find_causes
from stepguard.engine.context import Context, bare_step
from stepguard.engine.incident.run_facts import run_facts
from stepguard.engine.incident.samples import note_lost
from stepguard.engine.protect import explain_or_warn
from stepguard.judge.decide import MOST_HEALS
from stepguard.ranks.copies import Difference, PeerHealing, RankComparison
from stepguard.records import Decision, Incident, Origin, Reading, Verdict
from stepguard.records.codec import dumps, to_plain
from stepguard.records.incident import Action
from stepguard.report import phrases
from stepguard.state.batch import Step
from stepguard.state.capsule import Window, running_script, write_capsule, write_window
from stepguard.state.files import write_file
from stepguard.tensors.names import parameter_names

GRADIENTS = "gradients.json"
MOST_AT_FAULT = 8
"""Ranks at fault that each keep a folder of one incident; the others have it in their journals."""
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
    """Write what outlives the process first, and notify the outputs last."""
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
            # a full disk must not cost the veto, nor the rest of the incident's record
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
    with suppress(OSError):  # the writer that needs it says why it cannot be made
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
        why = write_window(capsule, window, context.config.capsule_limit - written)
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
        checkpoint = _nearest_checkpoint(context, step.index)
        size = write_capsule(
            folder,
            step,
            incident.reading,
            verdict=incident.verdict,
            build=config.build,
            keep=config.capsule,
            limit_bytes=config.capsule_limit,
            checkpoint=checkpoint,
        )
    except Exception as fault:
        # a full disk or an odd tensor must not cost the incident
        why = f"{type(fault).__name__}: {fault}"
        context.outputs.note("capsule", f"no capsule of incident {incident.id}: {why}")
        return incident
    named = config.build is not None or bool(running_script())
    if size <= config.capsule_limit:
        _keep_window(context, incident, folder)
    else:
        named = named and bool(checkpoint)
        whence = "no checkpoint of this run is sealed yet, so `stepguard replay` needs --build"
        if checkpoint:
            whence = f"`stepguard replay` takes them from {checkpoint['checkpoint']}"
        context.outputs.note(
            "capsule",
            f"{incident.id} takes {phrases.size(size)}, more than "
            f"{phrases.size(config.capsule_limit)} (GuardConfig.capsule_limit): kept without "
            f"parameters, buffers and optimizer state; {whence}",
        )
    capsule = str(folder.relative_to(Path(config.run_dir)))
    return replace(incident, capsule=capsule, replayable=named)


def _nearest_checkpoint(context: Context, step: int) -> dict[str, Any]:
    """The newest good checkpoint of this run that is not later than the step; empty: none is."""
    run_dir = Path(str(context.config.run_dir))
    for entry in list_entries(run_dir / "checkpoints")[0]:
        # ranks share a folder, and only the first one knows the run's name
        ours = context.agreement.rank > 0 or entry.health.run == context.run.id
        if ours and entry.good and entry.step <= step:
            name = f"checkpoints/{entry.path.name}"
            return {"checkpoint": name, "step": entry.step, "rank": context.agreement.rank}
    return {}


# --- Compare the ranks now and then, and record what they should have in common and have not.


REPORTED_ONLY = "finite damage is reported; nothing is changed"


def comparison_of_ranks(context: Context, healing: PeerHealing) -> list[RankComparison]:
    """The comparison of a guard of several ranks; none in one process, or where it is off."""
    every = context.config.ranks.compare_every
    if context.agreement.size == 1 or every is None:
        return []
    comparison = RankComparison(
        context,
        every,
        lambda: _sampler(context.data.feed),
        partial(context.outputs.note, "ranks"),
        partial(_record_difference, context, healing),
    )
    context.hooks.gradients.append(comparison.before_update)
    context.hooks.committed.append(comparison.committed)
    return [comparison]


def _record_difference(context: Context, healing: PeerHealing, found: Difference) -> bool:
    """Give a minority the weights of the majority, where that is allowed; True where it was."""
    step = bare_step(context)
    policy = context.config.policy
    allowed = context.config.probes.anomalies == "act" and "heal" in policy.actions
    heals = allowed and context.budget.heals < MOST_HEALS and not context.sharded
    action: Action = "note"
    reason = REPORTED_ONLY
    if heals and found.healthy is not None:
        healing.copy_everything(found.healthy)
        context.budget = replace(context.budget, heals=context.budget.heals + 1)
        action = "heal"
        reason = f"by rank {found.healthy}, one of the majority"
    origin = None
    if found.kind == "replica_drift":
        method = "comparison of the ranks"
        at = max(step.index - 1, 0)
        origin = Origin(step=at, phase="state", rank=found.rank, method=method)
    kind: Any = found.kind
    run_dir = context.config.run_dir
    reading = Reading(step=step.index, lr=context.lr, schedule=context.schedule)
    incident = Incident(
        id=free_id(context, f"{step.index:08d}-{kind}"),
        step=step.index,
        verdict=Verdict(
            kind=kind, severity="incident", summary=found.summary, evidence=found.evidence
        ),
        reading=reading,
        origin=origin,
        decision=Decision(
            action=action,
            reason=reason,
            consecutive=context.budget.consecutive,
            total=context.budget.total,
        ),
        run=str(run_dir) if run_dir is not None else None,
        rank=context.agreement.world_rank,
    )
    findings = find_causes(incident, run_facts(context, reading))
    record(context, replace(incident, findings=findings), step)
    return action == "heal"


def _sampler(feed: Any) -> str:
    """Seed, epoch and number of replicas of a sampler that divides the data among ranks."""
    batches = getattr(feed, "batch_sampler", None)
    for sampler in (getattr(feed, "sampler", None), getattr(batches, "sampler", None)):
        replicas = getattr(sampler, "num_replicas", None)
        seed = getattr(sampler, "seed", None)
        if replicas is not None and seed is not None:
            epoch = getattr(sampler, "epoch", None)
            return f"seed {seed}, epoch {epoch}, {replicas} replicas"
    return ""
