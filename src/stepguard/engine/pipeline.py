"""From a reading to an incident on record: judge, locate, diagnose, decide, record. Only ever adds to the incident."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, count
from typing import Any

from stepguard.detect import judge
from stepguard.detect.anomalies import fared_better
from stepguard.detect.judge import alarming
from stepguard.diagnose import diagnose
from stepguard.engine.context import Context
from stepguard.engine.examine import accept, examine, stored_trouble, working_scale
from stepguard.engine.facts import run_facts
from stepguard.engine.presumption import presumed_reading
from stepguard.engine.record import record
from stepguard.engine.recovery import Recovery
from stepguard.engine.runaway import blamed_on_update, ruined, stored_culprit, surfaces_only
from stepguard.engine.shield import spare
from stepguard.locate import locate
from stepguard.policy import decide
from stepguard.policy.decide import Situation
from stepguard.records import Decision, Incident, Origin, Reading, Verdict
from stepguard.records.codec import from_jsonable, to_jsonable
from stepguard.state.replay import gradients_came_back_finite, model_finite, reevaluate, rerun
from stepguard.state.step import Step

FINITE_KINDS = ("spike", "drift")
EXPLAINS = 0.5
"""Share of a rise that a changed loss function must make up, for the weights to be left alone."""
ASK_FIRST, ASK_AGAIN = 4, 8
"""Suspicious steps in a row for which an earlier batch is evaluated again: the first few, then every eighth."""


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
        self._context, self._recovery, self._find = context, recovery, find or locate
        self._reruns = reruns
        self._suspicious = (-1, 0)
        """The last suspicious step, and how many in a row there have been."""

    def assess(self, step: Step, reading: Reading) -> tuple[Reading, Verdict]:
        """The verdict, with a closer look or a second measurement where the first one asks for it."""
        context = self._context
        if alarming(reading) and not reading.state_born:  # what the update made has been named, and undone
            reading = self._agree(step, reading)
        verdict = judge(reading, context.history, context.config)
        if verdict.kind in FINITE_KINDS and context.agreement.mode == "spread":
            # every rank sees its own loss only, and asking the others takes a collective that they do not join
            return reading, replace(verdict, severity="note")
        if verdict.severity != "suspicion":
            return reading, verdict
        again = self._repeat_loss() if self._worth_asking(reading) else None
        if again is None:
            return reading, replace(verdict, severity="note")
        reading = replace(reading, repeat_loss=again[0], repeat_before=again[1])
        verdict = judge(reading, context.history, context.config)
        return reading, self._function_moved(reading, verdict) if verdict.bad else self._some_weights(step, verdict)

    def _some_weights(self, step: Step, verdict: Verdict) -> Verdict:
        """An earlier batch is as it was, but this one may be the first that uses the weights that are hurt.

        Hard data are as hard for the weights of some steps ago. Several ranks would have to ask together; they do not.
        """
        context = self._context
        known = verdict.kind == "spike" and step.whole and context.agreement.size == 1
        then = self._recovery.on_older_weights(step) if known else None
        return fared_better(verdict, context.history, *then) if then is not None else verdict

    def _function_moved(self, reading: Reading, verdict: Verdict) -> Verdict:
        """Not the weights but the loss function may have changed: then earlier weights fare as badly under it."""
        context, recovery = self._context, self._recovery
        told = context.agreement.together(lambda: {"then_and_now": recovery.on_its_own_weights()})
        pairs = [tuple(facts["then_and_now"]) for facts in told if facts["then_and_now"] is not None]
        if not any(explained(reading, then, now) for then, now in pairs):
            return verdict
        context.history.begin_anew()
        context.anchor = None
        first, (then, now) = verdict.summary.partition("; ")[0], pairs[0]
        why = f"an earlier step, on the weights it had, gives {now:.6g} instead of {then:.6g}: the loss itself changed"
        return replace(verdict, severity="note", summary=f"{first}; {why}")

    def _worth_asking(self, reading: Reading) -> bool:
        """After a shift of the data many steps in a row look suspicious: then only some of them are looked into."""
        last, run = self._suspicious
        run = run + 1 if reading.step == last + 1 else 1
        self._suspicious = (reading.step, run)
        return run <= ASK_FIRST or run % ASK_AGAIN == 0

    def respond(self, step: Step, reading: Reading, verdict: Verdict, *, committed: bool = False) -> Incident:
        """Locate, diagnose, decide and record. The update has already been vetoed (or, `committed`, came too early)."""
        incident = self.open_incident(step, reading, verdict)
        try:
            incident = self._explain(incident, step)
            incident = replace(incident, decision=self._decided(incident, step, committed))
        finally:
            incident = self.close_incident(incident, step)
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

    def close_incident(self, incident: Incident, step: Step) -> Incident:
        """On record, as far as that can be."""
        return spare(incident, self._unexplained, record, self._context, incident, step)

    def _name(self, step: Step, verdict: Verdict) -> str:
        """After a rewind a step number comes again."""
        name, known = f"{step.index:08d}-{verdict.kind}", {incident.id for incident in self._context.incidents}
        return next(n for n in chain([name], (f"{name}-{i}" for i in count(2))) if n not in known)

    def last_look(self, step: Step) -> Incident | None:
        """At the end of a run: were the parameters still finite after the last update?"""
        reading = Reading(step=step.index, lr=self._context.lr, bad_state=tuple(stored_trouble(self._context)))
        said = self._context.incidents[-1].reading.bad_state if self._context.incidents else ()
        verdict = judge(reading, self._context.history, self._context.config)
        if verdict.bad and not set(reading.bad_state) <= set(said):
            return self.respond(step, reading, verdict, committed=True)
        return None

    def note(self, reading: Reading, verdict: Verdict) -> None:
        """Worth a line, not an action."""
        context = self._context
        fields = {"step": reading.step, "kind": verdict.kind, "summary": verdict.summary, "evidence": verdict.evidence}
        context.note("note", fields)
        if context.human is not None:
            context.human.note(verdict.summary, reading.step, verdict.kind)
        context.terminal.note(verdict.summary, reading.step, verdict.kind)

    def _explain(self, incident: Incident, step: Step) -> Incident:
        """Where and why. The place is part of the decision, which ranks take together: there a fault is everybody's."""
        context = self._context
        if context.config.locate and context.agreement.size == 1:
            incident = spare(incident, self._unexplained, self._located, incident, step)
        elif context.config.locate:
            incident = self._located(incident, step)
        return spare(incident, self._unexplained, self._diagnosed, incident)

    def _located(self, incident: Incident, step: Step) -> Incident:
        return self._suspect_update(replace(incident, origin=self._locate(step, incident.reading)))

    def _diagnosed(self, incident: Incident) -> Incident:
        return replace(incident, findings=diagnose(incident, run_facts(self._context, incident.reading)))

    def _unexplained(self, why: str) -> None:
        self._recovery.say("unexplained", why)

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
        if agreement.size == 1:
            return self._find(step, reading)
        leader = reading.bad_ranks[0] if reading.bad_ranks else 0

        def look() -> dict[str, Any]:
            return to_jsonable(replace(self._find(step, reading), rank=leader)) if agreement.rank == leader else {}

        told = agreement.together(look)[leader]
        return from_jsonable(Origin, told) if told else None

    def _decided(self, incident: Incident, step: Step, committed: bool) -> Decision:
        """A fault costs the better remedy; the step stays vetoed. Ranks decide together: there it is everybody's."""
        if self._context.agreement.size > 1:
            return self._decide(incident, step, committed)
        refused = Decision(action="skip", reason="stepguard could not decide by a fault of its own")
        return spare(refused, self._unexplained, self._decide, incident, step, committed)

    def _decide(self, incident: Incident, step: Step, committed: bool) -> Decision:
        context = self._context
        reading = incident.reading
        hurt = committed or (bool(reading.bad_state) and not reading.state_born) or stored_culprit(incident.origin)
        lost = lost_share(incident.verdict)
        by_chance = incident.origin is not None and incident.origin.reproduced is False and lost is None
        again = self._reruns and step.whole
        broken = hurt and lost is None
        remedy, why_not = self._recovery.plan(transient=again and (by_chance or broken), visible=broken)
        situation = Situation(
            step=incident.step,
            hurt=hurt,
            lost_share=lost,
            remedy=remedy,
            no_rewind=why_not,
            can_retry=by_chance and again and not hurt and self._recovery.retried != step.index,
            at_start=hurt and context.history.committed == 0 and not committed,
            new_scale=self._new_scale(step) if reading.overflow and context.config.loss_scale else None,
        )
        decision, context.budget = decide(situation, context.config.policy, context.budget)
        self._recovery.incident(incident.step, hurt=hurt or lost is not None)
        if situation.at_start and decision.action == "note":
            accept(context, reading.bad_state)
        return decision

    def _new_scale(self, step: Step) -> float:
        """A static loss scale that works on every rank."""
        everybody = self._context.agreement.together(lambda: {"scale": working_scale(step)})
        return min(float(told["scale"]) for told in everybody)

    def _repeat_loss(self) -> tuple[float, float] | None:
        """The loss of an earlier healthy batch now and when it was new; the worst over the ranks."""
        anchor, sign = self._context.anchor, -1.0 if self._context.climbs else 1.0

        def again() -> dict[str, Any]:
            return {"again": (sign * reevaluate(anchor[0]), anchor[1]) if anchor is not None else None}

        told = [facts["again"] for facts in self._context.agreement.together(again)]
        known = [pair for pair in told if pair is not None]
        return max(known, key=lambda pair: pair[0] - pair[1] if math.isfinite(pair[0]) else math.inf, default=None)

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
    """How surely it is this rank that made the bad value: 2 by its own doing, 1 by gradients all have exchanged, 0."""
    if reading.bad_micro_batches or reading.bad_state or reading.bad_inputs:
        return 2
    if reading.grads_finite or reading.overflow:
        return 0
    if step.whole:
        return 0 if rerun(step).grads_finite else 2
    if step.model_only:
        return 0 if gradients_came_back_finite(step) and model_finite(step) else 2
    return 1


def explained(reading: Reading, then: float, now: float) -> bool:
    """Does the change of the loss on unchanged weights make up half of the rise that was seen?"""
    assert reading.repeat_loss is not None and reading.repeat_before is not None
    sign = -1.0 if reading.climbs else 1.0
    moved = sign * (now - then)
    return math.isfinite(moved) and moved > 0 and moved >= EXPLAINS * (reading.repeat_loss - reading.repeat_before)


def let_through(verdict: Verdict, incident: Incident | None) -> bool:
    """A finite step on hurt weights that the policy only warns about, or nobody could decide on: the update goes on."""
    decision = incident.decision if incident is not None else None
    return verdict.kind in FINITE_KINDS and (decision is None or decision.action == "note")


def lost_share(verdict: Verdict) -> float | None:
    """For a finite anomaly: how many times what the run had learned is gone."""
    share = (verdict.evidence or {}).get("lost_share")
    return float(share) if verdict.kind in FINITE_KINDS and share is not None else None
