"""Try what would have helped: candidates, their order, and what `on_incident="whatif"` does."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from stepguard._errors import CapsuleError, ConfigError, StateError
from stepguard.engine.context import Context, LeadUp, bare_step
from stepguard.engine.incident.situation import as_window, why_not
from stepguard.engine.recover.snapshots import SnapshotKeeper
from stepguard.probes.whatif_trial import TrialSubject, compare_candidates, copied_state
from stepguard.records import Action, Decision, Incident, Origin, Remedy
from stepguard.records.probes import TrialOutcome, WhatIf
from stepguard.report import probes as table
from stepguard.report.phrases import count
from stepguard.state.batch import batch_without
from stepguard.state.capsule import Window, WindowStep, read_capsule, read_window
from stepguard.state.rng import kept_rng
from stepguard.tensors.names import optimizer_parameters
from stepguard.tensors.values import HALVES

# --- What might have helped: each candidate is one change of the run, and the words to make it.


OwnFix = Callable[..., Any]
"""Gets model and optimizer; may return a loss function or a context manager for the trial."""
EPS_FACTOR = 100.0
LEAST_EPS = 1e-6
LEAST_EPS_OF_HALF = 1e-4
"""In float16 a smaller epsilon rounds to 0 beside a second moment that is 0."""
SHORT_MEMORY = 0.95
LONG_MEMORY = 0.999
VERY_SHORT_MEMORY = 0.9
STRONG_DECAY = 0.1
"""Share of the weights that one update takes away by weight decay: no training wants as much."""
RATE_JUMP = 2.0
SCALE_FACTOR = 1.0 / 16.0
LARGE_SCALE = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One change. Everything that is not named is as it was in the run."""

    name: str
    label: str
    cost: int
    """How much it changes a healthy run, 0 for nothing."""
    change: str
    """What to change so that the next run has it."""
    codes: tuple[str, ...] = ()
    """Findings whose remedy it is."""
    skip: bool = False
    """Leave the bad step out."""
    rows: tuple[int, ...] = ()
    """Samples of the bad step to leave out, in its micro-batch `micro_batch`."""
    micro_batch: int = 0
    micro_batches: tuple[int, ...] = ()
    """Whole micro-batches of the bad step to leave out."""
    rates_at_most: tuple[float, ...] = ()
    """What the learning rate of each group must not pass."""
    fresh_state: bool = False
    """Forget the optimizer's state before the bad step."""
    lr_factor: float = 1.0
    scale_factor: float = 1.0
    clip_norm: float | None = None
    settings: tuple[tuple[str, Any], ...] = ()
    """Hyperparameters of every parameter group that has them."""
    wide: str | None = None
    """Module to run in float32; "" is the whole model."""
    own: OwnFix | None = None
    fix: Remedy | None = None
    """A change of the program's lines."""

    @property
    def value(self) -> float | None:
        """The one number that is new, where it is one."""
        return self.clip_norm or dict(self.settings).get("eps")

    @property
    def late(self) -> bool:
        """Does it change nothing before the bad step?"""
        early = self.settings or self.wide is not None or self.own is not None or self.fix
        scaled = self.lr_factor != 1.0 or self.scale_factor != 1.0 or self.clip_norm is not None
        return not (early or scaled or self.rates_at_most)


UNCHANGED = Candidate(name="", label="", cost=0, change="")
NOTHING = Candidate(
    name="nothing",
    label="do nothing: the same steps again",
    cost=0,
    change="nothing to change: the same steps do not fail again",
    codes=("SG702",),
)
SKIP = Candidate(
    name="skip",
    label="skip the step",
    cost=2,
    change='nothing to change: Policy(actions=("skip", ...)) is the default',
    skip=True,
)
FRESH_STATE = Candidate(
    name="fresh state",
    label="forget the optimizer's state before the step",
    cost=7,
    change="optimizer.state.clear() after loading, or a checkpoint from before the damage",
    codes=("SG503",),
    fresh_state=True,
)


