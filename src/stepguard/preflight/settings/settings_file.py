"""Configuration files as plain dicts: JSON, TOML, YAML, and .py files of constants.

Nothing is run: YAML tags that would build objects are refused, and of a .py file only
`NAME = literal` (also inside a class without bases) is taken.
"""

from __future__ import annotations

import ast
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from stepguard._errors import ConfigError
from stepguard.preflight.settings.keys import spells_number

LARGEST = 16 * 2**20
"""Bytes; a larger file is not a configuration."""


def read_settings(path: Path, what: str = "configuration") -> dict[str, Any]:
    """Read the file as nested dicts. Raises ConfigError that says what is wrong with it."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(
            f"{path}: {path.suffix or 'no suffix'} is not a {what} file; use one of "
            f"{', '.join(READERS)}."
        )
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise ConfigError(f"{path} has {size:,} bytes; a {what} file has at most {LARGEST:,}.")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise ConfigError(f"{path} cannot be read as a {what}: {fault}.") from fault
    try:
        # All readers but PyYAML raise a kind of ValueError or SyntaxError.
        found = reader(text)
    except (ValueError, SyntaxError, RecursionError, yaml.YAMLError) as fault:
        said = " ".join(str(fault).split()).rstrip(".")[:200]
        raise ConfigError(f"{path} is not valid {path.suffix[1:]}: {said}.") from fault
    if not isinstance(found, dict):
        raise ConfigError(
            f"{path} holds a {type(found).__name__}; a {what} is a mapping of names to values."
        )
    return found


class UnquotedNumber(str):
    """`1e-4` in YAML, without quotes: PyYAML (YAML 1.1) reads a text, OmegaConf a number."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """PyYAML's own reading, with a mark at texts that were meant as numbers."""


def _text(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
    value = str(loader.construct_scalar(node))
    if node.style is None and spells_number(value):
        return UnquotedNumber(value)
    return value


_Loader.add_constructor("tag:yaml.org,2002:str", _text)


def _yaml(text: str) -> Any:
    # An empty file is None to PyYAML.
    return yaml.load(text, _Loader) or {}


def _python(text: str) -> dict[str, Any]:
    return _constants(ast.parse(text).body)


def _constants(body: list[ast.stmt]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for statement in body:
        if isinstance(statement, ast.ClassDef) and not statement.bases:
            found[statement.name] = _constants(statement.body)
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                _take(found, target, statement.value)
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            _take(found, statement.target, statement.value)
    return found


def _take(found: dict[str, Any], target: ast.expr, value: ast.expr) -> None:
    """Add the assigned value if it is a literal."""
    if isinstance(target, ast.Name):
        try:
            found[target.id] = ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return


READERS: dict[str, Callable[[str], Any]] = {
    ".json": json.loads,
    ".toml": tomllib.loads,
    ".yaml": _yaml,
    ".yml": _yaml,
    ".py": _python,
}
