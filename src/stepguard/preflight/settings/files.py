"""Configuration files as plain dicts: JSON, TOML, YAML where PyYAML is there, and .py files of
constants.

A .py file is parsed, never run: only `NAME = literal` (also inside a class without bases) is taken.
"""

from __future__ import annotations

import ast
import json
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from stepguard._errors import ConfigError

LARGEST = 16 * 2**20
"""Bytes; a larger file is no configuration."""


def read_settings(path: Path, what: str = "configuration") -> dict[str, Any]:
    """The file as nested dicts. Raises ConfigError that says what is wrong with it."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(
            f"{path}: {path.suffix or 'no suffix'} is no {what} file; use one of "
            f"{', '.join(READERS)}."
        )
    try:
        if path.stat().st_size > LARGEST:
            raise ConfigError(
                f"{path} has {path.stat().st_size:,} bytes; a {what} file has at most {LARGEST:,}."
            )
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise ConfigError(f"{path} cannot be read as a {what}: {fault}.") from fault
    try:
        found = reader(text)
    except (ValueError, SyntaxError, RecursionError) as fault:
        raise ConfigError(f"{path} is no valid {path.suffix[1:]}: {_first_line(fault)}.") from fault
    if not isinstance(found, dict):
        raise ConfigError(
            f"{path} holds a {type(found).__name__}; a {what} is a mapping of names to values."
        )
    return found


def _first_line(fault: Exception) -> str:
    return " ".join(str(fault).split()).rstrip(".")[:200]


def _yaml(text: str) -> Any:
    try:
        yaml: Any = import_module("yaml")
    except ImportError:
        raise ConfigError(
            "reading YAML needs PyYAML: pip install pyyaml, or give the file as JSON or TOML."
        ) from None
    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as fault:
        raise ValueError(fault) from fault


def _python(text: str) -> dict[str, Any]:
    return _constants(ast.parse(text).body)


def _constants(body: list[ast.stmt]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for statement in body:
        if isinstance(statement, ast.ClassDef) and not statement.bases:
            found[statement.name] = _constants(statement.body)
        elif isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                if (
                    isinstance(target, ast.Name)
                    and (value := _literal(statement.value)) is not _NOT_PLAIN
                ):
                    found[target.id] = value
    return found


_NOT_PLAIN = object()


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return _NOT_PLAIN


READERS: dict[str, Callable[[str], Any]] = {
    ".json": json.loads,
    ".toml": tomllib.loads,
    ".yaml": _yaml,
    ".yml": _yaml,
    ".py": _python,
}
