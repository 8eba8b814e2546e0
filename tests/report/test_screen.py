"""Writing to streams of every kind."""

from __future__ import annotations

import io

import pytest

from report.literals import FakeTerminal
from stepguard.report import screen


def test_width_is_that_of_the_window_within_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert screen.columns(io.StringIO()) == screen.PIPE_WIDTH
    for given, used in (("10", screen.NARROWEST), ("77", 77), ("999", screen.WIDEST)):
        monkeypatch.setenv("COLUMNS", given)
        assert screen.columns(io.StringIO()) == used


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert screen.wants_colour(FakeTerminal()) and not screen.wants_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not screen.wants_colour(FakeTerminal())


def test_characters_that_a_stream_cannot_hold_are_replaced() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    screen.put("a…b é\n", stream)
    assert raw.getvalue() == b"a~b ?\n"


def test_closed_stream_is_no_error() -> None:
    stream = io.StringIO()
    stream.close()
    assert not screen.is_tty(stream)
    screen.put("x", stream)


def test_text_on_paper_has_no_trailing_blanks() -> None:
    console = screen.paper(width=20, colour=False)
    console.print("a   ")
    assert screen.text_on(console) == "a\n"
