"""One clear message for a framework that is missing, too old, too new, or lacks a part that its
guard holds on to.
"""

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
    """The first version nobody has looked at yet."""
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
        return (
            _order(self.first) <= _order(found) < _order(self.before) and found not in self.without
        )

    def need(self, owner: object, *names: str) -> None:
        """ConfigError when `owner` lacks a method that the guard wraps: a version or a subclass it
        was not made for.
        """
        missing = [name for name in names if not hasattr(owner, name)]
        if missing:
            raise ConfigError(
                f"{type(owner).__name__} has no {', '.join(missing)}, which this guard holds on "
                f"to; "
                f"it works with {self.works}."
            )


def _order(text: str) -> tuple[int, ...]:
    """`5.22.2` as numbers; a release candidate counts as its release, and a local build as what it
    was built from.
    """
    numbers = [int(found) for found in re.findall(r"\d+", re.split(r"[a-z+]", text)[0])]
    return tuple(numbers + [0] * (3 - len(numbers)))
