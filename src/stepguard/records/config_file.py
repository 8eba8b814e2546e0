"""Read the settings of a guard from a file: TOML, YAML or JSON, by its name.

The file holds fields of GuardConfig, and fields of Policy below `policy`. Nothing of it is run:
YAML is read by `safe_load`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from stepguard._errors import ConfigError

LARGEST = 1 << 20
"""Bytes; a configuration is smaller."""
FOLDERS = ("run_dir", "human_log")
NOT_IN_A_FILE = frozenset({"sinks"})
"""Fields that are objects of Python."""
POLICY = "policy"


def read_tables(
    path: Path, settings: Sequence[str], policy: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields for GuardConfig and those for Policy, of the names given for each."""
    table = _table(path)
    for name in NOT_IN_A_FILE & table.keys():
        raise ConfigError(
            f"{path}: {name} is an object of Python and cannot stand in a file; give it in code."
        )
    below = table.pop(POLICY, {})
    if not isinstance(below, dict):
        raise ConfigError(
            f"{path}: policy={below!r} must be a table; in TOML write [policy] and its fields "
            "below it."
        )
    _refuse_unknown(path, table, settings, policy)
    _refuse_unknown(path, below, policy, settings, inside="policy.")
    for name in FOLDERS:
        if isinstance(table.get(name), str) and table[name].strip():
            # Absolute paths: the program may change the current directory.
            table[name] = str(Path(table[name]).resolve())
    return table, _with_tuples(below)


def number_as_text(path: Path, table: Mapping[str, Any]) -> str:
    """A sentence where YAML has read a number such as 1e-4 as text; else empty."""
    if READERS.get(path.suffix.lower()) is not _yaml:
        return ""
    for name, value in table.items():
        if isinstance(value, str) and _is_number(value):
            return f" YAML reads {name}: {value} as text; write it with a point, as in 1.0e-4."
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _table(path: Path) -> dict[str, Any]:
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(
            f"{path} is not a configuration by its name; give a file that ends in "
            f"{', '.join(READERS)}."
        )
    text = _text(path)
    kind = path.suffix[1:].upper()
    try:
        found = reader(text)
    except (ValueError, RecursionError) as error:
        said = " ".join(str(error).split()).rstrip(".")[:200]
        raise ConfigError(f"{path} is not {kind}: {said}.") from None
    if not isinstance(found, dict):
        raise ConfigError(
            f"{path} holds a {type(found).__name__}; write names and values, such as "
            "anomalies and terminal."
        )
    return found


def _text(path: Path) -> str:
    if not path.is_file():
        raise ConfigError(f"{path} is not a file; give one with fields of GuardConfig.")
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise ConfigError(f"{path} has {size:,} bytes; a configuration is smaller.")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text: {error}.") from None


def _yaml(text: str) -> Any:
    # PyYAML takes 40 ms to import, and most configurations are built in code.
    import yaml

    try:
        # An empty file is None to PyYAML.
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


READERS: dict[str, Callable[[str], Any]] = {
    ".toml": tomllib.loads,
    ".yaml": _yaml,
    ".yml": _yaml,
    ".json": json.loads,
}


def _refuse_unknown(
    path: Path,
    table: Mapping[str, Any],
    known: Sequence[str],
    elsewhere: Sequence[str],
    inside: str = "",
) -> None:
    for name in table:
        if name in known:
            continue
        if name in elsewhere:
            hint = "It belongs outside of policy." if inside else "It is a field of [policy]."
        else:
            hint = _nearest(str(name), known, inside)
        raise ConfigError(f"{path}: {inside}{name} is not known. {hint}")


def _nearest(name: str, known: Sequence[str], inside: str) -> str:
    near = get_close_matches(name, known, n=1)
    if near:
        return f"Did you mean {inside}{near[0]}?"
    return f"Known are {', '.join(known)}."


def _with_tuples(table: Mapping[str, Any]) -> dict[str, Any]:
    """Files have lists where Policy takes tuples."""
    converted = {}
    for name, value in table.items():
        converted[name] = tuple(value) if isinstance(value, list) else value
    return converted
