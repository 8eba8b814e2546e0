"""Healthy steps run again from the same state: does this machine give the same values twice?

A step is run twice more before its update, and every operation of one run is compared with that of
the other. The training state is put back, so that the step goes on as if nothing had happened.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from stepguard.engine.context import Context
from stepguard.locate.operation_log import (
    OperationLog,
    compare,
    line_of,
    record_passes,
)
from stepguard.locate.replay import LossFunctionState
from stepguard.records.probes import AuditFacts
from stepguard.state.batch import Step, rebuild
from stepguard.state.isolation import untouched
from stepguard.tensors.torch_private import dispatch_mode_stack, graphs_compiled

RUNS = 4
"""Runs of a step whose first two differ: a machine that erred once is the odd one of them, while a
kernel whose result changes from run to run leaves no three of them alike."""


class Audit:
    """Runs every Nth healthy step of one guard again. All ranks do so at the same steps."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._every = context.config.probes.audit_every
        self.why_not = ""
        """Why steps of this run cannot be audited, or no longer."""

    def due(self, step: int) -> bool:
        """True if this step is to be audited."""
        return self._every is not None and not self.why_not and (step + 1) % self._every == 0

    def run(self, step: Step) -> AuditFacts | None:
        """Run the step twice more; None where both gave the same."""
        refused = {
            "the step cannot be run again: use guard.step or guard.loss": not (
                step.replayable or step.model_only
            ),
            # two modes would see each other's work
            "another dispatch mode is active (a tracer, a FLOP counter)": dispatch_mode_stack(),
        }
        self.why_not = next((why for why, holds in refused.items() if holds), "")
        if self.why_not:
            return None
        kept = LossFunctionState(step.loss_fn) if step.loss_fn is not None else None
        logs = [_run(step, kept) for _ in range(2)]
        if compare(*logs).same:
            return None
        logs += [_run(step, kept) for _ in range(2, RUNS)]
        odd = _odd_one(logs)
        if odd is None:
            first = compare(*logs[:2]).first
            where = f" ({line_of(first)})" if first is not None else ""
            self.why_not = f"runs of one step differ from each other every time{where}"
            return None
        found = compare(logs[logs[0] is odd], odd)
        first = found.first
        # other operations, or other numbers to begin with: the program differs, not the machine
        if first is None or not first.same_operands or any(found.only) or found.stored:
            self.why_not = "the step does not run the same operations on the same data each time"
            return None
        return AuditFacts(
            step=step.index,
            rank=self._context.agreement.world_rank,
            runs=RUNS,
            op=first.op,
            place=line_of(first),
            values=tuple(first.outputs),
        )


def _run(step: Step, kept: LossFunctionState | None) -> OperationLog:
    """Run the step into a log, and leave everything as it was."""
    log = OperationLog("")
    if kept is not None:
        kept.restore()

    def copied(batch: Any) -> Any:
        # a loss function may write into its batch
        return rebuild(batch, lambda _, t: t.detach().clone().requires_grad_(t.requires_grad))

    # compiled code would hide its operations
    eager = torch.compiler.set_stance("force_eager") if graphs_compiled() else nullcontext()
    with eager, untouched(step):
        step.buffers.restore()
        parts = ((index, copied(batch), 1.0) for index, batch in enumerate(step.micro_batches))
        record_passes(log, step, parts)
    if kept is not None:
        kept.restore()
    return log


def _odd_one(logs: list[OperationLog]) -> OperationLog | None:
    """The only run that differs, where all others agree."""
    for odd in logs:
        first, *others = [one for one in logs if one is not odd]
        if all(compare(first, one).same for one in others):
            return odd
    return None