def candidates(
    optimizer: Optimizer,
    incident: Incident,
    bad: WindowStep,
    *,
    way: Sequence[WindowStep],
    usual_norm: float | None,
    own: OwnFix | None = None,
) -> list[Candidate]:
    """What is worth a trial after this incident, the cheapest first; `NOTHING` is not in it.

    `way`: the steps that led to the bad one.
    """
    # What its findings, samples and operands suggest.
    of_incident: list[Candidate] = []
    remedies = [(one.code, fix) for one in incident.findings[:1] for fix in one.remedies]
    # the change of the program that the panel offers
    for code, remedy in [(code, remedy) for code, remedy in remedies if remedy.proven][:1]:
        of_incident.append(
            Candidate(
                name="fix",
                label=f"the fix for {code} in your own line",
                cost=1,
                change=f"{remedy.title} (`stepguard fix` writes it)",
                codes=(code,),
                fix=remedy,
            )
        )
    of_incident += _left_out(incident, bad)
    if incident.origin is not None:
        of_incident += _in_float32(incident.origin)
    spoiled = any(name.startswith("opt:") for name in incident.reading.bad_state)
    if spoiled or any(finding.code == "SG503" for finding in incident.findings):
        of_incident.append(FRESH_STATE)
    found = [SKIP, *of_incident, *_of_rates(way, bad), *_of_settings(optimizer)]
    if bad.scale >= LARGE_SCALE:
        smaller = bad.scale * SCALE_FACTOR
        found.append(
            Candidate(
                name="loss scale",
                label=f"smaller loss scale ({bad.scale:g} -> {smaller:g})",
                cost=4,
                change=f"GradScaler(init_scale={smaller:g}), or GuardConfig("
                f"loss_scale={smaller:g})",
                codes=("SG506",),
                scale_factor=SCALE_FACTOR,
            )
        )
    if usual_norm is not None:
        before = "not clipped"
        if bad.clip_norm is not None:
            before = f"{bad.clip_norm:g}"
            usual_norm = min(usual_norm, bad.clip_norm / 2.0)
        limit = float(f"{usual_norm:.2g}")
        found.append(
            Candidate(
                name="clip",
                label=f"clip the gradients to {limit:g} ({before} before)",
                cost=7,
                change=f"GuardConfig(clip_norm={limit:g})",
                codes=("SG501", "SG505"),
                clip_norm=limit,
            )
        )
    if own is not None:
        name = getattr(own, "__name__", type(own).__name__)
        found.append(
            Candidate(
                name="own", label=f"your own: {name}", cost=3, change=f"what {name} does", own=own
            )
        )
    return sorted(found, key=lambda candidate: candidate.cost)


def _left_out(incident: Incident, bad: WindowStep) -> list[Candidate]:
    """Without the samples or micro-batches that are proven guilty."""
    origin = incident.origin
    leave_out = Candidate(
        name="leave out",
        label="",
        cost=1,
        change='nothing to change: Policy(actions=("leave_out", ...)) is the default; repair the '
        "data",
        codes=("SG101", "SG102", "SG103", "SG104"),
    )
    if origin is not None and origin.samples:
        micro = origin.micro_batch or 0
        if batch_without(bad.micro_batches[micro], origin.samples) is not None:
            label = f"leave out {origin.culprits}"
            return [replace(leave_out, label=label, rows=origin.samples, micro_batch=micro)]
    guilty = incident.reading.bad_micro_batches
    if not guilty or len(guilty) >= len(bad.micro_batches):
        return []
    numbers = ", ".join(str(index + 1) for index in guilty)
    label = f"leave out micro-batch {numbers} of {len(bad.micro_batches)}"
    return [replace(leave_out, label=label, micro_batches=guilty)]


