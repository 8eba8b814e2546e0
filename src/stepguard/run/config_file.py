"""Read `stepguard run --config FILE.toml`: fields of GuardConfig, and of Policy in `[policy]`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from stepguard._errors import ConfigError
from stepguard.records import GuardConfig, Policy

LARGEST = 1 << 20
FOLDERS = ("run_dir", "human_log")
NOT_IN_A_FILE = frozenset({"sinks"})
"""Fields that are objects of Python."""


def read_config(path: Path | None, given: Mapping[str, str]) -> GuardConfig:
    """The guard's settings from a file; what was `given` on the command line comes first."""
    table = {} if path is None else _table(path)
    for name in NOT_IN_A_FILE & table.keys():
        raise ConfigError(
            f"--config {path}: {name} is an object of Python and cannot stand in a file; build a "
            f"Guard."
        )
    policy = table.pop("policy", {})
    if not isinstance(policy, dict):
        raise ConfigError(
            f"--config {path}: policy={policy!r} must be a table; write [policy] and its fields "
            f"below."
        )
    _refuse_unknown(table, GuardConfig, path, "")
    _refuse_unknown(policy, Policy, path, "policy.")
    for name in FOLDERS:
        if isinstance(table.get(name), str):
            # Absolute paths: the script may change the current directory.
            table[name] = str(Path(table[name]).resolve())
    try:
        return GuardConfig(**{**table, **given, "policy": Policy(**_with_tuples(policy))})
    except ConfigError as error:
        where = "" if path is None else f"--config {path}: "
        raise ConfigError(f"{where}{error}") from None
    except TypeError as error:
        # A text where a number belongs, and a check of GuardConfig compared the two.
        raise ConfigError(
            f"--config {path}: a field has a value of the wrong type: {error}."
        ) from None


def _table(path: Path) -> dict[str, Any]:
    try:
        text = _text(path)
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path} is not TOML: {error}.") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {path} is not TOML: {error}.") from None


def _text(path: Path) -> str:
    if not path.is_file():
        raise ConfigError(
            f"--config {path} is not a file; give a TOML file with fields of GuardConfig."
        )
    size = path.stat().st_size
    if size > LARGEST:
        raise ConfigError(f"--config {path} has {size:,} bytes; a configuration is smaller.")
    return path.read_text(encoding="utf-8")


def _refuse_unknown(
    table: Mapping[str, Any], kind: type[Any], path: Path | None, prefix: str
) -> None:
    known = [one.name for one in fields(kind)]
    for name in table:
        if name not in known:
            hint = _hint(name, known, prefix)
            raise ConfigError(f"--config {path}: {prefix}{name} is not known. {hint}")


def _hint(name: str, known: list[str], prefix: str) -> str:
    if not prefix and name in {one.name for one in fields(Policy)}:
        return "It is a field of [policy]."
    near = get_close_matches(name, known, n=1)
    if near:
        return f"Did you mean {prefix}{near[0]}?"
    return f"Known are {', '.join(known)}."


def _with_tuples(table: Mapping[str, Any]) -> dict[str, Any]:
    """TOML has lists where Policy takes tuples."""
    converted = {}
    for name, value in table.items():
        converted[name] = tuple(value) if isinstance(value, list) else value
    return converted
