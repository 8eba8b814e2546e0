"""Sentences that answers are made of."""

from __future__ import annotations

from stepguard.check.inspection import failed, one_line, passed


def test_exception_is_one_short_line() -> None:
    fault = ValueError("first line\n   and    more of it")
    assert one_line(fault, 14) == "ValueError: first line and"


def test_only_what_is_wrong_needs_a_fix() -> None:
    assert passed("fine").fix == ""
    assert failed("bad", "worse", fix="Mend it.").evidence == ("bad", "worse")