def _in_float32(origin: Origin) -> list[Candidate]:
    """Where the bad value was born in half precision: its module, and the whole model."""
    halves = {str(dtype).removeprefix("torch.") for dtype in HALVES}
    dtypes = {operand.dtype for operand in (*origin.inputs, origin.output) if operand is not None}
    if not dtypes & halves:
        return []
    whole = Candidate(
        name="float32",
        label="the whole model in float32",
        cost=10,
        change="train without autocast and half-precision weights, or in bfloat16",
        codes=("SG301", "SG302", "SG801"),
        wide="",
    )
    module = origin.module
    if not module:
        return [whole]
    part = replace(
        whole,
        name="wider module",
        label=f"{module} in float32",
        cost=5,
        change=f"run {module} under torch.autocast(device_type, enabled=False), in float32",
        wide=module,
    )
    return [whole, part]


def _of_rates(way: Sequence[WindowStep], bad: WindowStep) -> list[Candidate]:
    """Lower rates; and where a rate has jumped on the way to the bad step, the rate it had."""
    found: list[Candidate] = []
    known = bool(bad.lr) and all(math.isfinite(rate) and rate > 0.0 for rate in bad.lr)
    for factor, cost in ((0.5, 8), (0.1, 11)):
        label = f"learning rate x{factor:g}"
        change = f"multiply the learning rate by {factor:g}"
        if known:
            rate = bad.lr[0]
            label += f" ({rate:.3g} -> {rate * factor:.3g})"
            change = f"lr={rate * factor:.3g} in place of {rate:.3g}"
        found.append(
            Candidate(
                name=f"lr x{factor:g}",
                label=label,
                cost=cost,
                change=change,
                codes=("SG505", "SG504"),
                lr_factor=factor,
            )
        )
    first = way[0].lr if way else ()
    for one in (*way[1:], bad):
        for now, then in zip(one.lr, first, strict=False):
            if now <= RATE_JUMP * then:
                continue
            # also where it is NaN now
            jump = Candidate(
                name="keep lr",
                label=f"keep the learning rate of step {way[0].index} ({then:.3g})",
                cost=3,
                change=f"the rate rises to {now:.3g} at step {one.index}: keep {then:.3g}",
                codes=("SG504", "SG802"),
                rates_at_most=first,
            )
            return [*found, jump]
    return found


def _of_settings(optimizer: Optimizer) -> list[Candidate]:
    """Larger epsilon, another memory of the second moment, no decay: where there are such."""
    found: list[Candidate] = []
    kind = type(optimizer).__name__
    group = optimizer.param_groups[0]
    eps = group.get("eps")
    if isinstance(eps, float):
        halves = any(one.dtype is torch.float16 for one in optimizer_parameters(optimizer))
        larger = max(eps * EPS_FACTOR, LEAST_EPS_OF_HALF if halves else LEAST_EPS)
        found.append(
            Candidate(
                name="eps",
                label=f"larger epsilon ({eps:g} -> {larger:g})",
                cost=6,
                change=f"{kind}(..., eps={larger:g})",
                codes=("SG502",),
                settings=(("eps", larger),),
            )
        )
    betas = group.get("betas")
    if isinstance(betas, tuple | list) and len(betas) == 2:
        memory = LONG_MEMORY if betas[1] < VERY_SHORT_MEMORY else SHORT_MEMORY
        if betas[1] != memory:
            found.append(
                Candidate(
                    name="beta2",
                    label=f"beta2 {betas[1]:g} -> {memory:g}",
                    cost=9,
                    change=f"{kind}(..., betas=({betas[0]:g}, {memory:g}))",
                    settings=(("betas", (betas[0], memory)),),
                )
            )
    decay = group.get("weight_decay", 0.0)
    if isinstance(decay, float | int) and float(group.get("lr", 0.0)) * decay >= STRONG_DECAY:
        found.append(
            Candidate(
                name="no decay",
                label=f"weight decay {decay:g} -> 0",
                cost=7,
                change=f"{kind}(..., weight_decay=0), or far less than {decay:g}",
                codes=("SG505",),
                settings=(("weight_decay", 0.0),),
            )
        )
    return found


# --- Order the outcomes: what works first, then what ends lower, then what changes training less.


