"""What a healthy run is heading for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A quantity that runs towards a limit, and the step at which it gets there."""

    quantity: str
    """What is measured, in words."""
    place: str
    """Module or parameter; empty where it is of the whole run."""
    since: int
    """First step of the trend."""
    first: float
    """What was measured then."""
    now: int
    """Newest step that was measured."""
    value: float
    """What was measured then."""
    limit: float
    step: int
    """Step at which the limit is met if nothing changes."""
    earliest: int
    latest: int

    @property
    def sentence(self) -> str:
        """From where to where it went, and when it gets to its limit."""
        place = f" of {self.place}" if self.place else ""
        return (
            f"{self.quantity}{place} went from {self.first:.3g} at step {self.since} to "
            f"{self.value:.3g} at step {self.now}; it reaches {self.limit:.3g} at about step "
            f"{self.step} ({self.earliest} to {self.latest})"
        )
