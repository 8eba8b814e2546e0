"""The public face is a promise: a name appears or disappears only together with this list."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import stepguard

PUBLIC = [
    "CapsuleError",
    "ConfigError",
    "Finding",
    "Guard",
    "GuardConfig",
    "Incident",
    "JournalError",
    "Origin",
    "Policy",
    "Probes",
    "Problem",
    "Ranks",
    "SaveRefused",
    "Sink",
    "Snapshots",
    "StateError",
    "StepResult",
    "StepguardError",
    "StoreError",
    "TrainingHalted",
    "Verification",
    "WiringWarning",
    "__version__",
    "replay",
    "verify",
    "watch",
]
FACADE = Path(stepguard.__file__)


def test_export_list_is_pinned() -> None:
    assert stepguard.__all__ == PUBLIC


def test_dir_shows_the_export_list_only() -> None:
    assert dir(stepguard) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_exported_name_exists_where_the_facade_says(name: str) -> None:
    value = getattr(stepguard, name)
    assert name == "__version__" or value.__name__ == name


def test_type_checker_and_interpreter_find_the_same_homes() -> None:
    tree = ast.parse(FACADE.read_text(encoding="utf-8"))
    block = next(
        n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"
    )
    typed = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == stepguard._HOMES
    assert sorted([*stepguard._HOMES, "__version__"]) == sorted(PUBLIC)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'stepguard' has no attribute 'Watcher'"):
        _ = stepguard.Watcher
