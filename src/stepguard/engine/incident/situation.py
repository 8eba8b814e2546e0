"""Gather what a decision needs: which fault, where a rewind would go, what can be left out."""

from __future__ import annotations

import sys
from pathlib import Path, PurePath
from types import TracebackType
from typing import Literal, get_args

from torch import nn

from stepguard._errors import EXIT_HALTED, TrainingHalted
from stepguard.engine.context import Context, LeadUp
from stepguard.engine.drivers.scaler import voting_manager
from stepguard.engine.drivers.schedule import takes_closure
from stepguard.engine.incident.anomaly_check import AnomalyCheck
from stepguard.engine.incident.closer_look import stored_culprit, weights_ruined, working_scale
from stepguard.engine.incident.ranks import damaged
from stepguard.engine.recover.rewind import Rewinder, proven_guilty, share_of
from stepguard.engine.recover.snapshots import KeptStep, SnapshotKeeper
from stepguard.judge.decide import MOST_HEALS, Fault, RewindPlan, Situation, allows_continuing
from stepguard.records import Incident, Reading
from stepguard.report import screen
from stepguard.state.batch import Step
from stepguard.state.capsule import WindowStep, window_step
from stepguard.state.snapshot import Snapshot
from stepguard.tensors.torch_private import compiled_call

# --- Stop the run: tell people and launchers, and raise TrainingHalted.


Restart = Literal["helps", "same-fault", "change-code"]
"""`helps`: the state is healthy and the same program gets past the fault from there. `same-fault`:
the state is healthy, and nothing shows that the same program would not come from there to the same
fault. `change-code`: there is no healthy state to resume from.
"""
BORN_IN_THE_STEP = ("nonfinite_loss", "nonfinite_gradient", "infinite_norm")
"""Verdicts on what forward and backward made: another step need not make it again."""


def halt(context: Context, rewinder: Rewinder, incident: Incident, state: Path | None) -> None:
    """Raise TrainingHalted; `state` is where the newest good state was left."""
    restart = restart_after(context, rewinder, incident, state)
    cause = incident.findings[0].code if incident.findings else incident.verdict.kind
    line = exit_line(step=incident.step, cause=cause, restart=restart, state=state)
    where = str(state) if state is not None else None
    halted = TrainingHalted(incident, state=where, restart=restart)
    try:
        context.outputs.halted(incident, line)
    finally:
        if context.agreement.world_rank == 0:
            # not one of the outputs: launchers read it whatever people want to see
            screen.put(f"{line}\n", sys.stderr)
            halted.printed = True
    exit_with_code_three()
    raise halted


def restart_after(
    context: Context, rewinder: Rewinder, incident: Incident, state: Path | None
) -> Restart:
    """Say what the same program would come to if it were started again from `state`.

    A promise is made only where something shows that the fault does not return: the replay did not
    show it, or it is in samples that a restart passes over, because the guard knows the loader.
    """
    if state is None:
        return "change-code"
    reading = incident.reading
    in_the_step = incident.verdict.kind in (*BORN_IN_THE_STEP, "nonfinite_input")
    if _recurred(context, rewinder, incident) or not in_the_step or reading.bad_state:
        return "same-fault"
    origin = incident.origin
    transient = origin is not None and origin.reproduced is False
    in_samples = bool(reading.bad_inputs or (origin is not None and origin.samples))
    return "helps" if transient or (in_samples and context.data.feed is not None) else "same-fault"


def _recurred(context: Context, rewinder: Rewinder, incident: Incident) -> bool:
    """Has it come more than once: in a row, in spite of all rewinds, or in an earlier attempt?"""
    if incident.step in rewinder.past.stopped_at or incident.step == rewinder.retried:
        return True
    budget = context.budget
    policy = context.config.policy
    spent = 0 < policy.max_rewinds <= budget.rewinds or bool(budget.exceeded(policy))
    return budget.consecutive > 1 or (spent and budget.total > 1)


def exit_line(
    *, step: int, cause: str, restart: Restart, state: str | PurePath | None = None
) -> str:
    """The line on stderr by which a launcher learns that the run stopped and if a restart helps.

    `stepguard: HALTED step=48 cause=SG204 restart=same-fault state=runs/a/checkpoints/step-40`,
    without a newline. `cause` is the code of the first finding, or the kind of the verdict where
    nothing was found. `state` is where the newest good state lies; it stands last, so that a path
    with blanks is everything up to the end of the line.
    """
    if restart not in get_args(Restart):
        raise ValueError(
            f"restart={restart!r} is not known; use one of {', '.join(get_args(Restart))}."
        )
    where = _one_line(str(state or "")) or "none"
    word = "-".join(_one_line(cause).split()) or "unknown"
    return f"stepguard: HALTED step={step} cause={word} restart={restart} state={where}"


