"""One step: read, agree, judge, veto, locate, diagnose, decide, apply, record, in this order.

The drivers (engine/drivers) differ in who calls forward, backward and update; what happens between
is here, one method a verb. `assess` is agree and judge. `respond` is veto to decide, for a bad
step. `conclude` is apply and record, once the update is out of the way: what is told is what was
done. An incident only ever gains fields on its way, so that a fault still leaves a valid one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from stepguard.diagnose import diagnose as find_causes
from stepguard.engine.context import Context
from stepguard.engine.incident import incident_record
from stepguard.engine.incident.anomaly_check import AnomalyCheck
from stepguard.engine.incident.closer_look import (
    FoundAlone,
    accept,
    blamed_on_update,
    examine,
    exploded,
    mark_foreign_parameter,
    presumed_reading,
    presumed_verdict,
    stored_trouble,
    surfaces_only,
    weights_ruined,
)
from stepguard.engine.incident.ranks import (
    agreed_reading,
    find_together,
    last_resort,
    tried,
    with_decision,
)
from stepguard.engine.incident.run_facts import change_settings, not_applied, run_facts
from stepguard.engine.incident.samples import with_sample_names
from stepguard.engine.incident.situation import (
    BORN_IN_THE_STEP,
    SituationReader,
    halt,
    keep_lead_up,
)
from stepguard.engine.incident.trials import try_remedies
from stepguard.engine.protect import Protection, explain_or_warn
from stepguard.engine.reader import Pending, Reader
from stepguard.engine.recover.rewind import Rewinder, loss_function_changed
from stepguard.judge import judge as judge_reading
from stepguard.judge.decide import decide as choose_remedy
from stepguard.judge.judge import alarming
from stepguard.locate import locate
from stepguard.records import Decision, Incident, Origin, Reading, Verdict
from stepguard.state.batch import Step

VERIFY_FROM = 2
"""Bad steps in a row from which on the weights are verified on an earlier batch."""
OTHERS_HAVE_NOT_SEEN = "only this rank has seen it, after the last step: nothing is put back"

Find = Callable[[Step, Reading], Origin]


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
        self._situations = SituationReader(context, rewinder, self._anomalies, reruns=reruns)
        self._alone = FoundAlone(context)
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
        self._alone.ask(reading)
        if not alarming(reading) or reading.state_born:
            return reading
        if self.context.agreement.size > 1 and not self._alone.now:
            return agreed_reading(self.context, step, reading, self._not_explained)
        presumed = presumed_reading(self.context, reading)
        return explain_or_warn(presumed, self._not_explained, examine, self.context, step, reading)

    def judge(self, step: Step, reading: Reading) -> tuple[Reading, Verdict]:
        """Return the verdict; a finite anomaly is weighed against what else is known of it."""
        context = self.context
        context.expect_declared_rates(reading.lr)
        verdict = judge_reading(reading, context.history, context.config)
        if verdict.finite_anomaly:
            return self._anomalies.weigh(step, reading, verdict)
        return reading, verdict

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

    def locate(self, incident: Incident, step: Step) -> Incident:
        """Add the origin."""
        if not self.context.config.locates:
            return incident
        look = partial(self._located, incident, step)
        return explain_or_warn(incident, self._not_explained, tried, self.context, look)

    def diagnose(self, incident: Incident) -> Incident:
        """Add the findings."""
        return explain_or_warn(incident, self._not_explained, self._diagnosed, incident)

    def decide(self, incident: Incident, step: Step, *, committed: bool = False) -> Incident:
        """Add the decision. `committed`: the update was made before its verdict was read."""
        choose = partial(self._decided, incident, step, committed)
        return with_decision(self.context, incident, choose, self._not_explained)

    def apply(self, incident: Incident) -> Incident:
        """Do what was decided, and say in the decision what was really done."""
        decision = incident.decision
        if decision is None:
            return incident
        if decision.action == "rewind":
            decision = self._rewound(decision)
        if decision.action == "heal":
            decision = self.rewinder.heal(decision, incident.step)
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
        judged = reading, presumed_verdict(self.context, reading)
        if self.protect.armed:
            with self.protect.region:
                judged = self.judge(step, self.agree(step, reading))
        return judged

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
        if self._alone.now and not verdict.finite_anomaly:
            incident = self._alone.left_behind(self.diagnose(incident))
            self.rewinder.left_behind(step, reading.loss)
            self._unrecorded = (incident, step)
            return incident
        with self.protect.region:
            if replayable:
                incident = self.locate(incident, step)
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
        self._alone.now = False
        if not context.agreement.all_here("the last look"):
            # what only this rank has seen, at a moment when no other rank may come any more
            incident = self.open_incident(step, reading, verdict)
            incident = replace(
                incident, decision=Decision(action="note", reason=OTHERS_HAVE_NOT_SEEN)
            )
            return self.record(self.diagnose(incident), step)
        return self.respond(step, reading, verdict, None, committed=True)

    def note(self, reading: Reading, verdict: Verdict) -> None:
        """Tell a verdict that is worth a line, not an action, with the code of its cause."""
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

    def _located(self, incident: Incident, step: Step) -> Incident:
        context = self.context
        found = find_together(context, self._find, step, incident.reading, self._not_explained)
        origin = mark_foreign_parameter(context, found)
        # blame the weights where an earlier batch, fine in its time, now fails on them as well
        incident = replace(incident, origin=origin)
        if incident.origin is None or not self._worth_verifying(incident):
            return incident
        repeated = self._anomalies.earlier_batch_now()
        if repeated is None or not exploded(repeated) or self._loss_function_changed():
            return incident
        now, before = repeated
        reading = replace(incident.reading, repeat_loss=now, repeat_before=before)
        return replace(incident, reading=reading, origin=blamed_on_update(incident.origin, reading))

    def _worth_verifying(self, incident: Incident) -> bool:
        """Float32 overflowed for no reason of its own, or one bad step follows another."""
        if surfaces_only(incident.origin):
            return True
        if incident.verdict.kind not in BORN_IN_THE_STEP:
            return False
        if self.context.budget.consecutive + 1 < VERIFY_FROM:
            return False
        reading = incident.reading
        if reading.bad_inputs or reading.bad_state or reading.overflow or reading.state_born:
            return False
        origin = incident.origin
        return origin is None or (origin.phase != "input" and not origin.samples)

    def _loss_function_changed(self) -> bool:
        """Does an earlier step fail now even on the weights it had?"""
        if self.context.agreement.size > 1:
            return False  # ranks would have to ask together
        return loss_function_changed(self.rewinder.snapshots)

    def _diagnosed(self, incident: Incident) -> Incident:
        facts = run_facts(self.context, incident.reading)
        return replace(incident, findings=find_causes(incident, facts))

    def _remedies_tried(self, incident: Incident, step: Step) -> Incident:
        facts = run_facts(self.context, incident.reading)
        return try_remedies(incident, step, facts, self.context.memory.effort)

    def _not_explained(self, why: str) -> None:
        self.context.outputs.note("unexplained", why)

    # --- decide and apply -----------------------------------------------------------------------

    def _decided(self, incident: Incident, step: Step, committed: bool) -> Decision:
        context = self.context
        situation = self._situations.situation(incident, step, committed=committed)
        policy = context.config.policy
        decision, context.budget = choose_remedy(situation, policy, context.budget)
        hurt = situation.fault in ("state", "anomaly") or weights_ruined(incident.origin)
        self.rewinder.probation.incident(incident.step, hurt=hurt and decision.action != "heal")
        if situation.at_start and decision.action == "note":
            accept(context, incident.reading.bad_state)
        if context.hooks.what_helps is not None:
            look = partial(context.hooks.what_helps, incident, decision)
            return explain_or_warn(decision, self._not_explained, look)
        return decision

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
