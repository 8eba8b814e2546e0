"""Why it happened, with evidence, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Safety = Literal["safe", "changes-numbers", "changes-training"]
"""What a remedy does to healthy steps: nothing, other rounding, or another training."""
Certainty = Literal["certain", "likely", "possible"]
"""How sure a finding is: no other cause fits, others are not excluded, rather a circumstance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One thing the user can do, with a snippet to paste."""

    title: str
    snippet: str = ""
    safety: Safety = "safe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause, most certain first in an incident."""

    code: str
    title: str
    evidence: tuple[str, ...] = ()
    """Sentences with numbers: the operand that was 0, the row that was masked."""
    certainty: Certainty = "possible"
    remedies: tuple[Remedy, ...] = ()
    """Ordered by how safe they are to apply."""
