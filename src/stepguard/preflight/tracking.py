"""A configuration that remembers which of its keys were read, by item, by attribute or by `**`."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from stepguard._errors import ConfigError
from stepguard.preflight.settings.keys import flat, is_list_of_mappings


class Tracked(MutableMapping[str, Any]):
    """A nested dict that notes reads: taking a value is one, asking for names (`in`, `len`) is not.

    A nested mapping comes back tracked as well: its keys count one by one. A key that the program
    writes itself counts as read.
    """

    def __init__(
        self, values: Mapping[str, Any], *, _prefix: str = "", _read: set[str] | None = None
    ) -> None:
        # Attributes are keys of the configuration, so our own go around `__setattr__`.
        self.__dict__["_values"] = dict(values)
        self.__dict__["_prefix"] = _prefix
        self.__dict__["_read"] = set() if _read is None else _read
        self.__dict__["_inner"] = {}

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        self._read.add(f"{self._prefix}{key}")
        return self._tracked(key, value)

    def __getattr__(self, name: str) -> Any:
        # copy, pickle and inspect ask every object for such names.
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the configuration has no {self._prefix}{name}") from None

    def __setitem__(self, key: str, value: Any) -> None:
        self._values[key] = value
        self._inner.pop(key, None)
        self._read.add(f"{self._prefix}{key}")

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delitem__(self, key: str) -> None:
        del self._values[key]
        self._inner.pop(key, None)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Tracked({self._values!r})"

    # A copy counts reads for the original: what the program takes from it is a use of the key.
    def __deepcopy__(self, memo: dict[int, Any]) -> Tracked:
        return Tracked(copy.deepcopy(self._values, memo), _prefix=self._prefix, _read=self._read)

    def __copy__(self) -> Tracked:
        return Tracked(self._values, _prefix=self._prefix, _read=self._read)

    def _tracked(self, key: str, value: Any) -> Any:
        if key in self._inner:
            return self._inner[key]
        # Kept, so that a write into a nested mapping is found at the next read.
        inner = _wrap(value, f"{self._prefix}{key}", self._read)
        if inner is not value:
            self._inner[key] = inner
        return inner


def _wrap(value: Any, key: str, read: set[str]) -> Any:
    if isinstance(value, Mapping) and not isinstance(value, Tracked):
        return Tracked(value, _prefix=f"{key}.", _read=read)
    if is_list_of_mappings(value):
        return [_wrap(part, f"{key}.{position}", read) for position, part in enumerate(value)]
    return value


def plain(settings: Any) -> dict[str, Any]:
    """Return a mapping, a dataclass or a namespace as a dict, without counting a read."""
    if isinstance(settings, Tracked):
        return dict(settings._values)
    if isinstance(settings, Mapping):
        return dict(settings)
    if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        return dataclasses.asdict(settings)
    if hasattr(settings, "__dict__") and not isinstance(settings, type):
        return dict(vars(settings))
    raise ConfigError(
        f"config is a {type(settings).__name__}; give a mapping, a dataclass or a namespace."
    )


def unread(settings: Tracked) -> list[str]:
    """Dotted keys of the leaves that were not read."""
    return [leaf.key for leaf in flat(plain(settings)) if leaf.key not in settings._read]
