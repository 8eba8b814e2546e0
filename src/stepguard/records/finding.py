"""Why it happened, with evidence, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Safety = Literal["safe", "changes-numbers", "changes-training"]
"""Whether a remedy leaves healthy steps bit-identical, changes rounding, or changes what is
learned.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One thing the user can do, with a snippet to paste."""

    title: str
    snippet: str = ""
    safety: Safety = "safe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause, most likely first in an incident."""

    code: str
    title: str
    evidence: tuple[str, ...] = ()
    """Sentences with numbers: the operand that was 0, the row that was masked."""
    confidence: float = 0.5
    """Between 0 and 1."""
    remedies: tuple[Remedy, ...] = ()
    """Ordered by how safe they are to apply."""
