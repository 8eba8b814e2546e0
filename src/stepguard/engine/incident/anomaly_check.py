"""Weigh suspicious but finite steps: what is reported of them, and what is proven.

By default none of the user's code is run again for it: the batch and the optimizer's own numbers
are read. With `anomalies="act"` earlier steps are evaluated again.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from stepguard.engine.context import Context
from stepguard.engine.incident.run_facts import update_ratio
from stepguard.engine.incident.samples import delivered_beside, name_samples
from stepguard.engine.recover.rewind import Rewinder, compare_with_best
from stepguard.judge import judge
from stepguard.judge.judge import LASTING, blame_weights, worth_measuring
from stepguard.locate.samples import outlying_rows
from stepguard.records import Origin, Reading, Verdict
from stepguard.records.codec import from_jsonable, to_jsonable
from stepguard.records.incident import number
from stepguard.state.batch import Step
from stepguard.state.isolation import reevaluate
from stepguard.state.sharded import CollectiveInReplayError

TOLD_FOR = 64
"""Steps after a runaway loss was reported as an incident in which a further one is only a line."""


ALIKE = 10.0
"""Times the outlying rows of a healthy batch that those of a spike must be to explain it."""


class AnomalyCheck:
    """Weighs the finite anomalies of one guard."""

    def __init__(self, context: Context, rewinder: Rewinder, *, clips_itself: bool) -> None:
        """`clips_itself`: the guard clips, so it knows the gradient an update was made of."""
        self._context = context
        self._rewinder = rewinder
        self._clips_itself = clips_itself
        self._last = -1
        self._in_a_row = 0
        self._told_at: int | None = None
        self._outlying: Origin | None = None
        """The last few rows that were far larger than all others of their step."""
        self.proven = False
        """The last incident may be acted upon: the signs agree that the weights are hurt."""

    def weigh(self, step: Step, reading: Reading, verdict: Verdict) -> tuple[Reading, Verdict]:
        """Make it a note, or for a runaway loss an incident, acted upon only if asked."""
        context = self._context
        self.proven = False
        if reading.step == self._last + 1:
            self._in_a_row += 1
        else:
            self._in_a_row = 1
        self._last = reading.step
        outlying = self._rows_that_stand_out(step) if verdict.kind == "spike" else None
        if context.agreement.mode == "spread":
            # a rank sees its own loss only; asking the others takes a collective they do not join
            return reading, self._with_rows(replace(verdict, severity="note"), outlying)
        if worth_measuring(reading, context.history):
            reading, outlying = self._measured(reading, outlying)
            verdict = judge(reading, context.history, context.config)
        verdict = self._with_rows(verdict, outlying)
        if context.config.probes.anomalies == "act":
            return self._prove(step, reading, verdict)
        if verdict.bad and not self._told_lately(reading.step):
            self._told_at = reading.step
            return reading, verdict
        return reading, replace(verdict, severity="note")

    def _told_lately(self, step: int) -> bool:
        return self._told_at is not None and 0 <= step - self._told_at < TOLD_FOR

    def outlying_at(self, step: int) -> Origin | None:
        """The few rows that explain the loss of this step, where there are any."""
        found = self._outlying
        return found if found is not None and found.step == step else None

    def _rows_that_stand_out(self, step: Step) -> Origin | None:
        """Look for a few rows of the batch far larger than all others. Runs no code of the user."""
        context = self._context
        try:
            found = outlying_rows(step.index, step.micro_batches)
            if found is not None and self._usual(found):
                return None
            if found is not None:
                return name_samples(found, step, context.data.recent, context.config.id_key)
            for delivered, micro in delivered_beside(step, context.data.recent):
                # what the loader delivered holds the targets, which a call of the model does not
                tensors = delivered.tensors
                found = outlying_rows(step.index, [tensors])
                if found is not None:
                    position = int((found.tensor or "0").rpartition(":")[2])
                    named = f"batch tensor {position + 1} of {len(tensors)}"
                    rows = delivered.indices or ()
                    known = bool(found.samples) and max(found.samples) < len(rows)
                    names = tuple(f"row {rows[sample]}" for sample in found.samples)
                    number = micro if len(step.micro_batches) > 1 else None
                    return replace(
                        found, tensor=named, rows=names if known else (), micro_batch=number
                    )
        except Exception:
            # a container class of the user's may raise anything
            pass
        return None

    def _usual(self, found: Origin) -> bool:
        """Does a healthy batch have such rows as well? Then they explain nothing."""
        if self._context.memory.anchor is None:
            return False
        healthy = outlying_rows(0, self._context.memory.anchor[0].micro_batches)
        return healthy is not None and ALIKE * _largest_row(healthy) >= _largest_row(found)

    def _with_rows(self, verdict: Verdict, outlying: Origin | None) -> Verdict:
        """The verdict, with the rows of this step, or of one shortly before a runaway loss."""
        if outlying is not None:
            self._outlying = outlying
        found = outlying
        earlier = self._outlying
        if found is None and verdict.bad and earlier is not None:
            found = earlier if 0 <= self._last - earlier.step < TOLD_FOR else None
        if found is None:
            return verdict
        said = stands_out(found)
        if found is not outlying:
            said = f"shortly before, in step {found.step}, {said}"
        evidence = {**(verdict.evidence or {}), "outlier": said}
        return replace(verdict, summary=f"{verdict.summary}; {said}", evidence=evidence)

    def _measured(self, reading: Reading, outlying: Origin | None) -> tuple[Reading, Origin | None]:
        """Measure the last update and the way of the weights; the largest over the ranks."""
        own = None
        if outlying is not None:
            rank = self._context.agreement.world_rank
            several = self._context.agreement.size > 1
            own = to_jsonable(replace(outlying, rank=rank) if several else outlying)
        told = self._context.agreement.together(
            lambda: {**self._measure(), "outlying": own}, "the last update"
        )
        rows = [from_jsonable(Origin, each["outlying"]) for each in told if each["outlying"]]
        measured = replace(
            reading, update_ratio=_largest(told, "ratio"), weights_moved=_largest(told, "moved")
        )
        return measured, max(rows, key=_times_others, default=None)

    def _measure(self) -> dict[str, Any]:
        rates = self._context.history.rates
        ratio = None
        if rates:
            ratio = update_ratio(self._context.optimizer, rates[-1], self._last_used_norm())
        return {"ratio": ratio, "moved": self._rewinder.probation.moved_since_good()}

    def _last_used_norm(self) -> float | None:
        """Norm of the gradient that the last update was made of, where clipping is known."""
        norms = self._context.history.norms
        if not norms or not self._clips_itself:
            return None
        return min(norms[-1], self._context.config.clip_norm or math.inf)

    def _prove(self, step: Step, reading: Reading, verdict: Verdict) -> tuple[Reading, Verdict]:
        """Run the user's code again to compare losses, where the loss itself asks for it."""
        context = self._context
        history = context.history
        loss = reading.judged_loss
        asks = verdict.bad
        if loss is not None and history.best is not None and self._in_a_row >= LASTING:
            asks = asks or loss > history.progress.lost_limit
        compared = None
        moved = None
        if asks and context.agreement.size == 1:
            if step.replayable:
                compared = compare_with_best(context, self._rewinder.snapshots, step)
            if compared is None:
                moved = reading.weights_moved
            else:
                reading = replace(reading, repeat_loss=compared.now, repeat_before=compared.then)
        proven = blame_weights(verdict, reading, history, self._in_a_row, compared, moved)
        self.proven = proven.bad
        if proven.bad or not verdict.bad or self._told_lately(reading.step):
            return reading, proven
        # a runaway loss is reported even if nothing could be proven
        self._told_at = reading.step
        return reading, verdict

    def earlier_batch_now(self) -> tuple[float, float] | None:
        """Loss of an earlier healthy batch now and when it was new; None where it cannot be run."""
        if self._context.memory.anchor is None:
            return None
        step, then = self._context.memory.anchor
        try:
            now = reevaluate(step)
        except CollectiveInReplayError:
            return None
        if self._context.maximizes:
            now = -now
        return now, then


def stands_out(found: Origin) -> str:
    """`sample 17 (row 300) reaches 3e+06 in batch:1, 8.1e+05 times the largest other`."""
    who = found.culprits or "a row"
    if found.micro_batch is not None:
        who += f" of micro-batch {found.micro_batch + 1}"
    if found.rank is not None:
        who += f" on rank {found.rank}"
    verb = "reach" if len(found.samples) > 1 else "reaches"
    others = found.evidence.others_max or 0.0
    far = f"{_times_others(found):.3g} times the largest other" if others else "all others are 0"
    return f"{who} {verb} {number(found.evidence.sample_max)} in {found.tensor}, {far}"


def _largest_row(found: Origin) -> float:
    return found.evidence.sample_max or 0.0


def _times_others(found: Origin) -> float:
    return _largest_row(found) / (found.evidence.others_max or 1.0)


def _largest(told: list[dict[str, Any]], name: str) -> float | None:
    known = [facts[name] for facts in told if facts[name] is not None]
    return max(known, default=None)
