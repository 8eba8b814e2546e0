"""The user's source below a folder, read without running it: names it mentions, what it calls."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

MOST_FILES = 2000
LARGEST = 2**20
SKIPPED = frozenset({"site-packages", "node_modules", "__pycache__", "venv", "build", "dist"})


@dataclass(slots=True)
class Project:
    """Names by where they are first used."""

    folder: Path
    files: int = 0
    mentions: dict[str, str] = field(default_factory=dict)
    """Attribute, keyword or string -> `train.py:12`. Names that are only assigned do not count."""
    calls: dict[str, str] = field(default_factory=dict)
    """Last part of a called name -> `train.py:12`."""


def read_project(folder: Path, *, leave_out: frozenset[Path] = frozenset()) -> Project:
    """Read every .py file below the folder, hidden and installed ones left out."""
    project = Project(folder)
    for path in _sources(folder):
        if path.resolve() in leave_out or project.files >= MOST_FILES:
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError, RecursionError):
            continue
        project.files += 1
        _note(project, tree, str(path.relative_to(folder)))
    return project


def _sources(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        inside = Path(place)
        # os.walk goes into what is left in the list it gave.
        folders[:] = sorted(name for name in folders if _is_source_folder(inside / name))
        for name in sorted(files):
            path = inside / name
            if name.endswith(".py") and path.is_file() and path.stat().st_size <= LARGEST:
                yield path


def _is_source_folder(folder: Path) -> bool:
    if folder.name.startswith(".") or folder.name in SKIPPED:
        return False
    # Every virtual environment has this file, whatever its name is.
    return not (folder / "pyvenv.cfg").exists()


def _note(project: Project, tree: ast.AST, name: str) -> None:
    for node in ast.walk(tree):
        mentioned = _mentioned(node)
        if mentioned:
            project.mentions.setdefault(mentioned, f"{name}:{getattr(node, 'lineno', 0)}")
        if isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            project.calls.setdefault(called, f"{name}:{node.lineno}")


def _mentioned(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    # `lr = 1` is not a use of lr.
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        return node.id
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
        return node.value
    return ""