def _one_line(text: str) -> str:
    """Replace what does not print: a path may hold a newline, a line may not."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def exit_with_code_three() -> None:
    """Let an uncaught TrainingHalted end the process with exit code 3 instead of Python's 1."""
    previous = sys.excepthook
    if getattr(previous, "_stepguard", False):
        return

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(value, TrainingHalted):
            previous(kind, value, trace)
            return
        if not value.printed:
            print(f"stepguard: {value}", file=sys.stderr)
        raise SystemExit(EXIT_HALTED)

    hook._stepguard = True  # type: ignore[attr-defined]
    hook._previous = previous  # type: ignore[attr-defined]
    sys.excepthook = hook


# --- Keep, by reference, the way that led to a bad step: what would have helped is tried on it.


SHORTLY = 4
"""Steps within which one bad step belongs to another."""


def keep_lead_up(
    context: Context, snapshots: SnapshotKeeper, incident: Incident, step: Step
) -> None:
    """Keep what trials need of this step: references, and a snapshot that is not overwritten."""
    last = context.memory.lead_up
    context.memory.lead_up = None
    for one in (last, last.first if last is not None else None):
        if one is not None and one.snapshot is not None:
            one.snapshot.held = False
    if why_not(context, step):
        return
    lead_up = LeadUp(
        incident=incident.id,
        step=step,
        bad=window_step(step, incident.reading.loss, incident.reading.lr),
        timeline=context.budget.rewinds,
        committed=context.history.committed,
    )
    if last is not None and last.timeline == lead_up.timeline:
        recent = [*last.failed_before, last.bad]
        since = step.index - SHORTLY
        lead_up.failed_before = [one for one in recent if since <= one.index < step.index]
        if last.committed == lead_up.committed:
            # what led to the first of them is what a trial has to begin with
            lead_up.first = last.first or last
    _hold_window(snapshots, lead_up)
    if lead_up.first is not None and lead_up.first.snapshot is not None:
        lead_up.first.snapshot.held = True
    context.memory.lead_up = lead_up


def _hold_window(snapshots: SnapshotKeeper, lead_up: LeadUp) -> None:
    """The snapshot that trials begin with, and the kept steps since and before it."""
    snapshot = _before(snapshots, lead_up.step.index)
    if snapshot is None:
        return
    snapshot.held = True
    lead_up.snapshot = snapshot
    lead_up.steps = as_window(snapshots.kept.since(snapshot.step) or [])
    earlier = [kept for kept in snapshots.kept.intact() if kept.step.index < snapshot.step]
    lead_up.earlier = as_window(earlier)


def _before(snapshots: SnapshotKeeper, index: int) -> Snapshot | None:
    """The newest good snapshot whose steps since are all kept, else the oldest sound one."""
    usable: list[Snapshot] = []
    for snapshot in snapshots.ring.snapshots:
        if snapshot.step > index or snapshots.kept.since(snapshot.step) is None:
            continue
        # steps from before parameters were added would be trained with them
        grown = snapshots.run_state.grown_since(snapshot.state)
        if not grown and snapshots.probation.sound(snapshot):
            usable.append(snapshot)
    good = [snapshot for snapshot in usable if snapshot.standing == "good"]
    if good:
        return good[-1]
    return usable[0] if usable else None


def as_window(kept: list[KeptStep]) -> list[WindowStep]:
    """What trials need of kept steps."""
    return [window_step(one.step, one.loss, one.lr) for one in kept]


def why_not(context: Context, step: Step) -> str:
    """Why the steps of this run cannot be tried again, in a sentence; empty where they can."""
    if context.agreement.size > 1 or context.sharded:
        return "whatif works in one process: with several ranks, use a capsule and --build."
    if context.outer is not None or takes_closure(context.optimizer):
        kind = type(context.outer or context.optimizer).__name__
        return f"whatif cannot run the update of {kind}, which evaluates or averages by itself."
    if any(map(_compiled, context.model.modules())):
        return "whatif cannot change a compiled model; build it without torch.compile."
    if not step.replayable:
        return (
            "whatif has no batches: run the steps by guard.step(loss_fn, batch), or hand the loss "
            "over by guard.loss(loss_fn, batch)."
        )
    return ""


def _compiled(module: nn.Module) -> bool:
    """By `torch.compile(module)`, or by `module.compile()` below a guard that listens."""
    if "_orig_mod" in dict(module.named_children()):
        return True
    called = compiled_call(module)
    return getattr(called, "below", called) is not None


# --- Gather what a decision needs: which fault, where a rewind would go, what can be left out.


HEALED = "torchft brings a replica back from its peers, and this one would part from them"
APART = "the ranks exchange nothing in this step, so they cannot go back together"


