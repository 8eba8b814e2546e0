"""Rules on single files: size, docstrings, and what must not be written down."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

MOST_LINES = 1000
MOST_FUNCTION_LINES = 80
"""Lines of a body: forty plain lines read better than twenty folded ones."""
LEAST_DOCSTRING = 20
MACHINE_PATH = re.compile(r"(?<![\w.:/}-])/(?:work|root|home/\w+|Users/\w+)/[\w.]")
REGISTRY = re.compile(
    r"pypi\.org|pythonhosted|download\.pytorch|index[-]url|find[-]links", re.IGNORECASE
)


def long_functions(source: str) -> list[str]:
    """Functions whose body has too many lines; signature and docstring do not count."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = _body_lines(node)
            if lines > MOST_FUNCTION_LINES:
                found.append(f"{node.name} has {lines} lines")
    return found


def _body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = node.body
    if ast.get_docstring(node, clean=False) is not None:
        body = body[1:]
    if not body:
        return 0
    return (node.end_lineno or node.lineno) - body[0].lineno + 1


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
