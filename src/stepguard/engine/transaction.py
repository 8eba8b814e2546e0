"""From a reading to an incident on record: judge, locate, diagnose, decide. Only ever adds to the
incident.

What was decided is applied and recorded by `engine/step_end.py`, in this order: what is told is
what was done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from stepguard.detect import judge
from stepguard.detect.anomalies import MOVED
from stepguard.detect.judge import alarming
from stepguard.diagnose import diagnose
from stepguard.engine.context import Context
from stepguard.engine.incident.anomaly_check import Suspicion
from stepguard.engine.incident.closer_look import (
    accept,
    examine,
    somebody_elses,
    stored_trouble,
    working_scale,
)
from stepguard.engine.incident.exploded_weights import (
    blamed_on_update,
    ruined,
    stored_culprit,
    surfaces_only,
)
from stepguard.engine.incident.incident_record import incident_folder, record
from stepguard.engine.incident.lost_samples import naming
from stepguard.engine.incident.presumed_verdict import presumed_reading
from stepguard.engine.incident.run_facts import run_facts
from stepguard.engine.protect import spare
from stepguard.engine.recover.partial_step import proven_guilty, share_of
from stepguard.engine.recover.snapshots import Recovery
from stepguard.locate import locate
from stepguard.policy import decide
from stepguard.policy.decide import Fault, Situation, goes_on
from stepguard.policy.rewind_choice import Remedy
from stepguard.records import Decision, Incident, Origin, Reading, Verdict
from stepguard.records.codec import from_jsonable, to_jsonable
from stepguard.state.replay import gradients_came_back_finite, model_finite, rerun
from stepguard.state.step import Step

FINITE_KINDS = ("spike", "drift")
BORN_IN_THE_STEP = ("nonfinite_loss", "nonfinite_gradient", "infinite_norm")
VERIFY_FROM = 2
"""Bad steps in a row from which on the weights are verified on an earlier batch, wherever the bad
value was born.
"""


class Pipeline:
    """What happens after a step has been read."""

    def __init__(
        self,
        context: Context,
        recovery: Recovery,
        find: Callable[[Step, Reading], Origin] | None = None,
        *,
        reruns: bool = True,
    ) -> None:
        """`reruns`: the guard runs the steps itself, so it can run them again for good."""
        self._context, self._recovery = context, recovery
        self._find = naming(
            context, find or (lambda step, reading: locate(step, reading, context.effort))
        )
        self._reruns = reruns
        self._suspicion = Suspicion(context, recovery, clips_itself=reruns)

    def assess(self, step: Step, reading: Reading) -> tuple[Reading, Verdict]:
        """The verdict, with a closer look where the first one asks for it."""
        context = self._context
        context.expect_declared_rates(reading.lr)
        if (
            alarming(reading) and not reading.state_born
        ):  # what the update made has been named, and undone
            reading = self._agree(step, reading)
        verdict = judge(reading, context.history, context.config)
        if verdict.kind in FINITE_KINDS:
            return self._suspicion.weigh(step, reading, verdict)
        return reading, verdict

    def respond(
        self, step: Step, reading: Reading, verdict: Verdict, *, committed: bool = False
    ) -> Incident:
        """Locate, diagnose and decide. The update has already been vetoed (or, `committed`, came
        too early).
        """
        context, incident = self._context, self.open_incident(step, reading, verdict)
        try:
            incident = self._explain(incident, step)
            incident = replace(incident, decision=self._decided(incident, step, committed))
        except BaseException:
            record(context, incident, step)
            raise
        if incident.decision is not None and incident.decision.action == "note":
            return record(context, incident, step)  # nothing is to be applied
        context.unrecorded = (incident, step)
        return incident

    def open_incident(self, step: Step, reading: Reading, verdict: Verdict) -> Incident:
        """What is known of a bad step before anything has been looked at."""
        context = self._context
        return Incident(
            id=self._name(step, verdict),
            step=step.index,
            verdict=verdict,
            reading=reading,
            run=str(context.config.run_dir) if context.config.run_dir is not None else None,
            rank=context.agreement.rank,
        )

    def _name(self, step: Step, verdict: Verdict) -> str:
        """A step number comes again after a rewind, and in a second run in the same folder."""
        name = f"{step.index:08d}-{verdict.kind}"
        known = {incident.id for incident in self._context.incidents}
        candidates = chain([name], (f"{name}-{i}" for i in count(2)))
        return next(n for n in candidates if n not in known and not self._on_disk(n))

    def _on_disk(self, name: str) -> bool:
        run_dir = self._context.config.run_dir
        return (
            run_dir is not None
            and incident_folder(Path(run_dir), name, self._context.agreement.rank).exists()
        )

    def last_look(self, step: Step) -> Incident | None:
        """At the end of a run: were the parameters still finite after the last update?"""
        reading = Reading(
            step=step.index, lr=self._context.lr, bad_state=tuple(stored_trouble(self._context))
        )
        said = self._context.incidents[-1].reading.bad_state if self._context.incidents else ()
        verdict = judge(reading, self._context.history, self._context.config)
        if verdict.bad and not set(reading.bad_state) <= set(said):
            return self.respond(step, reading, verdict, committed=True)
        return None

    def note(self, reading: Reading, verdict: Verdict) -> None:
        """Worth a line, not an action."""
        context = self._context
        fields = {
            "step": reading.step,
            "kind": verdict.kind,
            "summary": verdict.summary,
            "evidence": verdict.evidence,
        }
        context.note("note", fields)
        if context.human is not None:
            context.human.note(verdict.summary, reading.step, verdict.kind)
        context.terminal.note(verdict.summary, reading.step, verdict.kind)

    # --- where and why
    # -----------------------------------------------------------------------------------------

    def _explain(self, incident: Incident, step: Step) -> Incident:
        """Where and why. The place is part of the decision, which ranks take together: there a
        fault is everybody's.
        """
        context = self._context
        if context.config.locate and context.agreement.size == 1:
            incident = spare(incident, self._unexplained, self._located, incident, step)
        elif context.config.locate:
            incident = self._located(incident, step)
        return spare(incident, self._unexplained, self._diagnosed, incident)

    def _located(self, incident: Incident, step: Step) -> Incident:
        origin = somebody_elses(self._context, self._locate(step, incident.reading))
        return self._suspect_update(replace(incident, origin=origin))

    def _diagnosed(self, incident: Incident) -> Incident:
        return replace(
            incident, findings=diagnose(incident, run_facts(self._context, incident.reading))
        )

    def _unexplained(self, why: str) -> None:
        self._recovery.say("unexplained", why)

    def _suspect_update(self, incident: Incident) -> Incident:
        """Are the weights themselves ruined? An earlier batch, fine in its time, then fails on them
        as well.

        Asked where float32 overflowed for no reason of its own, and where one bad step follows
        another. A loss function that has changed since fails on earlier weights too: then the
        weights are not to blame.
        """
        if incident.origin is None or not self._worth_verifying(incident):
            return incident
        again = self._suspicion.earlier_batch_now()
        if again is None or not ruined(again) or self._loss_function_changed():
            return incident
        reading = replace(incident.reading, repeat_loss=again[0], repeat_before=again[1])
        return replace(incident, reading=reading, origin=blamed_on_update(incident.origin, reading))

    def _worth_verifying(self, incident: Incident) -> bool:
        if surfaces_only(incident.origin):
            return True
        origin, reading = incident.origin, incident.reading
        explained = bool(
            reading.bad_inputs or reading.bad_state or reading.overflow or reading.state_born
        )
        by_batch = origin is not None and (origin.phase == "input" or bool(origin.samples))
        repeated = self._context.budget.consecutive + 1 >= VERIFY_FROM
        return (
            repeated and incident.verdict.kind in BORN_IN_THE_STEP and not (explained or by_batch)
        )

    def _loss_function_changed(self) -> bool:
        """Does an earlier step fail now even on the weights it had?"""
        if self._context.agreement.size > 1:
            return False  # ranks would have to ask together
        return self._recovery.loss_function_changed()

    def _locate(self, step: Step, reading: Reading) -> Origin | None:
        """The worst rank looks, alone; then everybody knows."""
        agreement = self._context.agreement
        if agreement.size == 1:
            return self._find(step, reading)
        leader = reading.bad_ranks[0] if reading.bad_ranks else 0

        def look() -> dict[str, Any]:
            return (
                to_jsonable(replace(self._find(step, reading), rank=leader))
                if agreement.rank == leader
                else {}
            )

        told = agreement.together(look)[leader]
        return from_jsonable(Origin, told) if told else None

    # --- what to do
    # --------------------------------------------------------------------------------------------

    def _decided(self, incident: Incident, step: Step, committed: bool) -> Decision:
        """A fault costs the better remedy; the step stays vetoed. Ranks decide together: there it
        is everybody's.
        """
        if self._context.agreement.size > 1:
            return self._decide(incident, step, committed)
        refused = Decision(action="skip", reason="stepguard could not decide by a fault of its own")
        return spare(refused, self._unexplained, self._decide, incident, step, committed)

    def _decide(self, incident: Incident, step: Step, committed: bool) -> Decision:
        context, recovery, reading = self._context, self._recovery, incident.reading
        ruined_weights = weights_ruined(incident.origin) or self._diverged(reading)
        fault = self._fault(incident, committed, ruined_weights)
        by_chance = (
            incident.origin is not None
            and incident.origin.reproduced is False
            and fault != "anomaly"
        )
        again = self._reruns and step.replayable
        may_act = fault == "anomaly" and self._suspicion.proven
        remedy, why_not = self._way_back(
            fault, may_act=may_act, visible=not ruined_weights, repeats=again
        )
        if (
            fault == "state"
            and ruined_weights
            and remedy is None
            and not committed
            and not reading.bad_state
        ):
            # nothing to go back to: skipping loses nothing more, and its share is bounded
            fault = "data"
        leave_out = proven_guilty(step, incident) if again and context.agreement.size == 1 else ""
        situation = Situation(
            step=incident.step,
            fault=fault,
            remedy=remedy,
            may_act=may_act,
            no_rewind=why_not,
            can_retry=by_chance and again and fault == "data" and recovery.retried != step.index,
            at_start=fault == "state"
            and context.history.committed == 0
            and not committed
            and bool(reading.bad_state),
            leave_out=leave_out,
            lost_share=share_of(step, incident) if leave_out else 1.0,
            known=recovery.lost_before(step.index),
            new_scale=self._new_scale(step)
            if reading.overflow and context.config.loss_scale
            else None,
        )
        decision, context.budget = decide(situation, context.config.policy, context.budget)
        recovery.incident(incident.step, hurt=fault in ("state", "anomaly"))
        if situation.at_start and decision.action == "note":
            accept(context, reading.bad_state)
        return decision

    def _way_back(
        self, fault: Fault, *, may_act: bool, visible: bool, repeats: bool
    ) -> tuple[Remedy | None, str]:
        """Where a rewind would go, or why it cannot; asked only for faults that a rewind answers."""
        if fault == "anomaly":
            return self._recovery.plan(transient=False, visible=False) if may_act else (None, "")
        if fault != "state" and goes_on(self._context.config.policy):
            return None, ""
        return self._recovery.plan(
            transient=repeats and visible and fault == "state", visible=visible
        )

    def _diverged(self, reading: Reading) -> bool:
        """Had the loss run far above everything, on weights that left where they were, before it
        became non-finite?
        """
        history = self._context.history
        by_batch = bool(reading.bad_inputs) or reading.overflow
        if (
            by_batch
            or not history.losses
            or not history.level > history.far_limit
            or self._context.agreement.size > 1
        ):
            return False
        moved = self._recovery.moved_since_good()
        return moved is not None and not moved < MOVED

    def _fault(self, incident: Incident, committed: bool, ruined_weights: bool) -> Fault:
        reading = incident.reading
        if incident.verdict.kind in FINITE_KINDS:
            return "anomaly"
        damaged = bool(reading.bad_state) and not reading.state_born
        if committed or damaged or stored_culprit(incident.origin) or ruined_weights:
            return "state"
        made_by_update = reading.state_born and not reading.bad_state[0].startswith("buffer:")
        return "update" if made_by_update or incident.verdict.kind == "lr_mismatch" else "data"

    def _new_scale(self, step: Step) -> float:
        """A static loss scale that works on every rank."""
        everybody = self._context.agreement.together(lambda: {"scale": working_scale(step)})
        return min(float(told["scale"]) for told in everybody)

    def _agree(self, step: Step, reading: Reading) -> Reading:
        """Every rank goes on with the reading of the worst one, so that all decide the same."""
        context = self._context
        if context.agreement.size == 1:
            presumed = presumed_reading(context, reading)
            return spare(presumed, self._unexplained, examine, context, step, reading)

        def look() -> dict[str, Any]:
            own = examine(context, step, reading)
            return {"trouble": own_trouble(step, own), "reading": to_jsonable(own)}

        everybody = context.agreement.together(look)
        worst = max(told["trouble"] for told in everybody)
        bad = tuple(rank for rank, told in enumerate(everybody) if told["trouble"] == worst > 0)
        leader = from_jsonable(Reading, everybody[bad[0] if bad else 0]["reading"])
        return replace(leader, bad_ranks=bad)


def own_trouble(step: Step, reading: Reading) -> int:
    """How surely it is this rank that made the bad value: 2 by its own doing, 1 by gradients all
    have exchanged, 0.
    """
    if reading.bad_micro_batches or reading.bad_state or reading.bad_inputs:
        return 2
    if reading.grads_finite or reading.overflow:
        return 0
    if step.replayable:
        return 0 if rerun(step).grads_finite else 2
    if step.model_only:
        return 0 if gradients_came_back_finite(step) and model_finite(step) else 2
    return 1


def weights_ruined(origin: Origin | None) -> bool:
    """Has an earlier batch, fine in its time, been seen to fail on the present weights?"""
    return origin is not None and "weights_ruined" in origin.notes


def let_through(verdict: Verdict, incident: Incident | None) -> bool:
    """A finite step that is only told, or that nobody could decide on: the update goes on."""
    decision = incident.decision if incident is not None else None
    return verdict.kind in FINITE_KINDS and (decision is None or decision.action == "note")
