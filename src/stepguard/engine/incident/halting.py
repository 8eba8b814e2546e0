"""Stop the run: tell people and launchers, and raise TrainingHalted."""

from __future__ import annotations

import sys
from pathlib import Path, PurePath
from types import TracebackType
from typing import Literal, get_args

from stepguard._errors import EXIT_HALTED, TrainingHalted
from stepguard.engine.context import Context
from stepguard.engine.recover.rewind import Rewinder
from stepguard.records import Incident
from stepguard.report import screen

Restart = Literal["helps", "same-fault", "change-code"]
"""`helps`: the state is healthy and the same program gets past the fault from there. `same-fault`:
the state is healthy, and nothing shows that the same program would not come from there to the same
fault. `change-code`: there is no healthy state to resume from.
"""
BORN_IN_THE_STEP = ("nonfinite_loss", "nonfinite_gradient", "infinite_norm")
"""Verdicts on what forward and backward made: another step need not make it again."""


def halt(context: Context, rewinder: Rewinder, incident: Incident, state: Path | None) -> None:
    """Raise TrainingHalted; `state` is where the newest good state was left."""
    restart = restart_after(context, rewinder, incident, state)
    cause = incident.findings[0].code if incident.findings else incident.verdict.kind
    line = exit_line(step=incident.step, cause=cause, restart=restart, state=state)
    where = str(state) if state is not None else None
    halted = TrainingHalted(incident, state=where, restart=restart)
    try:
        context.outputs.halted(incident, line)
    finally:
        if context.agreement.world_rank == 0:
            # not one of the outputs: launchers read it whatever people want to see
            screen.put(f"{line}\n", sys.stderr)
            halted.printed = True
    exit_with_code_three()
    raise halted


def restart_after(
    context: Context, rewinder: Rewinder, incident: Incident, state: Path | None
) -> Restart:
    """Say what the same program would come to if it were started again from `state`.

    A promise is made only where something shows that the fault does not return: the replay did not
    show it, or it is in samples that a restart passes over, because the guard knows the loader.
    """
    if state is None:
        return "change-code"
    reading = incident.reading
    in_the_step = incident.verdict.kind in (*BORN_IN_THE_STEP, "nonfinite_input")
    if _recurred(context, rewinder, incident) or not in_the_step or reading.bad_state:
        return "same-fault"
    origin = incident.origin
    transient = origin is not None and origin.reproduced is False
    in_samples = bool(reading.bad_inputs or (origin is not None and origin.samples))
    return "helps" if transient or (in_samples and context.feed is not None) else "same-fault"


def _recurred(context: Context, rewinder: Rewinder, incident: Incident) -> bool:
    """Has it come more than once: in a row, in spite of all rewinds, or in an earlier attempt?"""
    if incident.step in rewinder.past.stopped_at or incident.step == rewinder.retried:
        return True
    budget = context.budget
    policy = context.config.policy
    spent = 0 < policy.max_rewinds <= budget.rewinds or bool(budget.exceeded(policy))
    return budget.consecutive > 1 or (spent and budget.total > 1)


def exit_line(
    *, step: int, cause: str, restart: Restart, state: str | PurePath | None = None
) -> str:
    """The line on stderr by which a launcher learns that the run stopped and if a restart helps.

    `stepguard: HALTED step=48 cause=SG204 restart=same-fault state=runs/a/checkpoints/step-40`,
    without a newline. `cause` is the code of the first finding, or the kind of the verdict where
    nothing was found. `state` is where the newest good state lies; it stands last, so that a path
    with blanks is everything up to the end of the line.
    """
    if restart not in get_args(Restart):
        raise ValueError(
            f"restart={restart!r} is not known; use one of {', '.join(get_args(Restart))}."
        )
    where = _one_line(str(state or "")) or "none"
    word = "-".join(_one_line(cause).split()) or "unknown"
    return f"stepguard: HALTED step={step} cause={word} restart={restart} state={where}"


def _one_line(text: str) -> str:
    """Replace what does not print: a path may hold a newline, a line may not."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def exit_with_code_three() -> None:
    """Let an uncaught TrainingHalted end the process with exit code 3 instead of Python's 1."""
    previous = sys.excepthook
    if getattr(previous, "_stepguard", False):
        return

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(value, TrainingHalted):
            previous(kind, value, trace)
            return
        if not value.printed:
            print(f"stepguard: {value}", file=sys.stderr)
        raise SystemExit(EXIT_HALTED)

    hook._stepguard = True  # type: ignore[attr-defined]
    hook._previous = previous  # type: ignore[attr-defined]
    sys.excepthook = hook
