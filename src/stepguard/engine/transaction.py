"""One step: read, agree, judge, veto, locate, diagnose, decide, apply, record, in this order.

The drivers (engine/drivers) differ in who calls forward, backward and update; what happens between
is here, one method a verb. `assess` is agree and judge. `respond` is veto to decide, for a bad
step. `conclude` is apply and record, once the update is out of the way: what is reported is what
was done. An incident only ever gains fields on its way, so that a fault still leaves a valid one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from stepguard.diagnose import diagnose as find_causes
from stepguard.engine.context import Context
from stepguard.engine.incident import incident_record
from stepguard.engine.incident.anomaly_check import AnomalyCheck
from stepguard.engine.incident.closer_look import (
    examine,
    presumed_reading,
    presumed_verdict,
    stored_trouble,
)
from stepguard.engine.incident.run_facts import change_settings, not_applied, run_facts
from stepguard.engine.incident.samples import with_sample_names
from stepguard.engine.incident.situation import Decider, Find, halt, keep_lead_up, last_resort
from stepguard.engine.incident.trials import try_remedies
from stepguard.engine.protect import Protection, explain_or_warn, warn_not_explained
from stepguard.engine.reader import Pending, Reader
from stepguard.engine.recover.rewind import Rewinder
from stepguard.judge import judge as judge_reading
from stepguard.judge.judge import alarming
from stepguard.locate import locate
from stepguard.ranks.one_decision import OneDecision
from stepguard.records import Decision, Incident, Origin, Reading, Verdict
from stepguard.records.incident import OK
from stepguard.state.batch import Step

OTHERS_HAVE_NOT_SEEN = "only this rank saw it, after the last step: nothing is restored"
LATER = (
    "only this rank saw it, after the gradients were exchanged: the other ranks learn of it next"
)


class VetoedUpdate(Protocol):
    """The update of the step at hand, and how its driver can stop it."""

    def stop(self) -> None:
        """Keep the optimizer from moving anything."""

    def restore_buffers(self) -> object:
        """Put back the buffers as they were before the forward pass."""


class Transaction:
    """What the guard does between the user's backward pass and the user's next step."""

    def __init__(
        self,
        context: Context,
        protect: Protection,
        rewinder: Rewinder,
        find: Find | None = None,
        *,
        reruns: bool = True,
    ) -> None:
        """`find` locates the origin of a bad step. `reruns`: the guard runs the steps itself."""
        self.context = context
        self.protect = protect
        self.rewinder = rewinder
        self.reader = Reader(context)
        self._locate = with_sample_names(context, find or self._replay)
        self._anomalies = AnomalyCheck(context, rewinder, clips_itself=reruns)
        shards = list(context.roots.values()) if context.sharded else []
        self._ranks = OneDecision(context.agreement, shards)
        self._decider = Decider(
            *(context, rewinder, self._anomalies, self._ranks, self._find), reruns=reruns
        )
        self._not_explained = partial(context.outputs.note, "unexplained")
        self._alone = False
        """Only this rank has found the step at hand bad: the others have gone on."""
        self._unrecorded: tuple[Incident, Step] | None = None
        """An incident that is not on record yet."""
        rewinder.after_rewind.append(self.reader.rewound)

    # --- the nine verbs -------------------------------------------------------------------------

    def read(self, pending: Pending, *, grads_gone: bool = False) -> Reading:
        """Wait for the numbers of this step: its one host sync."""
        return self.reader.complete(pending, grads_gone=grads_gone)

    def agree(self, step: Step, reading: Reading) -> Reading:
        """Name what is bad in an alarming step, and give every rank the same reading."""
        if reading.loss_overflow:
            # the gradients are finite on every rank, and nothing is left to find out
            return reading
        context = self.context
        rates_finite = all(map(math.isfinite, reading.lr))
        self._alone = False
        alarm = alarming(reading)
        if alarm or reading.state_born or not rates_finite:
            self._alone = not self._ranks.others_come(reading, context.memory.missed)
        if not alarm or reading.state_born:
            return reading
        look = partial(examine, context, step, reading)
        presumed = presumed_reading(context, reading)
        if context.agreement.size == 1 or self._alone:
            return explain_or_warn(presumed, self._not_explained, look)
        damage = self.rewinder.healing.own_damage
        agreed, faults = self._ranks.reading(step, presumed, look, damage)
        for fault in faults:
            warn_not_explained(self._not_explained, fault)
        return agreed

    def judge(self, step: Step, reading: Reading) -> tuple[Reading, Verdict]:
        """Return the verdict; a finite anomaly is weighed against what else is known of it."""
        context = self.context
        context.expect_declared_rates(reading.lr)
        verdict = judge_reading(reading, context.history, context.config)
        if verdict is not OK and verdict.finite_anomaly:
            return self._anomalies.weigh(step, reading, verdict)
        return reading, verdict

    def passes(self, reading: Reading) -> bool:
        """Is there nothing to say about this reading? If not, `assess` says what, of a whole step,
        which a watched loop puts together only for that.
        """
        if not self.protect.armed:
            return False
        context, rates = self.context, reading.lr
        try:
            # a loss, norm or rate that is not finite is refused by `judge_reading`
            if reading.alarm or reading.bad_state or not reading.grads_finite:
                return False
            if reading.loss_overflow or reading.state_born:
                return False
            if context.history.excess_lr(rates) is not None:
                return False
            self._alone = False
            context.expect_declared_rates(rates)
            return judge_reading(reading, context.history, context.config) is OK
        except Exception as fault:
            self.protect.failed(fault)
        return False

    def veto(self, update: VetoedUpdate, verdict: Verdict) -> bool:
        """Stop the update, and put back what the forward pass wrote. Runs when disarmed, too.

        False where buffers could not be put back: then a replay would start from other values.
        """
        stopped = False
        with self.protect.part("veto"):
            update.stop()
            stopped = True
        if not stopped:
            # the last resort: an optimizer leaves a parameter without a gradient alone
            for parameter in self.context.parameters:
                parameter.grad = None
        if verdict.finite_anomaly:
            return True  # the update may still be let through
        with self.protect.part("buffers before the step"):
            update.restore_buffers()
            return True
        return False

    def locate(
        self, incident: Incident, step: Step, *, wanted: bool = True, committed: bool = False
    ) -> Incident:
        """Add the origin, the same on every rank; all of them come here, `wanted` or not."""
        wanted = wanted and self.context.config.locates
        return self._decider.locate(incident, step, wanted=wanted, committed=committed)

    def diagnose(self, incident: Incident) -> Incident:
        """Add the findings."""
        return explain_or_warn(incident, self._not_explained, self._diagnosed, incident)

    def decide(self, incident: Incident, step: Step, *, committed: bool = False) -> Incident:
        """Add the decision. `committed`: the update was made before its verdict was read."""
        return self._decider.decide(incident, step, committed=committed)

    def apply(self, incident: Incident) -> Incident:
        """Do what was decided, and say in the decision what was really done."""
        decision = incident.decision
        if decision is None:
            return incident
        if decision.action == "rewind":
            decision = self._rewound(decision)
        if decision.action == "heal":
            decision = self.rewinder.heal(decision)
        if decision.new_scale is not None:
            self.context.scales.static = decision.new_scale
        change_settings(self.context, decision)
        return self._left_good(replace(incident, decision=decision))

    def _left_good(self, incident: Incident) -> Incident:
        """Where a run stops on damaged weights, leave undamaged ones. Runs when disarmed, too."""
        decision = incident.decision
        if decision is None or decision.action != "stop" or not incident.reading.bad_state:
            return incident
        with self.protect.part("good weights at the stop"):
            decision = replace(decision, rewound_to=self.rewinder.leave_good_in_memory())
        return replace(incident, decision=decision)

    def record(self, incident: Incident, step: Step) -> Incident:
        """Write the incident to everything that outlives the process, then show it."""
        self._unrecorded = None
        return incident_record.record(self.context, incident, step)

    # --- the verbs put together -----------------------------------------------------------------

    def assess(self, step: Step, reading: Reading) -> tuple[Reading, Verdict]:
        """Agree and judge. Whatever fails, what the reading itself proves bad stays refused."""
        if self.protect.armed:
            try:
                return self.judge(step, self.agree(step, reading))
            except Exception as fault:
                self.protect.failed(fault)
        return reading, presumed_verdict(self.context, reading)

    def respond(
        self,
        step: Step,
        reading: Reading,
        verdict: Verdict,
        update: VetoedUpdate | None,
        *,
        committed: bool = False,
    ) -> Incident | None:
        """Veto, locate, diagnose and decide. None where that failed; the veto holds all the same.

        `update` is None where nothing is left to stop: the device has done it, or it was undone.
        """
        replayable = update is None or self.veto(update, verdict)
        if not self.protect.armed:
            return None
        self.record_open_incident()
        incident = self.open_incident(step, reading, verdict)
        self._unrecorded = (incident, step)
        with self.protect.part("steps before the incident"):
            keep_lead_up(self.context, self.rewinder.snapshots, incident, step)
        if self._alone and not verdict.finite_anomaly:
            # the others hear of it with the next step
            self.context.memory.missed = (
                f"rank {incident.rank} refused the update of step {incident.step} locally: "
                f"{verdict.summary}"
            )
            incident = self.diagnose(incident)
            incident = replace(incident, decision=Decision(action="skip", reason=LATER))
            self.rewinder.left_behind(step, reading.loss)
            self._unrecorded = (incident, step)
            return incident
        with self.protect.region:
            incident = self.locate(incident, step, wanted=replayable, committed=committed)
            incident = self.diagnose(incident)
            if replayable and self.context.config.locates:
                incident = explain_or_warn(
                    incident, self._not_explained, self._remedies_tried, incident, step
                )
            incident = self.decide(incident, step, committed=committed)
        incident = last_resort(incident)
        decision = incident.decision
        if decision is None or decision.action == "note":
            # nothing is to be applied
            incident = self.record(incident, step)
            return incident if decision is not None else None
        # Before anything moves: a part of the step may be committed, or the weights rewound.
        incident = incident_record.keep_step(self.context, incident, step)
        self._unrecorded = (incident, step)
        return incident

    def conclude(self, incident: Incident | None) -> Incident | None:
        """Apply and record, then raise TrainingHalted if the decision was to stop."""
        if incident is None or self._unrecorded is None:
            return incident
        applied: Incident | None = None
        step = self._unrecorded[1]
        if self.protect.armed:
            with self.protect.region:
                applied = self.apply(incident)
        incident = self.record(applied or self._left_good(not_applied(incident)), step)
        if incident.stopped:
            # stop even where the newest good state cannot be written
            state: Path | None = None
            with self.protect.part("checkpoint at the stop"):
                state = self.rewinder.leave(incident)
            halt(self.context, self.rewinder, incident, state)
        return incident

    def record_open_incident(self) -> None:
        """Put on record what an exception or the end of the run kept from being applied."""
        if self._unrecorded is not None:
            self.record(*self._unrecorded)

    def last_look(self, step: Step) -> Incident | None:
        """At the end of a run: were the parameters still finite after the last update?"""
        context = self.context
        bad = tuple(stored_trouble(context))
        reading = Reading(step=step.index, lr=context.lr, schedule=context.schedule, bad_state=bad)
        told = context.incidents[-1].reading.bad_state if context.incidents else ()
        verdict = judge_reading(reading, context.history, context.config)
        if not verdict.bad or set(bad) <= set(told):
            return None
        self._alone = False
        if not context.agreement.all_here("the last look"):
            # what only this rank has seen, at a moment when no other rank may come any more
            incident = self.open_incident(step, reading, verdict)
            incident = replace(
                incident, decision=Decision(action="note", reason=OTHERS_HAVE_NOT_SEEN)
            )
            return self.record(self.diagnose(incident), step)
        return self.respond(step, reading, verdict, None, committed=True)

    def note(self, reading: Reading, verdict: Verdict) -> None:
        """Report a verdict that is worth a line, not an action, with the code of its cause."""
        if verdict.severity != "note":
            return
        with self.protect.part("notes"):
            text = verdict.summary
            code = None
            case = Incident(id="", step=reading.step, verdict=verdict, reading=reading)
            for finding in find_causes(case)[:1]:
                if finding.certainty == "certain":
                    text += f" ({finding.code}: stepguard explain {finding.code})"
                    code = finding.code
            self.context.outputs.note(
                verdict.kind, text, step=reading.step, evidence=verdict.evidence, code=code
            )

    def open_incident(self, step: Step, reading: Reading, verdict: Verdict) -> Incident:
        """What is known of a bad step before anything is located."""
        context = self.context
        if not reading.schedule:
            with self.protect.part("schedule"):
                reading = replace(reading, schedule=context.declared.position(reading.lr))
        run_dir = context.config.run_dir
        return Incident(
            id=incident_record.free_id(context, f"{step.index:08d}-{verdict.kind}"),
            step=step.index,
            verdict=verdict,
            reading=reading,
            run=str(run_dir) if run_dir is not None else None,
            rank=context.agreement.world_rank,
        )

    # --- locate and diagnose --------------------------------------------------------------------

    def _find(self, step: Step, reading: Reading) -> Origin:
        return self._anomalies.outlying_at(reading.step) or self._locate(step, reading)

    def _replay(self, step: Step, reading: Reading) -> Origin:
        return locate(step, reading, self.context.memory.effort)

    def _diagnosed(self, incident: Incident) -> Incident:
        facts = run_facts(self.context, incident.reading)
        return replace(incident, findings=find_causes(incident, facts))

    def _remedies_tried(self, incident: Incident, step: Step) -> Incident:
        facts = run_facts(self.context, incident.reading)
        return try_remedies(incident, step, facts, self.context.memory.effort)

    # --- decide and apply -----------------------------------------------------------------------

    def _rewound(self, decision: Decision) -> Decision:
        """A rewind that fails leaves an unknown state: then the run stops."""
        try:
            self.rewinder.rewind()
        except Exception as fault:
            why = (
                f"the rewind to step {decision.rewound_to} failed ({type(fault).__name__}: {fault})"
            )
            return replace(
                decision, action="stop", reason=why, rewound_to=None, data=None, lr_factor=None
            )
        return decision
