"""Choosing what to do about an incident: pure, so that every rank chooses the same."""

from stepguard.policy.budget import Budget
from stepguard.policy.decide import decide

__all__ = ["Budget", "decide"]
