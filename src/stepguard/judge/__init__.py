"""Judge a step and decide what to do about it: pure functions, the same on every rank."""

from stepguard.judge.history import History
from stepguard.judge.judge import judge

__all__ = ["History", "judge"]
