"""docs/how-it-works.md shows the tree of the source as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts import write_tree


def test_page_shows_the_present_tree() -> None:
    text = write_tree.PAGE.read_text(encoding="utf-8")
    assert write_tree.page(text) == text, "run python scripts/write_tree.py"


def test_every_module_has_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (tmp_path / "one.py").write_text('"""The first.\n\nMore.\n"""\n')
    (package / "__init__.py").write_text('"""A package."""\n')
    (package / "two.py").write_text('"""The second."""\n')
    lines = write_tree.tree(tmp_path)
    assert [line.split() for line in lines] == [
        ["one.py", "The", "first."],
        ["package/", "A", "package."],
        ["two.py", "The", "second."],
    ]
