"""A new value of a public vocabulary cannot miss a table: every table has a line for each."""

from __future__ import annotations

from typing import get_args

from stepguard.records import incident
from stepguard.report import phrases
from stepguard.report.phrases import ACTION_WORDS


def test_every_action_has_its_words() -> None:
    assert set(ACTION_WORDS) == set(get_args(incident.Action))


def test_every_verdict_has_a_title() -> None:
    assert set(phrases.VERDICT_TITLES) == set(get_args(incident.VerdictKind)) - {"ok"}
