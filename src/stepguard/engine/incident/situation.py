"""What the policy is asked: which fault it is, where a rewind would go, what can be left out."""

from __future__ import annotations

from stepguard.detect.anomalies import MOVED
from stepguard.engine.context import Context
from stepguard.engine.incident.anomaly_check import Suspicion
from stepguard.engine.incident.closer_look import working_scale
from stepguard.engine.incident.exploded_weights import stored_culprit, weights_ruined
from stepguard.engine.recover.partial_step import proven_guilty, share_of
from stepguard.engine.recover.rewind import Recovery
from stepguard.policy.decide import Fault, Situation, allows_continuing
from stepguard.policy.rewind_choice import RewindPlan
from stepguard.records import Incident, Reading
from stepguard.records.verdict import FINITE_KINDS
from stepguard.state.step import Step


class SituationReader:
    """Gathers the facts that a decision needs. Ranks gather them together."""

    def __init__(
        self, context: Context, recovery: Recovery, anomalies: Suspicion, *, reruns: bool
    ) -> None:
        """`reruns`: the guard runs the steps itself, so it can run them again."""
        self._context = context
        self._recovery = recovery
        self._anomalies = anomalies
        self._reruns = reruns

    def situation(self, incident: Incident, step: Step, *, committed: bool) -> Situation:
        """`committed`: the update was made before its verdict was read."""
        context = self._context
        reading = incident.reading
        ruined = weights_ruined(incident.origin) or self._diverged(reading)
        fault = self._fault(incident, committed=committed, ruined=ruined)
        repeatable = self._reruns and step.replayable
        may_act = fault == "anomaly" and self._anomalies.proven
        remedy, why_not = self._way_back(
            fault, may_act=may_act, visible=not ruined, repeatable=repeatable
        )
        damaged_only_by_update = fault == "state" and ruined and not reading.bad_state
        if damaged_only_by_update and remedy is None and not committed:
            # nothing to go back to: skipping loses nothing more, and its share is bounded
            fault = "data"
        at_start = fault == "state" and bool(reading.bad_state)
        if context.history.committed > 0 or committed:
            at_start = False
        leave_out = ""
        lost_share = 1.0
        if repeatable and context.agreement.size == 1:
            leave_out = proven_guilty(step, incident)
        if leave_out:
            lost_share = share_of(step, incident)
        return Situation(
            step=incident.step,
            fault=fault,
            rewind=remedy,
            may_act=may_act,
            no_rewind=why_not,
            can_retry=repeatable and self._worth_a_retry(incident, step, fault),
            at_start=at_start,
            leave_out=leave_out,
            lost_share=lost_share,
            known=step.index in self._recovery.past.lost_steps,
            new_scale=self._new_scale(step, reading),
        )

    def _fault(self, incident: Incident, *, committed: bool, ruined: bool) -> Fault:
        """The fault decides the remedy: data, state, update or anomaly."""
        reading = incident.reading
        if incident.verdict.kind in FINITE_KINDS:
            return "anomaly"
        damaged = bool(reading.bad_state) and not reading.state_born
        if committed or damaged or ruined or stored_culprit(incident.origin):
            return "state"
        if incident.verdict.kind == "lr_mismatch":
            return "update"
        # a buffer that turned bad in this step was written by the forward pass
        by_forward = reading.state_born and reading.bad_state[0].startswith("buffer:")
        if reading.state_born and not by_forward:
            return "update"
        return "data"

    def _worth_a_retry(self, incident: Incident, step: Step, fault: Fault) -> bool:
        """A step that did not fail when it was replayed gets one more chance."""
        by_chance = incident.origin is not None and incident.origin.reproduced is False
        return by_chance and fault == "data" and self._recovery.retried != step.index

    def _way_back(
        self, fault: Fault, *, may_act: bool, visible: bool, repeatable: bool
    ) -> tuple[RewindPlan | None, str]:
        """Return where a rewind would go, or why it cannot; only for faults a rewind answers."""
        if fault == "anomaly":
            if not may_act:
                return None, ""
            return self._recovery.plan(transient=False, visible=False)
        if fault != "state" and allows_continuing(self._context.config.policy):
            return None, ""
        transient = repeatable and visible and fault == "state"
        return self._recovery.plan(transient=transient, visible=visible)

    def _diverged(self, reading: Reading) -> bool:
        """Had the loss run far above everything, on moved weights, before it was non-finite?"""
        history = self._context.history
        if reading.bad_inputs or reading.overflow or not history.losses:
            return False
        if self._context.agreement.size > 1 or not history.level > history.far_limit:
            return False
        moved = self._recovery.probation.moved_since_good()
        return moved is not None and not moved < MOVED

    def _new_scale(self, step: Step, reading: Reading) -> float | None:
        """A static loss scale that works on every rank, where the present one overflows."""
        if not reading.overflow or not self._context.config.loss_scale:
            return None
        of_ranks = self._context.agreement.together(lambda: {"scale": working_scale(step)})
        return min(float(told["scale"]) for told in of_ranks)
