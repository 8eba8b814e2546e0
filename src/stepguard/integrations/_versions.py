"""Refuse a framework that is missing, too old, too new, or lacks a method that a guard wraps."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from stepguard._errors import ConfigError


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework and the versions of it that its guard is made for."""

    package: str
    first: str
    """The oldest version that works."""
    before: str
    """The first version that is not supported yet."""
    tested: str
    without: tuple[str, ...] = ()
    """Versions in between that must not be used."""

    @property
    def works(self) -> str:
        """The versions that work, in words."""
        but = "".join(f", not {bad}" for bad in self.without)
        return (
            f"{self.package} {self.first} up to, not including, {self.before}{but} (tested with "
            f"{self.tested})"
        )

    def require(self) -> None:
        """ConfigError unless a version that works is installed."""
        try:
            found = version(self.package)
        except PackageNotFoundError:
            raise ConfigError(
                f"{self.package} is not installed; this guard works with {self.works}."
            ) from None
        if not self.supports(found):
            raise ConfigError(
                f"{self.package} {found} is not known to this guard, which works with {self.works}."
            )

    def supports(self, found: str) -> bool:
        if found in self.without:
            return False
        return _order(self.first) <= _order(found) < _order(self.before)

    def need(self, owner: object, *names: str) -> None:
        """ConfigError when `owner`, perhaps a subclass, lacks a method that the guard wraps."""
        missing = [name for name in names if not hasattr(owner, name)]
        if missing:
            raise ConfigError(
                f"{type(owner).__name__} has no {', '.join(missing)}, which stepguard wraps; "
                f"it works with {self.works}."
            )


def _order(text: str) -> tuple[int, ...]:
    """`5.22.2` as numbers, without the marks of release candidates and local builds."""
    release = re.split(r"[a-z+]", text)[0]
    numbers = [int(found) for found in re.findall(r"\d+", release)]
    return tuple(numbers + [0] * (3 - len(numbers)))
