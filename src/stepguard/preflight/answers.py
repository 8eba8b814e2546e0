"""Answers of an item: pass, warn or fail with evidence, or why there is no answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stepguard.records.preflight import Status
from stepguard.report.phrases import first_few


@dataclass(frozen=True, slots=True)
class Answer:
    """What one item found."""

    status: Status
    evidence: tuple[str, ...] = ()
    fix: str = ""


class NotGiven(Exception):  # noqa: N818 (an answer, not a fault)
    """Something the item needs was not given; the text says what to give."""


class NotApplicable(Exception):  # noqa: N818 (an answer, not a fault)
    """The item does not apply to this subject; the text says why."""


def passed(*evidence: str) -> Answer:
    return Answer("pass", evidence)


def warned(*evidence: str, fix: str) -> Answer:
    return Answer("warn", evidence, fix)


def failed(*evidence: str, fix: str) -> Answer:
    return Answer("fail", evidence, fix)


def listed(label: str, names: Sequence[str], most: int = 4) -> list[str]:
    """`missing: a, b and 3 more` as the only sentence; no sentence for no names."""
    if not names:
        return []
    return [f"{label}: {first_few(names, most)}"]


def one_line(fault: Exception, most: int) -> str:
    """Type and text of an exception in one line, the text cut after `most` characters."""
    text = " ".join(str(fault).split())
    return f"{type(fault).__name__}: {text[:most]}"
