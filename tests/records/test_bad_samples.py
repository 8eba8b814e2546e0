"""Which lost samples would fail again."""

from __future__ import annotations

import pytest

from stepguard.records.checks import BadSamples


@pytest.mark.parametrize(
    ("cause", "again"), [("SG101", True), ("SG204", True), ("SG503", False), ("spike", False)]
)
def test_only_what_the_data_causes_fails_again(cause: str, again: bool) -> None:
    assert BadSamples(step=1, cause=cause).would_fail_again is again