NOISE_SHARE = 0.02
"""Losses that differ by less than this share are equal."""
NOISE_OF_BATCHES = 0.25
"""So are those that differ by less than this part of what batches of the run differ by."""


def ranked(
    outcomes: Sequence[TrialOutcome], recorded: Sequence[float], healthy: float | None = None
) -> list[TrialOutcome]:
    """Return the best first.

    `recorded`: losses of the run on the way to the bad step. `healthy`: the loss of the good state
    that all trials began with; who ends no higher has lost nothing, however low others end.
    """
    noise = _noise_of_batches(recorded)
    floor = -math.inf
    if healthy is not None and math.isfinite(healthy):
        floor = healthy
    working = [outcome for outcome in outcomes if outcome.works]
    order: list[TrialOutcome] = []
    while working:
        limit = math.inf
        known = [loss for loss in map(_loss, working) if loss > -math.inf]
        if known:
            best = max(min(known), floor)
            limit = best + max(NOISE_SHARE * abs(best), noise)
        # they lost nothing, or end where the best does, as far as so few batches can tell
        equal = [outcome for outcome in working if _loss(outcome) <= limit]
        order += sorted(equal, key=lambda outcome: outcome.cost)
        working = [outcome for outcome in working if outcome not in equal]
    failing = [outcome for outcome in outcomes if not outcome.works]
    # of those that fail, the one that got furthest, then the cheapest
    failing.sort(key=lambda one: (bool(one.why_not), -len(one.losses), one.cost))
    return order + failing


def _noise_of_batches(recorded: Sequence[float]) -> float:
    """How much losses of neighbouring steps differ, without the trend of the run."""
    finite = [loss for loss in recorded if math.isfinite(loss)]
    steps = [abs(later - earlier) for earlier, later in pairwise(finite)]
    return NOISE_OF_BATCHES * statistics.median(steps) if len(steps) > 1 else 0.0


def no_worse(one: TrialOutcome, other: TrialOutcome) -> bool:
    """Does it end at a loss that is not clearly higher?"""
    limit = _loss(other)
    if math.isfinite(limit):
        return _loss(one) <= limit + NOISE_SHARE * abs(limit)
    return True


def _loss(outcome: TrialOutcome) -> float:
    """Below every loss where none is known: then it counts as equal to any."""
    loss = judged_by(outcome.loss, outcome.held_out)
    return -math.inf if loss is None else loss


def judged_by(loss: float | None, held_out: float | None) -> float | None:
    """What counts: batches that were not trained on, where there are any."""
    return loss if held_out is None else held_out


# --- Try what would have helped: for `guard.whatif()`, and before a decision is applied.


# --- Try, on the way that led to the last incident, what would have helped.


NOTHING_MOVED = ("skip", "undo", "stop")
"""Decisions after which the weights are those that the bad step began from."""


def try_what_helps(context: Context, snapshots: SnapshotKeeper, own: OwnFix | None) -> WhatIf:
    """Try the candidates for the last incident, and show what they came to.

    Raises ConfigError with the reason where it cannot.
    """
    if not context.incidents:
        raise ConfigError("there is no incident yet: whatif looks at what went wrong.")
    subject = _subject(context, snapshots)
    quiet = context.config.terminal != "auto"
    try:
        with kept_rng(), table.progress_bar(None if quiet else sys.stderr) as progress:
            found = compare_candidates(subject, own=own, progress=progress)
    except StateError as why:
        raise ConfigError(f"whatif cannot copy the state of this run: {why}") from None
    if not quiet:
        table.show(found, sys.stdout)
    return found


