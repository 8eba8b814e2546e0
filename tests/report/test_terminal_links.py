"""`file:line` in a panel is a link (OSC 8) in a person's terminal, and plain text elsewhere."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest

from stepguard.records import Incident, Origin, Reading, Verdict
from stepguard.report import screen
from stepguard.report.terminal import Terminal


class Window(StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def incident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Incident:
    monkeypatch.chdir(tmp_path)
    for name in ("CI", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    (tmp_path / "train.py").write_text("")
    return Incident(
        id="00000003-nonfinite_loss",
        step=3,
        reading=Reading(step=3, loss=float("nan")),
        verdict=Verdict(kind="nonfinite_loss"),
        origin=Origin(step=3, phase="forward", op="aten.log", module="", source="train.py:15"),
    )


def shown(incident: Incident, stream: StringIO) -> str:
    Terminal(stream).incident(incident)
    return stream.getvalue()


def test_the_place_is_a_link_in_a_terminal(incident: Incident, tmp_path: Path) -> None:
    text = shown(incident, Window())
    assert f"{(tmp_path / 'train.py').as_uri()}#15\x1b\\" in text
    assert "\x1b]8;" in text


@pytest.mark.parametrize(
    ("name", "value"), [("CI", "true"), ("TERM", "dumb"), ("TERM", "linux"), ("NO_COLOR", "1")]
)
def test_other_terminals_get_plain_text(
    incident: Incident, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    text = shown(incident, Window())
    assert "\x1b]8;" not in text
    assert "train.py:15" in text


def test_pipes_and_files_that_are_gone_get_plain_text(incident: Incident, tmp_path: Path) -> None:
    assert "\x1b" not in shown(incident, StringIO())
    (tmp_path / "train.py").unlink()
    assert "\x1b]8;" not in shown(incident, Window())


def test_a_place_in_a_notebook_is_no_link(incident: Incident) -> None:
    window = Window()
    place = screen.Place("forward: log at cell [3], line 5", "cell [3], line 5")
    assert "\x1b]8;" not in screen.draw(window, lambda console: console.print(place))
