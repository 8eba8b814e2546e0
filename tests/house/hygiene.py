"""Rules on single files: size, docstrings, and what must not be written down."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

MOST_LINES = 400
MOST_FUNCTION_LINES = 40
LEAST_DOCSTRING = 20
MACHINE_PATH = re.compile(r"(?<![\w.:/}-])/(?:work|root|home/\w+|Users/\w+)/[\w.]")
REGISTRY = re.compile(
    r"pypi\.org|pythonhosted|download\.pytorch|index[-]url|find[-]links", re.IGNORECASE
)


def long_functions(source: str) -> list[str]:
    """Functions with more lines than allowed, decorators not counted."""
    return [
        f"{node.name} has {lines} lines"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > MOST_FUNCTION_LINES
    ]


def too_long(source: str) -> bool:
    return len(source.splitlines()) > MOST_LINES


def explained(source: str) -> bool:
    """A module docstring that says something; a placeholder does not."""
    return len(ast.get_docstring(ast.parse(source)) or "") >= LEAST_DOCSTRING


def machine_paths(text: str) -> list[str]:
    return [line.strip()[:120] for line in text.splitlines() if MACHINE_PATH.search(line)]


def repository_files(root: Path) -> Iterator[Path]:
    """Everything git tracks or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = (
        subprocess.run(command, cwd=root, check=True, capture_output=True)
        .stdout.decode()
        .split("\0")
    )
    return (root / name for name in names if name and (root / name).is_file())
