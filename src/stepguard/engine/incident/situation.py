"""Gather what a decision needs: which fault, where a rewind would go, what can be left out."""

from __future__ import annotations

from stepguard.engine.context import Context
from stepguard.engine.drivers.outer_optimizer import voting_manager
from stepguard.engine.incident.anomaly_check import AnomalyCheck
from stepguard.engine.incident.closer_look import working_scale
from stepguard.engine.incident.exploded_weights import stored_culprit, weights_ruined
from stepguard.engine.incident.rank_decision import damaged
from stepguard.engine.recover.partial_step import proven_guilty, share_of
from stepguard.engine.recover.rewind import Rewinder
from stepguard.policy.decide import Fault, Situation, allows_continuing
from stepguard.policy.rewind_choice import RewindPlan
from stepguard.records import Incident, Reading
from stepguard.state.step import Step

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
        ruined = self._ruined(incident)
        fault = self._fault(incident, committed=committed, ruined=ruined)
        repeatable = self._repeatable(step)
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
            at_start=found_in_time and self._bad_before_first_step(reading),
            leave_out=leave_out,
            lost_share=lost_share,
            known=step.index in self._rewinder.past.lost_steps,
            new_scale=self._new_scale(step, reading),
        )

    def _repeatable(self, step: Step) -> bool:
        """Can the step be run again? Ranks that decide alone would run its collectives alone."""
        return self._reruns and step.repeatable and not self._why_alone()

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

    def _bad_before_first_step(self, reading: Reading) -> bool:
        return bool(reading.bad_state) and self._context.history.committed == 0

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
        if "heal" not in policy.actions or self._context.budget.heals >= policy.max_heals:
            return "the policy allows none"
        if self._context.agreement.apart:
            return APART
        return self._rewinder.healing.plan(incident.step)

    def _ruined(self, incident: Incident) -> bool:
        """Are the weights ruined but finite? An earlier batch fails on them, or they diverged."""
        return weights_ruined(incident.origin) or self._diverged(incident.reading)

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
