"""Choosing what to do about an incident: pure, so that every rank chooses the same."""

from stepguard.policy.decide import Budget, decide

__all__ = ["Budget", "decide"]
