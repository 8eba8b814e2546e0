"""What the commands that read checkpoints share: the progress bar."""

from __future__ import annotations

from pathlib import Path

import pytest

from check import saved
from stepguard.cli import _results


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return saved.save_zip(tmp_path / "good.pt", saved.trained())


def test_bar_appears_on_a_terminal_after_a_while_and_leaves_no_trace(
    good: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_results, "PATIENCE", -1.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    (found,) = _results.verified([good])
    shown = capsys.readouterr()
    assert found.ok and "verifying" in shown.err and shown.out == ""
    monkeypatch.setattr(_results, "PATIENCE", 1e9)
    _results.verified([good])
    assert capsys.readouterr().err == ""


def test_bar_is_not_drawn_into_a_pipe(
    good: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_results, "PATIENCE", -1.0)
    _results.verified([good])
    assert capsys.readouterr().err == ""
