"""Why it happened, with evidence, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stepguard.records.field_docs import documented

Safety = Literal["safe", "changes-numbers", "changes-training"]
"""What a remedy does to healthy steps: nothing, other values, or another training."""
Certainty = Literal["certain", "likely", "possible"]
"""How sure a finding is: no other cause fits, others are not excluded, rather a circumstance."""


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Lines of the user's program, and what to write instead of them."""

    file: str
    """The source file, as Python knows it."""
    line: int
    """The first of the lines, counted from 1."""
    old: tuple[str, ...]
    """The lines as they are."""
    new: tuple[str, ...]
    """The lines as they are to be."""


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One thing the user can do, with a snippet to paste."""

    title: str
    """What to do, in one line."""
    snippet: str = ""
    """Code to paste; may be empty."""
    safety: Safety = "safe"
    """What it does to healthy steps: nothing, other values, or another training."""
    edits: tuple[Edit, ...] = ()
    """The same as changes of the program; empty where the remedy is no change of its lines."""
    needs: tuple[str, ...] = ()
    """Functions of `stepguard.numerics` that the edits call."""
    tried: str = ""
    """What came of running the step with it, or why it was not run; empty without edits."""
    proven: bool = False
    """The step was run with it: loss and gradients are finite."""
    loss: float | None = None
    """The loss of the step with it, where it was run."""


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause, most certain first in an incident.

    For instance:

        finding = guard.incidents[0].findings[0]
        print(finding.code, finding.title, *finding.evidence)
    """

    code: str
    """Such as `SG204`; `stepguard explain SG204` prints its page."""
    title: str
    """The cause in a few words."""
    evidence: tuple[str, ...] = ()
    """Sentences with numbers: the operand that was 0, the row that was masked."""
    certainty: Certainty = "possible"
    """certain: nothing else fits; likely: others are not excluded; possible: a circumstance."""
    remedies: tuple[Remedy, ...] = ()
    """Ordered by how safe they are to apply."""
