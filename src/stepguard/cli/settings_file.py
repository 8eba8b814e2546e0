"""Settings of a training configuration as plain values: JSON, TOML, simple YAML, or a Python file that is never run."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path
from typing import Any

from stepguard._errors import ConfigError

LARGEST = 4 << 20
RATE_NAMES = ("lr", "learning_rate", "max_lr", "base_lr", "peak_lr", "init_lr")
_LINE = re.compile(
    r"^(?P<indent>\s*)(?:-\s+)?[\"']?(?P<key>[A-Za-z_][\w.-]*)[\"']?\s*[:=]\s*(?P<value>.*?)\s*(?:\s#.*)?$"
)


def read_settings(path: Path) -> dict[str, Any]:
    """Dotted name -> value. Raises ConfigError with the way out."""
    try:
        if path.stat().st_size > LARGEST:
            raise ConfigError(f"--config {path} has {path.stat().st_size:,} bytes; a configuration is smaller.")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--config {path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    try:
        if path.suffix == ".json":
            return _flat(json.loads(text))
        if path.suffix == ".toml":
            return _flat(tomllib.loads(text))
        if path.suffix == ".py":
            return _of_python(text)
    except (ValueError, SyntaxError, RecursionError) as error:
        raise ConfigError(f"--config {path} is not valid {path.suffix[1:]}: {str(error)[:160]}.") from error
    return _of_lines(text)


def configured_rate(path: Path) -> float:
    """The one learning rate of a configuration; several different ones are refused by name."""
    settings = read_settings(path)
    found = {name: as_number(value) for name, value in settings.items() if is_rate(name)}
    rates = {name: rate for name, rate in found.items() if rate is not None}
    if not rates:
        raise ConfigError(f"--config {path} names no learning rate ({', '.join(RATE_NAMES)}); give --lr.")
    if len(set(rates.values())) > 1:
        listed = ", ".join(f"{name}={rate:g}" for name, rate in rates.items())
        raise ConfigError(f"--config {path} names several learning rates ({listed}); give the one that counts by --lr.")
    return next(iter(rates.values()))


def is_rate(name: str) -> bool:
    return name.rpartition(".")[2].lower() in RATE_NAMES


def as_number(value: Any) -> float | None:
    """Also a number that YAML readers take for a text: `1e-4` has no point."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value} if prefix else {}
    found: dict[str, Any] = {}
    for key, item in value.items():
        found.update(_flat(item, f"{prefix}.{key}" if prefix else str(key)))
    return found


def _of_python(text: str) -> dict[str, Any]:
    """Assignments of literals, also in classes (a dataclass of settings)."""
    found: dict[str, Any] = {}
    for node in ast.walk(ast.parse(text)):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = getattr(node, "value", None)
        if value is None:
            continue
        for target in targets:
            if isinstance(target, ast.Name):
                try:
                    found.setdefault(target.id, ast.literal_eval(value))
                except (ValueError, TypeError, MemoryError, RecursionError):
                    continue
    return found


def _of_lines(text: str) -> dict[str, Any]:
    """`key: value` and `key = value`, nested by indentation."""
    found: dict[str, Any] = {}
    above: list[tuple[int, str]] = []
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None or line.lstrip().startswith("#"):
            continue
        indent = len(match["indent"])
        above = [(depth, key) for depth, key in above if depth < indent]
        name = ".".join([*(key for _, key in above), match["key"]])
        if match["value"]:
            found[name] = _literal(match["value"])
        else:
            above.append((indent, match["key"]))
    return found


def _literal(text: str) -> Any:
    if text.lower() in ("true", "false", "yes", "no", "on", "off"):
        return text.lower() in ("true", "yes", "on")
    if text.lower() in ("null", "none", "~"):
        return None
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
