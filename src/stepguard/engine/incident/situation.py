"""Decide about an incident: which fault it is, what can be done about it, and when to stop."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any, Literal, get_args

from torch import nn

from stepguard._errors import EXIT_HALTED, TrainingHalted
from stepguard.engine.context import Context, LeadUp
from stepguard.engine.drivers.scaler import voting_manager
from stepguard.engine.drivers.schedule import takes_closure
from stepguard.engine.incident.anomaly_check import AnomalyCheck
from stepguard.engine.incident.closer_look import (
    accept,
    blamed_on_update,
    exploded,
    mark_foreign_parameter,
    stored_culprit,
    surfaces_only,
    weights_ruined,
    working_scale,
)
from stepguard.engine.protect import explain_or_warn, in_words, warn_not_explained
from stepguard.engine.recover.rewind import (
    Rewinder,
    loss_function_changed,
    proven_guilty,
    share_of,
)
from stepguard.engine.recover.snapshots import KeptStep, SnapshotKeeper
from stepguard.judge.decide import (
    MOST_HEALS,
    Budget,
    Fault,
    RewindPlan,
    Situation,
    allows_continuing,
)
from stepguard.judge.decide import decide as choose_remedy
from stepguard.ranks.one_decision import OneDecision
from stepguard.records import Decision, Incident, Origin, Reading
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
        return (
            f"whatif cannot run the update of {kind}, which evaluates the loss or averages "
            "weights by itself."
        )
    if any(map(_compiled, context.model.modules())):
        return "whatif cannot change a compiled model; build it without torch.compile."
    if not step.replayable:
        return (
            "whatif has no batches: run the steps with guard.step(loss_fn, batch), or "
            "compute the loss with guard.loss(loss_fn, batch)."
        )
    return ""


def _compiled(module: nn.Module) -> bool:
    """By `torch.compile(module)`, or by `module.compile()` below a guard that listens."""
    if "_orig_mod" in dict(module.named_children()):
        return True
    called = compiled_call(module)
    return getattr(called, "below", called) is not None


# --- Decide: what is the fault, what can be done about it, and what is done, on every rank alike.


HEALED = "torchft restores a replica from its peers; a local rewind would separate it from them"
UNDECIDED = "stepguard could not decide because of an internal fault"
DISARMED = "the state itself is damaged, and an internal fault of stepguard prevents its repair"
VERIFY_FROM = 2
"""Bad steps in a row after which the weights are verified on an earlier batch."""

Find = Callable[[Step, Reading], Origin]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPart:
    """What one rank reports of an incident."""

    id: str
    """A name that is free here."""
    origin: Origin | None = None
    again: tuple[float, float] | None = None
    """Loss of an earlier healthy batch now and when it was new, where that was asked for."""
    scale: float | None = None
    """A static loss scale that works here, where the present one overflows."""
    offer: dict[str, Any] | None = None
    """Where this rank could go back to, where the reading shows already that it may have to."""
    fault: str = ""
    """Why the origin is not known, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAnswer:
    """What the first rank has decided for all."""

    decision: Decision
    budget: Budget
    situation: Situation
    givers: dict[str, int]
    """By shard: the healthy rank that heals the others."""


