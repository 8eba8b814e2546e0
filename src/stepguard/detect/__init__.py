"""Judging a step: pure functions of a Reading and the run's history."""

from stepguard.detect.history import History
from stepguard.detect.judge import judge

__all__ = ["History", "judge"]