def _subject(context: Context, snapshots: SnapshotKeeper) -> TrialSubject:
    """The last bad step; of several in a row, the first."""
    lead_up = context.memory.lead_up
    if lead_up is None or lead_up.incident != context.incidents[-1].id:
        why = why_not(context, bare_step(context))
        raise ConfigError(why or "nothing was kept of the last incident to try anything on.")
    failed = [*lead_up.failed_before, lead_up.bad]
    lead_up = lead_up.first or lead_up
    failed = [one for one in failed if one.index != lead_up.bad.index]
    incident = next(one for one in context.incidents if one.id == lead_up.incident)
    window = _window(context, snapshots, lead_up, incident)
    following = lead_up.bad.index + 1
    failed_next = any(one.step == following for one in context.incidents)
    # Is neither a sample nor the batch to blame, so that any batch may fail?
    if incident.reading.bad_inputs or incident.origin is None:
        by_no_sample = False
    else:
        by_no_sample = not incident.origin.samples
    return TrialSubject(
        step=lead_up.step,
        bad=lead_up.bad,
        window=window,
        run_state=snapshots.run_state,
        incident=incident,
        failed_before=failed if by_no_sample else [],
        failed_next=following if failed_next else None,
    )


def _window(
    context: Context, snapshots: SnapshotKeeper, lead_up: LeadUp, incident: Incident
) -> Window:
    """The steps in memory; else, once the run has gone on, those on disk."""
    later = [kept for kept in snapshots.kept.intact() if kept.step.index > lead_up.bad.index]
    others = [*lead_up.earlier, *as_window(later)]
    snapshot = lead_up.snapshot
    if snapshot is not None and not snapshot.overwritten:
        return Window(start=snapshot.state, steps=lead_up.steps, others=others)
    # Are the present weights still those that the bad step began from?
    decision = incident.decision
    if decision is None or decision.action not in NOTHING_MOVED or decision.rewound_to is not None:
        nothing_moved_since = False
    else:
        unmoved = context.history.committed == lead_up.committed
        nothing_moved_since = unmoved or context.step - lead_up.bad.index in (0, 1)
    if nothing_moved_since:
        return Window(start=copied_state(snapshots.run_state), steps=[], others=others)
    if incident.capsule is not None and incident.run is not None:
        return window_on_disk(Path(incident.run) / incident.capsule, others)
    raise ConfigError(
        "the state before the incident is gone: call guard.whatif() sooner, or give "
        "GuardConfig(run_dir=...), so that it is kept on disk."
    )


def window_on_disk(capsule: Path, others: list[WindowStep]) -> Window:
    """What a capsule keeps of the way to its step; at least the state before it."""
    try:
        window = read_window(capsule)
        if window is None:
            content = read_capsule(capsule)
            window = Window(start=content.saved_state(), steps=[])
    except CapsuleError as why:
        raise ConfigError(f"the state before the incident is gone from memory, and {why}") from None
    return replace(window, others=[*window.others, *others])


# --- `Policy(on_incident="whatif")`: try what helps before deciding, and do the cheapest that
# works.


MOST_TRIED = 20
"""Incidents of a run that are tried: one that fails all the time must not spend its time on it."""
DROPS_THE_STEP = ("skip", "undo", "leave_out")
APPLICABLE = ("leave out", "skip", "eps", "clip", "lr x0.5", "lr x0.1")
"""What a guard can do by itself, and take back by a rewind."""
RATES = {"lr x0.5": 0.5, "lr x0.1": 0.1}


def what_helps(
    context: Context, snapshots: SnapshotKeeper, incident: Incident, decision: Decision
) -> Decision:
    """The decision after trials: the same, or one that was seen to work. The journal says why."""
    lead_up = context.memory.lead_up
    if lead_up is None or lead_up.incident != incident.id or len(context.incidents) >= MOST_TRIED:
        return decision
    if decision.action in DROPS_THE_STEP:
        return _instead_of_skipping(context, snapshots, incident, decision, lead_up)
    if decision.action == "rewind":
        return _rewind_lower(context, snapshots, incident, decision, lead_up)
    return decision


