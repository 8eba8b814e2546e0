"""Preflight: what a run would start with, checked before it costs anything.

    from stepguard.preflight import Subject, check

    result = check(Subject(model=model, optimizer=optimizer, loss_fn=loss_fn, loader=loader))
    assert result.ok, result.of("fail")

Names are resolved on first use, so that reading a configuration file imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepguard.preflight.run import check
    from stepguard.preflight.subject import Subject, Tracked

_HOMES = {
    "Subject": "stepguard.preflight.subject",
    "Tracked": "stepguard.preflight.subject",
    "check": "stepguard.preflight.run",
}

__all__ = ["Subject", "Tracked", "check"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'stepguard.preflight' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
