"""What one look at a subject can come to: pass, warn, fail, nothing to say, or something that was
not given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stepguard.records.preflight import Status


@dataclass(frozen=True, slots=True)
class Seen:
    """What one look came to."""

    status: Status
    evidence: tuple[str, ...] = ()
    fix: str = ""


class Missing(Exception):  # noqa: N818 (an answer, not a fault)
    """Something the item needs was not given; the text says what to give."""


class Pointless(Exception):  # noqa: N818 (an answer, not a fault)
    """The item does not apply to this subject; the text says why."""


def passed(*evidence: str) -> Seen:
    return Seen("pass", evidence)


def warned(*evidence: str, fix: str) -> Seen:
    return Seen("warn", evidence, fix)


def failed(*evidence: str, fix: str) -> Seen:
    return Seen("fail", evidence, fix)


def some(names: Sequence[str], most: int = 4) -> str:
    """`a, b, c and 12 more`."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def count(number: int, noun: str) -> str:
    """`1 example`, `2 examples`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
