"""The exceptions stepguard raises.

StepguardError
├── ConfigError        a setting is wrong (also a ValueError)
├── TrainingHalted     the policy stopped the run; carries the incident
├── JournalError       a run directory or journal cannot be read
├── CapsuleError       a capsule is damaged, too new, or cannot be run here
└── StoreError         a checkpoint cannot be written, or none can be opened
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepguard.records.incident import Incident

_TRACEBACK: Any = BaseException.__dict__["__traceback__"]
_HERE = f"{Path(__file__).parent}/"
EXIT_OK = 0
EXIT_SCRIPT_FAILED = 1
EXIT_USAGE = 2
EXIT_HALTED = 3
EXIT_CORRUPT = 4
EXIT_PREFLIGHT = 5


class StepguardError(Exception):
    """Base of everything stepguard raises on purpose."""


class ConfigError(StepguardError, ValueError):
    """A setting has a value it cannot have; the message says what is allowed."""


class JournalError(StepguardError):
    """A run directory holds no journal, or one this version cannot read."""


class CapsuleError(StepguardError):
    """A capsule is damaged, too new, without data, or its build function cannot be imported."""


class StoreError(StepguardError):
    """A checkpoint was not written, or no checkpoint can be opened; the message names what stands
    in the way.
    """


class TrainingHalted(StepguardError):  # noqa: N818 (public name fixed by the design: it is an outcome, not a fault)
    """The policy stopped the run. The weights are the newest good ones there are."""

    def __init__(self, incident: Incident, *, state: str | None = None, restart: str = "") -> None:
        super().__init__(incident)
        self.incident = incident
        self.state = state
        """Checkpoint that holds the newest good state; None where there is no folder to write to,
        or nothing good.
        """
        self.restart = restart
        """Can a new start help: `helps`, `same-place`, or `no`."""

    @property
    def __traceback__(self) -> TracebackType | None:
        """Only the user's frames, whoever prints them (hydra, click, a logger): it is their line
        that was stopped.
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
