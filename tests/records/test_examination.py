"""The status of an examination is that of its worst section."""

from __future__ import annotations

import pytest

from stepguard.records.incident import Examination, Section, SectionStatus, not_checked


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ((), "fine"),
        (("fine", "warning"), "warning"),
        (("failed", "warning"), "failed"),
        (("failed", "corrupt", "fine"), "corrupt"),
    ],
)
def test_worst_section_counts(statuses: tuple[SectionStatus, ...], expected: str) -> None:
    sections = [Section(title="made up", status=status) for status in statuses]
    missing = not_checked("other", "give --config FILE")
    assert Examination(path="run", sections=(*sections, missing)).status == expected
