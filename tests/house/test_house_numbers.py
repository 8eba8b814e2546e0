"""The script that measures the house counts what it says, and its gate closes."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts import house_numbers

FOLDED = '''"""A file with one of each."""

# a comment
a, b = 1, 2
c = a if b else 0
d = [x for x in range(3)]
a, b = b, a
first, second = divmod(7, 2)
'''


def branches(count: int) -> str:
    """A function of complexity `count + 1`."""
    lines = [f"    if x == {number}:\n        return {number}\n" for number in range(count)]
    return "def f(x):\n" + "".join(lines) + "    return None\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "folded.py").write_text(FOLDED)
    return tmp_path


def test_counts_of_a_file(project: Path) -> None:
    found = house_numbers.measure(project / "room" / "folded.py")
    assert (found.modules, found.lines, found.filled) == (1, 8, 7)
    assert (found.comments, found.conditional, found.comprehensions) == (1, 1, 1)
    assert found.tuples == 1
    assert (found.wide, found.complex) == (0, 0)


@pytest.mark.parametrize(
    ("source", "complexity"),
    [
        (branches(15), 16),
        ("def f(x):\n    return " + "(x if x else " * 15 + "1" + ")" * 15, 16),
        ("def f(x):\n    return " + " or ".join(["x"] * 16), 16),
        ("def f(x):\n    return [y for y in x" + " if y" * 14 + "]", 16),
    ],
)
def test_function_above_the_limit_is_named(tmp_path: Path, source: str, complexity: int) -> None:
    (tmp_path / "a.py").write_text(source)
    assert house_numbers.over_limit(tmp_path / "a.py") == [("f", 1, complexity)]


def test_method_and_nested_function_are_named_once(tmp_path: Path) -> None:
    inside = "".join(f"    {line}\n" for line in branches(15).splitlines())
    (tmp_path / "a.py").write_text(f"class A:\n{inside}\ndef outer():\n{inside}")
    names = [name for name, _, _ in house_numbers.over_limit(tmp_path / "a.py")]
    assert sorted(names) == ["A.f", "f"]


@pytest.mark.parametrize(("count", "code"), [(14, 0), (15, 1)])
def test_gate_closes_above_the_limit(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    code: int,
) -> None:
    (tmp_path / "a.py").write_text(branches(count))
    monkeypatch.setattr("sys.argv", ["house_numbers.py", "--check", str(tmp_path)])
    assert house_numbers.main() == code
    assert ("complexity 16, more than 15" in capsys.readouterr().out) is bool(code)


def test_module_without_a_mirrored_test_is_named(tmp_path: Path) -> None:
    package = tmp_path / "src"
    tests = tmp_path / "tests"
    for name in ("a/__init__.py", "a/one.py", "a/_two.py", "a/three.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("")
    (tests / "a").mkdir(parents=True)
    (tests / "a" / "test_one.py").write_text("")
    (tests / "a" / "test_two_more.py").write_text("")
    assert house_numbers.without_test(package, tests) == [package / "a" / "three.py"]


def test_table_has_a_row_for_each_package_and_one_for_all(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["house_numbers.py", str(project)])
    assert house_numbers.main() == 0
    printed = capsys.readouterr().out
    assert "room" in printed and "all" in printed
