"""How many incidents a run has had, and how many it may still have."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stepguard.records.settings import Policy

PER = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Counts only grow through `spend`; a committed step resets what is counted in a row."""

    consecutive: int = 0
    recent: tuple[int, ...] = ()
    """Steps of the incidents within the last 1000 steps."""
    total: int = 0
    rewinds: int = 0

    def spend(self, step: int) -> Budget:
        """One more incident."""
        recent = (*(s for s in self.recent if s > step - PER), step)
        return replace(self, consecutive=self.consecutive + 1, recent=recent, total=self.total + 1)

    def committed(self) -> Budget:
        """A step went through."""
        return self if self.consecutive == 0 else replace(self, consecutive=0)

    def exceeded(self, policy: Policy) -> str:
        """Which limit the incidents so far break, in words; empty when none."""
        if self.consecutive > policy.max_consecutive:
            return f"{self.consecutive} incidents in a row, {policy.max_consecutive} are allowed"
        if len(self.recent) > policy.max_per_1000:
            return f"{len(self.recent)} incidents within {PER} steps, {policy.max_per_1000} are allowed"
        if self.total > policy.max_total:
            return f"{self.total} incidents in this run, {policy.max_total} are allowed"
        return ""
