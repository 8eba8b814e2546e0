"""From a reading to an incident on record: judge, locate, diagnose, decide, record. Only ever adds to the incident."""

from __future__ import annotations

import math
from dataclasses import replace

from stepguard.detect import judge
from stepguard.detect.judge import alarming
from stepguard.diagnose import diagnose
from stepguard.engine.context import Context
from stepguard.engine.examine import examine, stored_trouble, working_scale
from stepguard.engine.facts import run_facts
from stepguard.engine.record import record
from stepguard.engine.runaway import blamed_on_update, ruined, surfaces_only
from stepguard.locate import locate
from stepguard.policy import decide
from stepguard.policy.decide import Situation
from stepguard.records import Decision, Incident, Origin, Reading, Verdict
from stepguard.records.codec import from_jsonable, to_jsonable
from stepguard.state.replay import reevaluate, rerun
from stepguard.state.step import Step

FINITE_KINDS = ("spike", "drift")


class Pipeline:
    """What happens after a step has been read."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def assess(self, step: Step, reading: Reading) -> tuple[Reading, Verdict]:
        """The verdict, with a closer look or a second measurement where the first one asks for it."""
        context = self._context
        if alarming(reading):
            reading = self._agree(step, examine(context, step, reading))
        verdict = judge(reading, context.history, context.config)
        if verdict.severity != "suspicion":
            return reading, verdict
        again = self._repeat_loss()
        if again is None:
            return reading, replace(verdict, severity="note")
        reading = replace(reading, repeat_loss=again[0], repeat_before=again[1])
        return reading, judge(reading, context.history, context.config)

    def respond(self, step: Step, reading: Reading, verdict: Verdict, *, committed: bool = False) -> Incident:
        """Locate, diagnose, decide and record. The update has already been vetoed (or, `committed`, came too early)."""
        context = self._context
        incident = Incident(
            id=f"{step.index:08d}-{verdict.kind}",
            step=step.index,
            verdict=verdict,
            reading=reading,
            run=str(context.config.run_dir) if context.config.run_dir is not None else None,
            rank=context.agreement.rank,
        )
        try:
            incident = self._explain(incident, step)
            incident = replace(incident, decision=self._decide(incident, step, committed))
        finally:
            incident = record(context, incident, step)
        return incident

    def last_look(self, step: Step) -> None:
        """At the end of a run: were the parameters still finite after the last update?"""
        reading = Reading(step=step.index, lr=self._context.lr, bad_state=tuple(stored_trouble(self._context)))
        verdict = judge(reading, self._context.history, self._context.config)
        if verdict.bad:
            self.respond(step, reading, verdict, committed=True)

    def note(self, reading: Reading, verdict: Verdict) -> None:
        """Worth a line, not an action."""
        context = self._context
        fields = {"step": reading.step, "kind": verdict.kind, "summary": verdict.summary, "evidence": verdict.evidence}
        context.note("note", fields)
        context.terminal.note(verdict.summary, reading.step, verdict.kind)

    def _explain(self, incident: Incident, step: Step) -> Incident:
        context = self._context
        if context.config.locate:
            incident = self._suspect_update(replace(incident, origin=self._locate(step, incident.reading)))
        return replace(incident, findings=diagnose(incident, run_facts(context, incident.reading)))

    def _suspect_update(self, incident: Incident) -> Incident:
        """Where float32 overflowed for no reason of its own: does an earlier batch, fine in its time, do so too?"""
        if incident.origin is None or not surfaces_only(incident.origin):
            return incident
        again = self._repeat_loss()
        if again is None or not ruined(again):
            return incident
        reading = replace(incident.reading, repeat_loss=again[0], repeat_before=again[1])
        return replace(incident, reading=reading, origin=blamed_on_update(incident.origin, reading))

    def _locate(self, step: Step, reading: Reading) -> Origin | None:
        """The worst rank looks, alone; then everybody knows."""
        agreement = self._context.agreement
        leader = reading.bad_ranks[0] if reading.bad_ranks else agreement.rank
        origin: Origin | None = None
        if agreement.rank == leader:
            origin = replace(locate(step, reading), rank=agreement.rank if agreement.size > 1 else None)
        if agreement.size == 1:
            return origin
        told = agreement.gather({"origin": to_jsonable(origin) if origin is not None else None})[leader]["origin"]
        return from_jsonable(Origin, told) if told is not None else None

    def _decide(self, incident: Incident, step: Step, committed: bool) -> Decision:
        context = self._context
        reading = incident.reading
        hurt = committed or (bool(reading.bad_state) and not reading.state_born) or _stored_culprit(incident.origin)
        situation = Situation(
            step=incident.step,
            hurt=hurt,
            lost_share=lost_share(incident.verdict),
            at_start=hurt and context.history.committed == 0 and not committed,
            new_scale=working_scale(step) if reading.overflow and context.config.loss_scale else None,
        )
        decision, context.budget = decide(situation, context.config.policy, context.budget)
        return decision

    def _repeat_loss(self) -> tuple[float, float] | None:
        """The loss of an earlier healthy batch now and when it was new; the worst over the ranks."""
        context = self._context
        again: tuple[float, float] | None = None
        if context.anchor is not None:
            step, then = context.anchor
            again = (reevaluate(step), then)
        if context.agreement.mode != "collective":
            return again
        told = [facts["again"] for facts in context.agreement.gather({"again": again})]
        known = [pair for pair in told if pair is not None]
        return max(known, key=lambda pair: pair[0] - pair[1] if math.isfinite(pair[0]) else math.inf, default=None)

    def _agree(self, step: Step, reading: Reading) -> Reading:
        """Every rank goes on with the reading of the worst one, so that all decide the same."""
        agreement = self._context.agreement
        if agreement.size == 1:
            return reading
        everybody = agreement.gather({"own": self._own_trouble(step, reading), "reading": to_jsonable(reading)})
        bad = tuple(rank for rank, told in enumerate(everybody) if told["own"])
        leader = from_jsonable(Reading, everybody[bad[0] if bad else 0]["reading"])
        return replace(leader, bad_ranks=bad)

    def _own_trouble(self, step: Step, reading: Reading) -> bool:
        """Is it this rank that made the bad value, before any gradient was exchanged?"""
        if reading.bad_micro_batches or reading.bad_state:
            return True
        if reading.grads_finite or reading.overflow:
            return False
        if self._context.agreement.mode == "spread" and step.whole:
            return not rerun(step).grads_finite
        return bool(reading.bad_grads)


def _stored_culprit(origin: Origin | None) -> bool:
    """A parameter or buffer was bad before the step: the next batch will fare no better."""
    stored = ("param:", "buffer:")
    return origin is not None and origin.phase == "state" and (origin.tensor or "").startswith(stored)


def let_through(incident: Incident) -> bool:
    """A finite step on hurt weights that the policy only warns about: the update goes on."""
    decision = incident.decision
    return incident.verdict.kind in FINITE_KINDS and decision is not None and decision.action == "warn"


def lost_share(verdict: Verdict) -> float | None:
    """For a finite anomaly: how many times what the run had learned is gone."""
    share = (verdict.evidence or {}).get("lost_share")
    return float(share) if verdict.kind in FINITE_KINDS and share is not None else None
