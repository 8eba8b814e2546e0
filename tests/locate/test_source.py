"""The user's line behind an operation, and how it is spelled and quoted."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import torch

import stepguard
from stepguard.locate.source import Line, context, is_users, spell, user_line


def test_files_of_torch_stepguard_and_python_are_not_the_users() -> None:
    assert is_users(__file__)
    assert is_users("/project/train.py")
    assert is_users(str(Path(torch.__file__).parents[1] / "transformers" / "trainer.py"))
    assert not is_users(torch.__file__)
    assert not is_users(stepguard.__file__)
    assert not is_users(json.__file__)
    assert not is_users("<string>")
    assert is_users("<ipython-input-3-0f>")


def test_innermost_line_of_the_user_is_found() -> None:
    frame = inspect.currentframe()
    assert frame is not None
    assert user_line() == Line(__file__, frame.f_lineno)


def test_line_is_spelled_relative_to_the_working_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert spell(Line(str(tmp_path / "src" / "model.py"), 88)) == "src/model.py:88"
    assert spell(Line("/elsewhere/model.py", 3)) == "model.py:3"
    installed = tmp_path / "env" / "site-packages" / "library" / "loss.py"
    assert spell(Line(str(installed), 5)) == "loss.py:5"
    assert spell(None) is None


def test_context_marks_the_line_and_stops_at_the_ends_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "short.py"
    file.write_text("a = 1\n\nb = 2\n", encoding="utf-8")
    assert context(Line(str(file), 1)) == ("> 1 | a = 1", "  3 | b = 2")
    assert context(None) == ()
