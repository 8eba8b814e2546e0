"""Closing a step: what a committed step leaves behind, and what a vetoed one puts back."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import TracebackType

import torch

from stepguard._errors import EXIT_HALTED, TrainingHalted
from stepguard.engine.context import Context
from stepguard.engine.incident.exit_line import Restart, exit_line
from stepguard.engine.incident.incident_record import record
from stepguard.engine.recover.resume_lr import scale_rates
from stepguard.engine.recover.snapshots import Recovery
from stepguard.records import Decision, Incident, Reading
from stepguard.state.step import Step

ANCHOR_EVERY = 16
"""Committed steps between two remembered healthy batches."""


def committed(context: Context, step: Step, reading: Reading) -> None:
    """The update went through and was healthy."""
    context.history.add(reading)
    context.overflows_in_a_row = 0
    if reading.scale is not None:
        context.worked_scale = max(reading.scale, context.worked_scale or 0.0)
    context.budget = context.budget.committed()
    if context.outliers is not None:
        context.outliers.committed()
    if context.history.committed % ANCHOR_EVERY == 1 or context.anchor is None or _young(context):
        keep_anchor(context, step, reading)
    recorded(context, reading, went_through=True)


def keep_anchor(context: Context, step: Step, reading: Reading) -> None:
    """Remember this step as healthy, so that its batch can be tried on later weights."""
    loss = reading.judged_loss
    if step.replayable and loss is not None:
        context.anchor = (step, loss)


def recorded(context: Context, reading: Reading, *, went_through: bool) -> None:
    """One line a step."""
    if reading.overflow:
        context.overflows_in_a_row += 1
    if context.journal is not None:
        context.journal.write_step(reading, committed=went_through)
    if context.human is not None:
        context.human.step(reading, committed=went_through)
    context.outlet.step(reading, committed=went_through)


def _young(context: Context) -> bool:
    return context.history.committed < ANCHOR_EVERY


def apply(context: Context, recovery: Recovery, incident: Incident) -> Incident:
    """Do what was decided, then record it, then stop the run if that was it. Skipping needs nothing
    more.
    """
    decision = incident.decision
    if decision is not None:
        decision = _applied(context, recovery, decision)
        incident = replace(incident, decision=decision)
    stops = decision is not None and decision.action == "stop"
    if decision is not None and stops and incident.reading.bad_state:
        decision = replace(decision, rewound_to=recovery.leave_good_in_memory())
        incident = replace(incident, decision=decision)
    if context.unrecorded is not None:
        incident = record(context, incident, context.unrecorded[1])
    if stops:
        _stop(context, recovery, incident)
    return incident


def _applied(context: Context, recovery: Recovery, decision: Decision) -> Decision:
    """A rewind that fails leaves a state nobody knows: then the run stops."""
    if decision.action == "rewind":
        try:
            recovery.rewind()
        except Exception as fault:
            why = (
                f"the rewind to step {decision.rewound_to} failed ({type(fault).__name__}: {fault})"
            )
            return replace(
                decision, action="stop", reason=why, rewound_to=None, data=None, lr_factor=None
            )
    if decision.new_scale is not None:
        context.loss_scale = decision.new_scale
    if decision.lr_factor is not None:
        scale_rates(
            context.optimizer,
            context.scheduler,
            [decision.lr_factor] * len(context.optimizer.param_groups),
        )
    return decision


def _stop(context: Context, recovery: Recovery, incident: Incident) -> None:
    state = recovery.leave(incident)
    restart: Restart = "no"
    if state is not None:
        restart = "same-place" if incident.step in recovery.past.stopped_at else "helps"
    cause = incident.findings[0].code if incident.findings else incident.verdict.kind
    context.terminal.halted(incident)
    context.terminal.launcher_line(
        exit_line(step=incident.step, cause=cause, restart=restart, state=state)
    )
    exit_with_code_three()
    raise TrainingHalted(incident, state=str(state) if state is not None else None, restart=restart)


def hold_scaler(context: Context) -> None:
    """End the scaler's step without moving scale or growth: this batch never came."""
    scale = present_scale(context)
    if context.scaler is not None and context.scaling() and scale is not None:
        context.scaler.update(new_scale=scale)


def present_scale(context: Context) -> torch.Tensor | None:
    """A copy of the scaler's scale, on the device; None before its first use."""
    scale = context.scaler._get_scale_async() if context.scaler is not None else None
    return scale.detach().clone() if scale is not None else None


def exit_with_code_three() -> None:
    """An uncaught TrainingHalted ends the process with exit code 3 instead of Python's 1."""
    previous = sys.excepthook
    if getattr(previous, "_stepguard", False):
        return

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(value, TrainingHalted):
            previous(kind, value, trace)
            return
        print(f"stepguard: {value}", file=sys.stderr)
        raise SystemExit(EXIT_HALTED)

    hook._stepguard = True  # type: ignore[attr-defined]
    hook._previous = previous  # type: ignore[attr-defined]
    sys.excepthook = hook


def scaler_copy(context: Context) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Scale and growth counter, on the device."""
    scaler = context.scaler
    if (
        scaler is None
        or not context.scaling()
        or scaler._scale is None
        or scaler._growth_tracker is None
    ):
        return None
    return scaler._scale.clone(), scaler._growth_tracker.clone()


def restore_scaler(context: Context, saved: tuple[torch.Tensor, torch.Tensor] | None) -> None:
    scaler = context.scaler
    if (
        saved is not None
        and scaler is not None
        and scaler._scale is not None
        and scaler._growth_tracker is not None
    ):
        scaler._scale.copy_(saved[0])
        scaler._growth_tracker.copy_(saved[1])
