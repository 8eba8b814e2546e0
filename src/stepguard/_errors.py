"""The exceptions stepguard raises.

StepguardError
├── ConfigError        a setting is wrong (also a ValueError)
├── TrainingHalted     the policy stopped the run; carries the incident
├── JournalError       a run directory or journal cannot be read
├── CapsuleError       a capsule is damaged, too new, or cannot be run here
├── StoreError         a checkpoint cannot be written, or none can be opened
├── StateError         a state cannot be saved, or does not fit the model or optimizer
└── SaveRefused        a framework tried to save non-finite tensors; nothing was written
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepguard.records.incident import Incident

_TRACEBACK: Any = BaseException.__dict__["__traceback__"]
_HERE = f"{Path(__file__).parent}/"
TENSORS_NAMED = 3
"""Tensors that a message names."""
EXIT_OK = 0
EXIT_SCRIPT_FAILED = 1
EXIT_USAGE = 2
EXIT_HALTED = 3
EXIT_CORRUPT = 4
EXIT_PREFLIGHT = 5


class StepguardError(Exception):
    """Base class of stepguard's exceptions.

    except stepguard.StepguardError as error:
        print(error)
    """


class ConfigError(StepguardError, ValueError):
    """A setting has an invalid value; the message says what is allowed.

    For instance:

        GuardConfig(clip_norm=-1.0)   # ConfigError: GuardConfig.clip_norm=-1.0 must be ...
    """


class JournalError(StepguardError):
    """A run directory has no journal, or one that this version cannot read.

    `stepguard report DIR` ends with exit code 2 and this message.
    """


class CapsuleError(StepguardError):
    """A capsule is damaged, too new, without data, or its build function cannot be imported.

    For instance:

        stepguard.replay("runs/a/incidents/00000048-nonfinite_loss")   # may raise it
    """


class StoreError(StepguardError):
    """A checkpoint could not be written, or none can be opened; the message says why.

    try:
        done = guard.restore()
    except stepguard.StoreError:
        done = 0   # nothing to resume from
    """


class StateError(StepguardError):
    """A state cannot be saved, or does not fit the model or optimizer; the message says which part.

    For instance:

        guard.restore()   # StateError if model or optimizer differ from those saved
    """


class SaveRefused(StepguardError):  # noqa: N818 (an outcome, like TrainingHalted)
    """A save was refused because stored tensors are non-finite. Nothing was written or deleted.

    For instance:

        try:
            accelerator.save_state("checkpoint")
        except stepguard.SaveRefused as refusal:
            print(refusal.tensors)
    """

    def __init__(self, what: str, tensors: Sequence[str]) -> None:
        super().__init__(what, tuple(tensors))
        self.what = what
        self.tensors = tuple(tensors)

    def __str__(self) -> str:
        named = ", ".join(self.tensors[:TENSORS_NAMED])
        if len(self.tensors) > TENSORS_NAMED:
            named += ", ..."
        return (
            f"refused to save {self.what}: non-finite stored tensors: {len(self.tensors)} "
            f"({named}); load the last good checkpoint, or close() the guard to save it as it is"
        )


class TrainingHalted(StepguardError):  # noqa: N818 (public name fixed by the design: it is an outcome, not a fault)
    """The policy stopped the run. The weights are the newest good ones.

    except stepguard.TrainingHalted as halted:
        print(halted.incident.summary, halted.state)
    """

    def __init__(self, incident: Incident, *, state: str | None = None, restart: str = "") -> None:
        super().__init__(incident)
        self.incident = incident
        self.state = state
        """Checkpoint with the newest good state; None without a run directory or a good state."""
        self.restart = restart
        """Whether a restart can help: `helps`, `same-fault`, or `change-code`."""
        self.printed = False
        """Whether this process has printed the same facts as a line for launchers."""

    @property
    def __traceback__(self) -> TracebackType | None:
        """The user's frames only, whatever prints them (hydra, click, a logger): their line was
        stopped.
        """
        return _without_ours(_TRACEBACK.__get__(self))

    @__traceback__.setter
    def __traceback__(self, trace: TracebackType | None) -> None:
        _TRACEBACK.__set__(self, trace)

    def __str__(self) -> str:
        said = f"training halted at step {self.incident.step}: {self.incident.summary}"
        return f"{said}; the newest good state is {self.state}" if self.state is not None else said


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """A copy of a traceback without the frames of this package."""
    kept: list[TracebackType] = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_HERE):
            kept.append(trace)
        trace = trace.tb_next
    copy: TracebackType | None = None
    for frame in reversed(kept):
        copy = TracebackType(copy, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return copy
