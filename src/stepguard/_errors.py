"""The exceptions stepguard raises.

StepguardError
├── ConfigError        a setting is wrong (also a ValueError)
├── TrainingHalted     the policy stopped the run; carries the incident
├── JournalError       a run directory or journal cannot be read
├── CapsuleError       a capsule is damaged, too new, or cannot be run here
└── StoreError         a checkpoint cannot be written, or none can be opened
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepguard.records.incident import Incident

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
    """A checkpoint was not written, or no checkpoint can be opened; the message names what stands in the way."""


class TrainingHalted(StepguardError):  # noqa: N818 (public name fixed by the design: it is an outcome, not a fault)
    """The policy stopped the run. The weights are those from before the bad step."""

    def __init__(self, incident: Incident) -> None:
        super().__init__(incident)
        self.incident = incident

    def __str__(self) -> str:
        return f"training halted at step {self.incident.step}: {self.incident.summary}"
