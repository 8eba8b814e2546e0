"""Count how much a run has lost to bad steps, and say when it may lose no more."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from stepguard.records.settings import Policy

PER = 1000
LEAST_LOST = 32
"""Lost steps before their share counts: a bad stretch at the start of a run is soon half of it."""
MOST_REMEMBERED = 4096
"""Lost steps that are remembered, whatever the window."""
COUNTERS = ("consecutive", "total", "rewinds", "heals", "seen")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Counts of incidents, rewinds and lost samples; a committed step resets what is in a row."""

    consecutive: int = 0
    recent: tuple[int, ...] = ()
    """Steps of the incidents within the last 1000 steps."""
    total: int = 0
    rewinds: int = 0
    heals: int = 0
    seen: int = 0
    """Steps that were committed or lost so far."""
    lost: tuple[tuple[int, float], ...] = ()
    """For each bad step of the window: `seen` at that moment, and the share of its samples that was
    left out.
    """

    def spend(self, step: int) -> Budget:
        """Count one more incident."""
        within = [earlier for earlier in self.recent if earlier > step - PER]
        return replace(
            self,
            consecutive=self.consecutive + 1,
            recent=(*within, step),
            total=self.total + 1,
        )

    def lose(self, share: float, policy: Policy) -> Budget:
        """Count a step of which this share of the samples was left out, 1 for all of it."""
        seen = self.seen + 1
        since = seen - policy.lost_window
        kept = [entry for entry in self.lost if entry[0] > since]
        return replace(self, seen=seen, lost=(*kept[-MOST_REMEMBERED:], (seen, share)))

    def committed(self) -> Budget:
        """Count a step that went through."""
        return replace(self, consecutive=0, seen=self.seen + 1)

    def lost_share(self, policy: Policy) -> float:
        """Share of the last `lost_window` steps' samples that was left out; 0 while few were."""
        if len(self.lost) < LEAST_LOST or not self.seen:
            return 0.0
        return sum(share for _, share in self.lost) / min(policy.lost_window, self.seen)

    def exceeded(self, policy: Policy) -> str:
        """Say which limit the incidents so far break, in words; empty when none."""
        share = self.lost_share(policy)
        if share > policy.max_lost_share:
            window = min(policy.lost_window, self.seen)
            allowed = f"{policy.max_lost_share:.0%} are allowed (Policy.max_lost_share)"
            return f"{share:.0%} of the samples of the last {window} steps were left out, {allowed}"
        if _above(self.consecutive, policy.max_consecutive):
            return f"{_incidents(self.consecutive)} in a row, {policy.max_consecutive} are allowed"
        if _above(len(self.recent), policy.max_per_1000):
            allowed = f"{policy.max_per_1000} are allowed"
            return f"{_incidents(len(self.recent))} within {PER} steps, {allowed}"
        if _above(self.total, policy.max_total):
            return f"{_incidents(self.total)} in this run, {policy.max_total} are allowed"
        return ""


def _incidents(count: int) -> str:
    return "1 incident" if count == 1 else f"{count} incidents"


def _above(count: int, limit: int | None) -> bool:
    return limit is not None and count > limit


def budget_from(facts: dict[str, Any]) -> Budget:
    """Read a budget from plain containers; fields that this version does not know are left out."""
    counts = {name: facts[name] for name in COUNTERS if name in facts}
    lost = [(int(seen), float(share)) for seen, share in facts.get("lost", ())]
    return Budget(**counts, recent=tuple(facts.get("recent", ())), lost=tuple(lost))
