"""`stepguard run --config FILE.toml`: the fields of GuardConfig, and those of Policy below
`[policy]`.
"""

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
    # absolute: the script may change the current directory
    folders = {
        name: str(Path(table[name]).resolve())
        for name in FOLDERS
        if isinstance(table.get(name), str)
    }
    try:
        return GuardConfig(
            **{**table, **folders, **given, "policy": Policy(**_with_tuples(policy))}
        )
    except ConfigError as error:
        where = "" if path is None else f"--config {path}: "
        raise ConfigError(f"{where}{error}") from None
    except TypeError as error:  # a text where a number belongs, and the check compared them
        raise ConfigError(
            f"--config {path}: a field has a value of the wrong type: {error}."
        ) from None


def _table(path: Path) -> dict[str, Any]:
    try:
        if path.is_file() and path.stat().st_size > LARGEST:
            raise ConfigError(
                f"--config {path} has {path.stat().st_size:,} bytes; a configuration is smaller."
            )
        return tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else _no_file(path)
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}.") from None
    except ValueError as error:  # also what tomllib and the decoder raise
        raise (
            error
            if isinstance(error, ConfigError)
            else ConfigError(f"--config {path} is no TOML: {error}.")
        ) from None


def _no_file(path: Path) -> dict[str, Any]:
    raise ConfigError(f"--config {path} is no file; give a TOML file with fields of GuardConfig.")


def _refuse_unknown(
    table: Mapping[str, Any], kind: type[Any], path: Path | None, prefix: str
) -> None:
    known = [one.name for one in fields(kind)]
    for name in table:
        if name in known:
            continue
        belongs = (
            " It is a field of [policy]."
            if not prefix and name in {one.name for one in fields(Policy)}
            else ""
        )
        near = get_close_matches(name, known, n=1)
        meant = f" Did you mean {prefix}{near[0]}?" if near else f" Known are {', '.join(known)}."
        raise ConfigError(f"--config {path}: {prefix}{name} is not known.{belongs or meant}")


def _with_tuples(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in table.items()
    }
