"""A module is named so that a stranger finds it, and a class name means one thing."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

import stepguard
from house import names

SOURCE = Path(stepguard.__file__).parent
FILES = {
    PurePosixPath(path.relative_to(SOURCE)): path.read_text(encoding="utf-8")
    for path in sorted(SOURCE.rglob("*.py"))
}
SAME_NAME_SAME_MEANING = {"TrainingStep"}
"""Classes of two frameworks that do the same thing for each of them."""


def test_no_module_is_named_by_an_adverb_or_a_metaphor() -> None:
    assert names.banned(FILES) == []


def test_module_name_occurs_once_in_a_package() -> None:
    assert names.repeated(FILES) == {}


def test_class_name_means_one_thing() -> None:
    found = names.classes_twice(FILES)
    assert set(found) - SAME_NAME_SAME_MEANING == set()


@pytest.mark.parametrize("name", ["again.py", "engine/_late.py", "state/suddenly.py", "utils.py"])
def test_bad_module_name_would_be_caught(name: str) -> None:
    assert names.banned([PurePosixPath(name)]) == [name]


def test_repeated_module_name_would_be_caught() -> None:
    paths = ["a/files.py", "a/b/files.py", "c/files.py", "a/__init__.py", "a/b/__init__.py"]
    found = names.repeated(PurePosixPath(path) for path in paths)
    assert found == {"files.py": ["a/files.py", "a/b/files.py"]}


def test_second_class_of_a_name_would_be_caught() -> None:
    sources = {
        PurePosixPath("a.py"): "class Place: ...\nclass _Own: ...",
        PurePosixPath("b.py"): "def f():\n    class Place: ...\nclass _Own: ...",
    }
    assert names.classes_twice(sources) == {"Place": ["a.py", "b.py"]}
