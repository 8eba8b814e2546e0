"""Small files and functions, a docstring in each module, and nothing of the author's machine."""

from __future__ import annotations

from pathlib import Path

import pytest

import stepguard
from house import hygiene

ROOT = Path(__file__).parents[2]
SOURCE = Path(stepguard.__file__).parent
MODULES = sorted(SOURCE.rglob("*.py"))
BUILD_FILES = (
    "Makefile",
    ".ci/run",
    ".pre-commit-config.yaml",
    "pyproject.toml",
    "constraints.txt",
)


def _name(path: Path) -> str:
    return str(path.relative_to(SOURCE.parent))


def _faults(path: Path) -> list[str]:
    source = path.read_text(encoding="utf-8")
    found = hygiene.long_functions(source)
    if hygiene.too_long(source):
        found.append(f"has more than {hygiene.MOST_LINES} lines: split it")
    if not hygiene.explained(source):
        found.append("needs a docstring that says what it is for")
    return found


def test_modules_are_short_and_explained() -> None:
    assert len(MODULES) > 100
    assert {_name(path): found for path in MODULES if (found := _faults(path))} == {}


def test_no_file_names_a_path_of_the_machine() -> None:
    texts = {
        path: path.read_bytes().decode(errors="ignore") for path in hygiene.repository_files(ROOT)
    }
    assert len(texts) > 30
    found = {
        str(path.relative_to(ROOT)): lines
        for path, text in texts.items()
        if (lines := hygiene.machine_paths(text))
    }
    assert found == {}


@pytest.mark.parametrize("name", BUILD_FILES)
def test_build_names_no_registry(name: str) -> None:
    assert hygiene.REGISTRY.search((ROOT / name).read_text(encoding="utf-8")) is None


def test_long_function_would_be_caught() -> None:
    allowed = '    """Explained."""\n' + "    pass\n" * hygiene.MOST_FUNCTION_LINES
    body = allowed + "    pass\n"
    assert hygiene.long_functions(f"def f():\n{body}") == ["f has 81 lines"]
    assert hygiene.long_functions(f"class A:\n  async def f():\n{body}") == ["f has 81 lines"]
    assert hygiene.long_functions(f"def f():\n{allowed}") == []
    assert hygiene.long_functions('def f():\n    """Only explained."""') == []


def test_long_file_would_be_caught() -> None:
    assert hygiene.too_long("\n" * (hygiene.MOST_LINES + 1))
    assert not hygiene.too_long("\n" * hygiene.MOST_LINES)


@pytest.mark.parametrize("source", ["", "x = 1", '"""TBD."""', '"""   """'])
def test_missing_docstring_would_be_caught(source: str) -> None:
    assert not hygiene.explained(source)


@pytest.mark.parametrize("line", ["cd /{}/main", "'/{}/x'", "path=/{}/.venv"])
@pytest.mark.parametrize("folder", ["work", "root", "home/someone", "Users/someone"])
def test_machine_path_would_be_caught(line: str, folder: str) -> None:
    assert hygiene.machine_paths(line.format(folder)) == [line.format(folder)]


@pytest.mark.parametrize("before", ["https://example.org", "src", "network", "{run}"])
@pytest.mark.parametrize("folder", ["work", "root"])
def test_other_slashes_are_let_through(before: str, folder: str) -> None:
    assert hygiene.machine_paths(f"{before}/{folder}/x") == []


@pytest.mark.parametrize(
    "host", ["pypi" + ".org", "--index" + "-url x", "download.pytorch" + ".org"]
)
def test_registry_would_be_caught(host: str) -> None:
    assert hygiene.REGISTRY.search(host)
