"""stepguard keeps PyTorch training alive: it detects, locates and survives the bad step."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from stepguard._errors import ConfigError as ConfigError
    from stepguard._errors import StepguardError as StepguardError
    from stepguard._errors import TrainingHalted as TrainingHalted
    from stepguard.guard import Guard as Guard
    from stepguard.guard import StepResult as StepResult
    from stepguard.guard import watch as watch
    from stepguard.records import Finding as Finding
    from stepguard.records import GuardConfig as GuardConfig
    from stepguard.records import Incident as Incident
    from stepguard.records import Origin as Origin
    from stepguard.records import Policy as Policy
    from stepguard.records import Problem as Problem
    from stepguard.records import Verification as Verification
    from stepguard.run.replay import replay as replay
    from stepguard.verification.api import verify as verify

# name -> module; resolved on first use, so that the torch-free commands never import torch
_HOMES = {
    "ConfigError": "stepguard._errors",
    "Finding": "stepguard.records",
    "Guard": "stepguard.guard",
    "GuardConfig": "stepguard.records",
    "Incident": "stepguard.records",
    "Origin": "stepguard.records",
    "Policy": "stepguard.records",
    "Problem": "stepguard.records",
    "StepResult": "stepguard.guard",
    "StepguardError": "stepguard._errors",
    "TrainingHalted": "stepguard._errors",
    "Verification": "stepguard.records",
    "replay": "stepguard.run.replay",
    "verify": "stepguard.verification.api",
    "watch": "stepguard.guard",
}

__all__ = [
    "ConfigError",
    "Finding",
    "Guard",
    "GuardConfig",
    "Incident",
    "Origin",
    "Policy",
    "Problem",
    "StepResult",
    "StepguardError",
    "TrainingHalted",
    "Verification",
    "__version__",
    "replay",
    "verify",
    "watch",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'stepguard' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
