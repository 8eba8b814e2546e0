"""Preflight: what a run would start with, checked before it costs anything.

from stepguard.preflight import Subject, check
result = check(Subject(model=model, optimizer=optimizer, loss_fn=loss_fn, loader=loader, config=config))
"""

from stepguard.preflight.run import check
from stepguard.preflight.subject import Subject
from stepguard.preflight.tracking import Tracked

__all__ = ["Subject", "Tracked", "check"]