def _instead_of_skipping(
    context: Context,
    snapshots: SnapshotKeeper,
    incident: Incident,
    decision: Decision,
    lead_up: LeadUp,
) -> Decision:
    """From the present weights: what keeps the bad value away in the steps that follow?"""
    # a batch that failed just before is what may come next
    others = [*lead_up.earlier, *lead_up.steps, *lead_up.failed_before]
    if not others:
        return decision
    window = Window(start=copied_state(snapshots.run_state), steps=[], others=others)
    norms = context.history.norms
    found = compare_candidates(
        _whatif_decision_subject(snapshots, incident, lead_up, window),
        wanted=lambda candidate: candidate.name in APPLICABLE,
        adapt=_without_the_step,
        usual_norm=statistics.median(norms) if norms else None,
    )
    best = _cheapest(found.outcomes)
    _tell(context, found, best)
    if best is None:
        return decision
    # What was seen to work, as far as it is another thing than what was decided.
    why = _why(found, best)
    if best.name == "leave out":
        if decision.action == "leave_out":
            return replace(decision, reason=why)
        return decision
    dropped: Action = "undo" if decision.action == "undo" else "skip"
    told = replace(decision, action=dropped, left_out="the step", reason=why)
    if best.name in RATES:
        return replace(told, lr_factor=RATES[best.name])
    if best.name == "eps":
        return replace(told, new_eps=best.value)
    if best.name == "clip":
        return replace(told, new_clip=best.value)
    return told


def _without_the_step(candidate: Candidate) -> Candidate:
    """What is changed for the steps that follow; the bad one is dropped in any case."""
    if candidate.rows or candidate.micro_batches:
        return candidate
    return replace(candidate, skip=True)


def _cheapest(outcomes: Sequence[TrialOutcome]) -> TrialOutcome | None:
    """The cheapest one that works and ends no higher than skipping does."""
    working = sorted((one for one in outcomes if one.works), key=lambda one: one.cost)
    skipped = [one for one in working if one.name == "skip"]
    for one in working:
        if not skipped or no_worse(one, skipped[0]):
            return one
    return None


def _rewind_lower(
    context: Context,
    snapshots: SnapshotKeeper,
    incident: Incident,
    decision: Decision,
    lead_up: LeadUp,
) -> Decision:
    """A rewind that would come to the same end: with which lower rate would it not?"""
    assert decision.rewound_to is not None
    snapshot = snapshots.at(decision.rewound_to)
    kept = snapshots.kept.since(decision.rewound_to)
    if snapshot is None or not kept or decision.lr_factor is not None:
        return decision
    window = Window(start=snapshot.state, steps=as_window(kept), others=lead_up.earlier)
    found = compare_candidates(
        _whatif_decision_subject(snapshots, incident, lead_up, window),
        wanted=lambda candidate: candidate.name == "nothing" or candidate.name in RATES,
    )
    best = _cheapest(found.outcomes)
    _tell(context, found, best)
    if best is None or best.name not in RATES:
        return decision
    # other weights come of a lower rate, so the steps since cannot be run again as they were
    return replace(decision, lr_factor=RATES[best.name], data="skip", reason=_why(found, best))


def _whatif_decision_subject(
    snapshots: SnapshotKeeper, incident: Incident, lead_up: LeadUp, window: Window
) -> TrialSubject:
    return TrialSubject(
        step=lead_up.step,
        bad=lead_up.bad,
        window=window,
        run_state=snapshots.run_state,
        incident=incident,
    )


def _why(found: WhatIf, best: TrialOutcome) -> str:
    failed = [one.name for one in found.outcomes if not one.works and one.cost < best.cost]
    said = f"whatif: {best.label} keeps the bad value away for {count(found.after, 'step')}"
    if failed:
        said += f"; not so {', '.join(failed)}"
    return said


def _tell(context: Context, found: WhatIf, best: TrialOutcome | None) -> None:
    said = "nothing that was tried helps" if best is None else _why(found, best)
    trials = [
        {
            "name": one.name,
            "works": one.works,
            "bad_value": one.bad_value,
            "loss": one.loss,
            "held_out": one.held_out,
        }
        for one in found.outcomes
    ]
    context.outputs.note(
        "whatif", said.removeprefix("whatif: "), step=found.step, trials=trials, steps=found.steps
    )
