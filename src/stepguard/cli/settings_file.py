"""The learning rate and other settings of a configuration file: read, never run."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
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
    from stepguard.preflight.settings.files import READERS
    from stepguard.preflight.settings.files import read_settings as read_file
    from stepguard.preflight.settings.keys import flat

    suffix = path.suffix.lower()
    if suffix in READERS and (find_spec("yaml") is not None or suffix not in (".yaml", ".yml")):
        return {setting.key: setting.value for setting in flat(read_file(path))}
    try:
        if path.stat().st_size > LARGEST:
            raise ConfigError(
                f"--config {path} has {path.stat().st_size:,} bytes; a configuration is smaller."
            )
        return _of_lines(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--config {path} cannot be read: {getattr(error, 'strerror', None) or error}."
        ) from error


def configured_rate(path: Path) -> float:
    """The one learning rate of a configuration; several different ones are refused by name."""
    found = {name: as_number(value) for name, value in read_settings(path).items() if is_rate(name)}
    rates = {name: rate for name, rate in found.items() if rate is not None}
    if not rates:
        raise ConfigError(
            f"--config {path} names no learning rate ({', '.join(RATE_NAMES)}); give --lr."
        )
    if len(set(rates.values())) > 1:
        listed = ", ".join(f"{name}={rate:g}" for name, rate in rates.items())
        raise ConfigError(
            f"--config {path} names several learning rates ({listed}); give the one that counts by "
            f"--lr."
        )
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


def _of_lines(text: str) -> dict[str, Any]:
    """`key: value` and `key = value`, nested by indentation: enough of YAML where PyYAML is not
    installed.
    """
    found: dict[str, Any] = {}
    above: list[tuple[int, str]] = []
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None or line.lstrip().startswith("#"):
            continue
        indent = len(match["indent"])
        above = [(depth, key) for depth, key in above if depth < indent]
        if match["value"]:
            found[".".join([*(key for _, key in above), match["key"]])] = _literal(match["value"])
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
