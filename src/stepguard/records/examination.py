"""What `stepguard doctor` found: sections, each with a status and sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SectionStatus = Literal["fine", "warning", "failed", "corrupt", "not checked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One part of the examination."""

    title: str
    status: SectionStatus
    lines: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    """Exact commands that follow from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """All sections, in their fixed order."""

    path: str
    sections: tuple[Section, ...]

    @property
    def status(self) -> SectionStatus:
        """The worst of all; what was not checked does not count."""
        found = {section.status for section in self.sections}
        worst: tuple[SectionStatus, ...] = ("corrupt", "failed", "warning")
        for status in worst:
            if status in found:
                return status
        return "fine"


def not_checked(title: str, why: str) -> Section:
    """A section without input; the text says what to give."""
    return Section(title=title, status="not checked", lines=(why,))