class SituationReader:
    """Gathers the facts that a decision needs. Ranks gather them together."""

    def __init__(
        self, context: Context, rewinder: Rewinder, anomalies: AnomalyCheck, *, reruns: bool
    ) -> None:
        """`reruns`: the guard runs the steps itself, so it can run them again."""
        self._context = context
        self._rewinder = rewinder
        self._anomalies = anomalies
        self._reruns = reruns

    def situation(self, incident: Incident, step: Step, *, committed: bool) -> Situation:
        """`committed`: the update was made before its verdict was read."""
        reading = incident.reading
        ruined = weights_ruined(incident.origin) or self._diverged(incident.reading)
        fault = self._fault(incident, committed=committed, ruined=ruined)
        repeatable = self._reruns and step.repeatable and not self._why_alone()
        may_act = fault == "anomaly" and self._anomalies.proven
        found_in_time = fault == "state" and not committed
        no_heal = self._no_peer(incident, damaged=found_in_time)
        rewind, why_not = self._way_back(
            fault, may_act=may_act, visible=not ruined, repeatable=repeatable
        )
        unseen = ruined and not reading.bad_state
        if found_in_time and unseen and rewind is None:
            # nothing to go back to: skipping loses nothing more, and its share is bounded
            fault = "data"
        leave_out, lost_share = self._part_to_leave_out(incident, step, repeatable=repeatable)
        return Situation(
            step=incident.step,
            fault=fault,
            rewind=rewind,
            may_act=may_act,
            no_rewind=why_not,
            no_heal=no_heal,
            can_retry=repeatable and self._worth_a_retry(incident, step, fault),
            at_start=found_in_time
            and (bool(reading.bad_state) and self._context.history.committed == 0),
            leave_out=leave_out,
            lost_share=lost_share,
            known=step.index in self._rewinder.past.lost_steps,
            new_scale=self._new_scale(step, reading),
        )

    def _why_alone(self) -> str:
        """Why this process can neither run the step again nor go back; empty where it can."""
        if voting_manager(self._context.outer) is not None:
            return HEALED
        return APART if self._context.agreement.apart else ""

    def _fault(self, incident: Incident, *, committed: bool, ruined: bool) -> Fault:
        """The fault decides the remedy: data, state, update or anomaly."""
        reading = incident.reading
        if incident.verdict.finite_anomaly:
            return "anomaly"
        if committed or damaged(reading) or ruined or stored_culprit(incident.origin):
            return "state"
        if incident.verdict.kind == "lr_mismatch":
            return "update"
        if not reading.state_born or reading.bad_state[0].startswith("buffer:"):
            # a buffer that turned bad in this step was written by the forward pass
            return "data"
        return "update"

    def _part_to_leave_out(
        self, incident: Incident, step: Step, *, repeatable: bool
    ) -> tuple[str, float]:
        """What is proven guilty, in words, and its share of the samples; else the whole step."""
        # ranks have to drop the same
        if repeatable and step.replayable and self._context.agreement.size == 1:
            words = proven_guilty(step, incident)
            if words:
                return words, share_of(step, incident)
        return "", 1.0

    def _worth_a_retry(self, incident: Incident, step: Step, fault: Fault) -> bool:
        """A step that did not fail when it was replayed gets one more chance."""
        by_chance = incident.origin is not None and incident.origin.reproduced is False
        return by_chance and fault == "data" and self._rewinder.retried != step.index

    def _way_back(
        self, fault: Fault, *, may_act: bool, visible: bool, repeatable: bool
    ) -> tuple[RewindPlan | None, str]:
        """Return where a rewind would go, or why it cannot; only for faults a rewind answers."""
        alone = self._why_alone()
        if alone:
            return None, alone
        if fault == "anomaly":
            if not may_act:
                return None, ""
            return self._rewinder.plan(transient=False, visible=False)
        if fault != "state" and allows_continuing(self._context.config.policy):
            return None, ""
        transient = repeatable and visible and fault == "state"
        return self._rewinder.plan(transient=transient, visible=visible)

    def _no_peer(self, incident: Incident, *, damaged: bool) -> str:
        """Why no rank can heal another, in words; planned by all ranks together where asked."""
        policy = self._context.config.policy
        if not damaged or not incident.reading.bad_state:
            return "no stored tensor is damaged"
        if "heal" not in policy.actions or self._context.budget.heals >= MOST_HEALS:
            return "the policy allows none"
        if self._context.agreement.apart:
            return APART
        return self._rewinder.healing.plan(incident.step)

    def _diverged(self, reading: Reading) -> bool:
        """Had the run diverged before it was non-finite? Ranks would have to ask together."""
        if reading.bad_inputs or reading.overflow or self._context.agreement.size > 1:
            return False
        return bool(self._rewinder.probation.divergence())

    def _new_scale(self, step: Step, reading: Reading) -> float | None:
        """A static loss scale that works on every rank, where the present one overflows."""
        if not reading.overflow or not self._context.config.loss_scale:
            return None
        of_ranks = self._context.agreement.in_step(
            lambda: {"scale": working_scale(step)}, "the loss scale"
        )
        return min(float(told["scale"]) for told in of_ranks)
