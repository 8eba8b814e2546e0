"""A new value of a public vocabulary cannot miss a table: every table has a line for each."""

from __future__ import annotations

from typing import get_args

import pytest

from stepguard.records import decision, verdict
from stepguard.report import humanlog, phrases

ACTIONS = set(get_args(decision.Action))
TABLES = {
    "phrases.ACTION_DONE": phrases.ACTION_DONE,
    "phrases.ACTION_EFFECT": phrases.ACTION_EFFECT,
    "humanlog._ACTION_LINES": humanlog._ACTION_LINES,
}


@pytest.mark.parametrize("name", TABLES)
def test_every_action_has_its_words(name: str) -> None:
    assert set(TABLES[name]) == ACTIONS


def test_every_verdict_has_a_title() -> None:
    assert set(phrases.VERDICT_TITLES) == set(get_args(verdict.VerdictKind)) - {"ok"}
