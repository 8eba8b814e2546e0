"""stepguard keeps PyTorch training alive: it detects, locates and survives the bad step."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.2.0"

if TYPE_CHECKING:
    from stepguard._errors import CapsuleError as CapsuleError
    from stepguard._errors import ConfigError as ConfigError
    from stepguard._errors import JournalError as JournalError
    from stepguard._errors import SaveRefused as SaveRefused
    from stepguard._errors import StateError as StateError
    from stepguard._errors import StepguardError as StepguardError
    from stepguard._errors import StoreError as StoreError
    from stepguard._errors import TrainingHalted as TrainingHalted
    from stepguard.check.verify import verify as verify
    from stepguard.engine.wiring import WiringWarning as WiringWarning
    from stepguard.guard import Guard as Guard
    from stepguard.guard import StepResult as StepResult
    from stepguard.locate.witness import register_reference as register_reference
    from stepguard.records import Finding as Finding
    from stepguard.records import GuardConfig as GuardConfig
    from stepguard.records import Incident as Incident
    from stepguard.records import Origin as Origin
    from stepguard.records import Policy as Policy
    from stepguard.records import Probes as Probes
    from stepguard.records import Problem as Problem
    from stepguard.records import Ranks as Ranks
    from stepguard.records import Sink as Sink
    from stepguard.records import Snapshots as Snapshots
    from stepguard.records import Verification as Verification
    from stepguard.run.replay import replay as replay
    from stepguard.watching import watch as watch

# name -> module; resolved on first use, so that the torch-free commands never import torch
_HOMES = {
    "CapsuleError": "stepguard._errors",
    "ConfigError": "stepguard._errors",
    "Finding": "stepguard.records",
    "Guard": "stepguard.guard",
    "GuardConfig": "stepguard.records",
    "Incident": "stepguard.records",
    "JournalError": "stepguard._errors",
    "Origin": "stepguard.records",
    "Policy": "stepguard.records",
    "Probes": "stepguard.records",
    "Problem": "stepguard.records",
    "Ranks": "stepguard.records",
    "SaveRefused": "stepguard._errors",
    "Sink": "stepguard.records",
    "Snapshots": "stepguard.records",
    "StateError": "stepguard._errors",
    "StepResult": "stepguard.guard",
    "StepguardError": "stepguard._errors",
    "StoreError": "stepguard._errors",
    "TrainingHalted": "stepguard._errors",
    "Verification": "stepguard.records",
    "WiringWarning": "stepguard.engine.wiring",
    "register_reference": "stepguard.locate.witness",
    "replay": "stepguard.run.replay",
    "verify": "stepguard.check.verify",
    "watch": "stepguard.watching",
}

__all__ = sorted([*_HOMES, "__version__"])  # noqa: PLE0605


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'stepguard' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
