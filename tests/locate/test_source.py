"""The user's line behind an operation, and how it is spelled and quoted."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import stepguard
from stepguard.locate.source import Line, context, is_users, spell, statement, user_line


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
    line, number = user_line(), frame.f_lineno
    assert line is not None
    assert line[:2] == (__file__, number)
    assert line.code is frame.f_code and line.library is None


def test_line_is_spelled_relative_to_the_working_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert spell(Line(str(tmp_path / "src" / "model.py"), 88)) == "src/model.py:88"
    assert spell(Line("/elsewhere/model.py", 3)) == "model.py:3"
    installed = tmp_path / "env" / "site-packages" / "library" / "loss.py"
    assert spell(Line(str(installed), 5)) == "library/loss.py:5"
    assert spell(None) is None


def test_context_marks_the_line_and_stops_at_the_ends_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "short.py"
    file.write_text("a = 1\n\nb = 2\n", encoding="utf-8")
    assert context(Line(str(file), 1)) == ("> 1 | a = 1", "  3 | b = 2")
    assert context(None) == ()


def test_statement_is_quoted_whole_with_the_operation_in_it(tmp_path: Path) -> None:
    file = tmp_path / "two_lines.py"
    text = "def f(a, look):\n    b = (\n        a +\n        look())\n    if look() > 1: return b\n"
    file.write_text(text, encoding="utf-8")
    space: dict[str, Any] = {}
    exec(compile(text, str(file), "exec"), space)
    lines: list[Line] = []

    def look() -> int:
        frame = inspect.currentframe()
        assert frame is not None and frame.f_back is not None
        caller = frame.f_back
        lines.append(Line(str(file), caller.f_lineno, caller.f_code, caller.f_lasti))
        return 1

    space["f"](1, look)
    first, second = map(statement, lines)
    assert first is not None and second is not None
    assert (first.line, first.text) == (2, "    b = (\n        a +\n        look())")
    assert first.text.encode()[first.start : first.end] == b"look()"
    assert (second.line, second.text[second.start : second.end]) == (5, "look()")


LIBRARY = "def mean_of(loss, count):\n    return loss / count\n"


def test_operation_of_a_package_is_placed_at_the_users_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package's own line is named beside it, and no remedy rewrites it."""
    package = tmp_path / "site-packages" / "a_loss_library"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(LIBRARY, encoding="utf-8")
    monkeypatch.syspath_prepend(str(package.parent))
    import a_loss_library  # type: ignore[import-not-found]

    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    config = stepguard.GuardConfig(terminal="quiet")
    with stepguard.Guard(net, optimizer, config=config) as guard:

        def loss_fn(x: torch.Tensor) -> torch.Tensor:
            total = net(x).sum()
            return a_loss_library.mean_of(total, total * 0)  # type: ignore[no-any-return]

        guard.step(loss_fn, torch.ones(3, 2))
    (incident,) = guard.incidents
    origin = incident.origin
    assert origin is not None and origin.library == "a_loss_library/__init__.py:2"
    assert (origin.source or "").partition(":")[0].endswith("test_source.py")
    assert any("mean_of(" in line for line in origin.context)
    assert incident.findings[0].code == "SG201"
    for remedy in incident.findings[0].remedies:
        assert not remedy.snippet and not remedy.edits
        assert "a_loss_library" in remedy.title and "test_source.py" in remedy.title