class Decider:
    """Locates an incident and decides about it. Ranks do so together."""

    def __init__(
        self,
        context: Context,
        rewinder: Rewinder,
        anomalies: AnomalyCheck,
        ranks: OneDecision,
        find: Find,
        *,
        reruns: bool,
    ) -> None:
        """`reruns`: the guard runs the steps itself, so it can run them again."""
        self._context = context
        self._rewinder = rewinder
        self._anomalies = anomalies
        self._ranks = ranks
        self._find = find
        self._reruns = reruns
        self._tell = partial(context.outputs.note, "unexplained")
        self._parts: list[OwnPart] = []
        """What the ranks have reported of the incident at hand."""

    def locate(
        self, incident: Incident, step: Step, *, wanted: bool, committed: bool = False
    ) -> Incident:
        """Add the origin, where that is wanted: what all ranks report, put together."""
        agreement = self._context.agreement
        self._rewinder.common = None

        def look() -> dict[str, OwnPart]:
            part = self._own_part(incident, step, wanted)
            # one that cannot tell now is asked again, where its fault is reported
            with suppress(Exception):
                if agreement.size > 1 and self._goes_back(incident, committed):
                    part = replace(part, offer=self._offer(incident))
            return {"part": part}

        self._parts = []
        told = agreement.together(look, "the origin")
        self._parts = [facts["part"] for facts in told]
        for rank, part in zip(agreement.members, self._parts, strict=True):
            if part.fault:
                who = f"rank {rank}: " if agreement.size > 1 else ""
                warn_not_explained(self._tell, f"{who}{part.fault}")
        return self._merged(incident, self._parts)

    def decide(self, incident: Incident, step: Step, *, committed: bool) -> Incident:
        """Add the decision. `committed`: the update was made before its verdict was read.

        The first rank decides for all by what they reported, and nothing that can fail is between:
        so a fault on one of them costs an explanation, or at worst the step on all of them.
        """
        context = self._context
        try:
            answer = self._answer(incident, step, committed)
        except Exception as fault:
            # raised on all ranks alike
            warn_not_explained(self._tell, in_words(fault))
            return replace(incident, decision=self._undecided(incident))
        decision = answer.decision
        situation = answer.situation
        context.budget = answer.budget
        self._rewinder.planner.chosen = situation.rewind
        self._rewinder.healing.givers = answer.givers
        self._rewinder.healing.damaged = self._ranks.damaged()
        hurt = situation.fault in ("state", "anomaly") or weights_ruined(incident.origin)
        mark = partial(self._rewinder.probation.incident, incident.step)
        explain_or_warn(None, self._tell, mark, hurt=hurt and decision.action != "heal")
        if situation.at_start and decision.action == "note":
            accept(context, incident.reading.bad_state)
        if context.hooks.what_helps is not None:
            look = partial(context.hooks.what_helps, incident, decision)
            decision = explain_or_warn(decision, self._tell, look)
        return replace(incident, decision=decision)

    def _answer(self, incident: Incident, step: Step, committed: bool) -> RankAnswer:
        """The first rank's decision. Whether a way back is needed all of them know: by the reading,
        with which they have sent their offers, or by the origin, after which they are asked.
        """
        agreement = self._context.agreement
        planner = self._rewinder.planner
        offers = [part.offer for part in self._parts if part.offer is not None]
        if not self._goes_back(incident, committed):
            offers = []
        elif len(offers) < agreement.size:
            offers = agreement.together(partial(self._offer, incident), "the choice of a rewind")
        if offers:
            self._rewinder.common = planner.common(offers)
        while True:
            answer = agreement.from_first(partial(self._chosen, incident, step, offers, committed))
            plan = answer.situation.rewind
            if answer.decision.action != "rewind" or plan is None:
                return answer
            if plan.target.kind == "snapshot":
                return answer
            # a checkpoint counts only once every rank has read it
            there = agreement.together(partial(planner.fetch, plan), "reading a checkpoint")
            if all(told["there"] for told in there):
                return answer
            planner.tried.append(plan)

    # --- what this rank tells

    def _own_part(self, incident: Incident, step: Step, locates: bool) -> OwnPart:
        part = OwnPart(id=incident.id)
        try:
            if locates:
                part = replace(part, origin=self._own_origin(incident, step))
            located = replace(incident, origin=part.origin)
            if part.origin is not None and self._worth_verifying(located):
                part = replace(part, again=self._earlier_batch())
            if incident.reading.overflow and self._context.config.loss_scale:
                part = replace(part, scale=working_scale(step))
        except Exception as fault:
            part = replace(part, fault=in_words(fault))
        return part

    def _earlier_batch(self) -> tuple[float, float] | None:
        """What an earlier batch, fine in its time, gives now, where that tells of the weights."""
        again = self._anomalies.earlier_batch_now()
        if again is None or not exploded(again):
            return None
        # ranks would have to ask together
        alone = self._context.agreement.size == 1
        if alone and loss_function_changed(self._rewinder.snapshots):
            return None
        return again

    def _own_origin(self, incident: Incident, step: Step) -> Origin | None:
        if self._context.agreement.size == 1:
            origin: Origin | None = self._find(step, incident.reading)
        else:
            origin = self._ranks.find(step, incident.reading, self._find)
        return mark_foreign_parameter(self._context, origin)

    def _worth_verifying(self, incident: Incident) -> bool:
        """Float32 overflowed for no reason of its own, or one bad step follows another."""
        if surfaces_only(incident.origin):
            return True
        if incident.verdict.kind not in BORN_IN_THE_STEP:
            return False
        if self._context.budget.consecutive + 1 < VERIFY_FROM:
            return False
        reading = incident.reading
        if reading.bad_inputs or reading.bad_state or reading.overflow or reading.state_born:
            return False
        origin = incident.origin
        return origin is None or (origin.phase != "input" and not origin.samples)

    def _offer(self, incident: Incident) -> dict[str, Any]:
        """Where this rank could go back to, and what it holds that others may have lost."""
        offer = {"rewind": self._rewinder.offer(), "heal": None}
        if self._context.agreement.size > 1 and not self._policy_against_healing(incident):
            offer["heal"] = self._rewinder.healing.offer(self._ranks.damaged())
        return offer

    # --- what all of them know

    def _merged(self, incident: Incident, parts: list[OwnPart]) -> Incident:
        """The incident with the origin that all ranks go on with, and one name on all of them."""
        origins = [part.origin for part in parts]
        origin = origins[0]
        if len(parts) > 1:
            origin = self._ranks.first_origin(incident.reading, origins)
        # a number is added where a folder of that name is there already: the same on all ranks
        name = max((part.id for part in parts), key=lambda one: (len(one), one))
        incident = replace(incident, id=name, origin=origin)
        repeated = max((part.again for part in parts if part.again), key=_rise, default=None)
        if origin is None or repeated is None:
            return incident
        # an earlier batch, fine in its time, now fails as well: blame the weights
        now, before = repeated
        reading = replace(incident.reading, repeat_loss=now, repeat_before=before)
        return replace(incident, reading=reading, origin=blamed_on_update(origin, reading))

    # --- what the first rank decides

    def _chosen(
        self,
        incident: Incident,
        step: Step,
        offers: list[dict[str, Any]],
        committed: bool,
    ) -> RankAnswer:
        context = self._context
        reading = incident.reading
        fault = self._fault(incident, committed=committed)
        repeatable = self._reruns and step.repeatable and not self._heals_itself()
        found_in_time = fault == "state" and not committed
        damaged_state = found_in_time and bool(reading.bad_state)
        givers, no_heal = self._healing(incident, offers, wanted=damaged_state)
        rewind, why_not = self._way_back(incident, offers, fault, repeatable=repeatable)
        if found_in_time and not damaged_state and rewind is None and self._ruined(incident):
            # nothing to go back to: skipping loses nothing more, and its share is bounded
            fault = "data"
        leave_out, lost_share = self._removable(incident, step, repeatable=repeatable)
        scales = [part.scale for part in self._parts if part.scale is not None]
        situation = Situation(
            step=incident.step,
            fault=fault,
            rewind=rewind,
            may_act=fault == "anomaly" and self._anomalies.proven,
            no_rewind=why_not,
            no_heal=no_heal,
            can_retry=repeatable and fault == "data" and self._worth_a_retry(incident, step),
            at_start=damaged_state and not context.history.committed,
            leave_out=leave_out,
            lost_share=lost_share,
            known=step.index in self._rewinder.past.lost_steps,
            new_scale=min(scales, default=None),
        )
        decision, budget = choose_remedy(situation, context.config.policy, context.budget)
        return RankAnswer(decision=decision, budget=budget, situation=situation, givers=givers)

    def _way_back(
        self, incident: Incident, offers: list[dict[str, Any]], fault: Fault, *, repeatable: bool
    ) -> tuple[RewindPlan | None, str]:
        """Where a rewind would go, or why it cannot; only where the ranks were asked for it."""
        if not offers:
            return None, HEALED if self._heals_itself() else ""
        visible = fault != "anomaly" and not self._ruined(incident)
        return self._rewinder.plan(
            [offer["rewind"] for offer in offers],
            transient=repeatable and visible and fault == "state",
            visible=visible,
        )

    def _removable(self, incident: Incident, step: Step, *, repeatable: bool) -> tuple[str, float]:
        """What is proven guilty, in words, and its share of the samples; else the whole step."""
        # ranks would have to drop the same
        if repeatable and step.replayable and self._context.agreement.size == 1:
            words = proven_guilty(step, incident)
            if words:
                return words, share_of(step, incident)
        return "", 1.0

    def _worth_a_retry(self, incident: Incident, step: Step) -> bool:
        """A step that did not fail when it was replayed gets one more chance."""
        by_chance = incident.origin is not None and incident.origin.reproduced is False
        return by_chance and self._rewinder.retried != step.index

    def _healing(
        self, incident: Incident, offers: list[dict[str, Any]], *, wanted: bool
    ) -> tuple[dict[str, int], str]:
        """Return which rank heals each shard, or why none can."""
        if not wanted:
            return {}, "no stored tensor is damaged"
        why = self._policy_against_healing(incident)
        if why or not offers:
            return {}, why or HEALED
        if len(offers) == 1:
            return {}, "there is one rank only"
        return self._rewinder.healing.plan([offer["heal"] for offer in offers])

    def _fault(self, incident: Incident, *, committed: bool) -> Fault:
        """The fault decides the remedy: data, state, update or anomaly."""
        reading = incident.reading
        if incident.verdict.finite_anomaly:
            return "anomaly"
        if committed or damaged(reading) or self._ruined(incident):
            return "state"
        if stored_culprit(incident.origin):
            return "state"
        if incident.verdict.kind == "lr_mismatch":
            return "update"
        if not reading.state_born or reading.bad_state[0].startswith("buffer:"):
            # a buffer that turned bad in this step was written by the forward pass
            return "data"
        return "update"

    def _goes_back(self, incident: Incident, committed: bool) -> bool:
        """Is this a fault that a rewind, or a healthy rank, can answer?"""
        if self._heals_itself():
            return False
        fault = self._fault(incident, committed=committed)
        if fault == "anomaly":
            return self._anomalies.proven
        return fault == "state" or not allows_continuing(self._context.config.policy)

    def _ruined(self, incident: Incident) -> bool:
        """Were the weights bad before the step, though finite?"""
        if weights_ruined(incident.origin):
            return True
        reading = incident.reading
        if reading.bad_inputs or reading.overflow or self._context.agreement.size > 1:
            # ranks would have to ask together
            return False
        return bool(self._rewinder.probation.divergence())

    def _heals_itself(self) -> bool:
        return voting_manager(self._context.outer) is not None

    def _policy_against_healing(self, incident: Incident) -> str:
        policy = self._context.config.policy
        if not incident.reading.bad_state:
            return "no stored tensor is damaged"
        if "heal" not in policy.actions or self._context.budget.heals >= MOST_HEALS:
            return "the policy allows none"
        return ""

    def _undecided(self, incident: Incident) -> Decision:
        """Skip the step within the budget of lost steps; stop where that leaves damaged weights."""
        context = self._context
        context.budget = context.budget.spend().lose(1.0)
        why = context.budget.exceeded(context.config.policy)
        if damaged(incident.reading):
            why = why or "the state itself is damaged"
        return Decision(
            action="stop" if why else "skip",
            reason=f"{UNDECIDED}; {why}" if why else UNDECIDED,
            consecutive=context.budget.consecutive,
            total=context.budget.total,
        )


def last_resort(incident: Incident) -> Incident:
    """Nothing could be decided and the guard is disarmed: never train on with damaged weights."""
    if incident.decision is not None or not damaged(incident.reading):
        return incident
    return replace(incident, decision=Decision(action="stop", reason=DISARMED))


def damaged(reading: Reading) -> bool:
    """Is what the run holds bad, so that leaving a step out does not help?"""
    return bool(reading.missed) or (bool(reading.bad_state) and not reading.state_born)


def _rise(pair: tuple[float, float]) -> float:
    now, then = pair
    if not math.isfinite(now):
        return math.inf
    return now - then
