"""Records to strict JSON and back: NaN and Inf become null beside a `<field>_kind` that says which.

Where the name of that companion is taken (loss components have the user's names) the value itself
becomes `{"~float": "nan"}`. What is strict already stays as it is.

pydantic's `ser_json_inf_nan` writes null without the kind, or "NaN" in place of the number. Neither
is the journal's schema, which must stay readable for plots that expect a number or null.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import math
import os
import re
import textwrap
import threading
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from stepguard._errors import ConfigError

# --- The one cleaner of text that came from a file, before people see it.


UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
"""What can move a cursor, start an escape sequence, reverse the direction or hide."""
SECRET = re.compile(r"(^|[-_.])(api-?_?key|key|token|passw(or)?d|secret|credentials?)s?$", re.I)
"""How options, settings and variables end whose value is nobody else's business."""
MASK = "***"


def printable(text: str) -> str:
    """Replace what could control a terminal; line ends and tabs stay."""
    return UNPRINTABLE.sub("?", text)


def one_line(text: str) -> str:
    """Escape line breaks as well, for text that must stay on one line."""
    return printable(text.replace("\n", " ").replace("\t", " "))


def masked(arguments: list[str]) -> list[str]:
    """A command line without its secrets: `--api-key S`, `--token=S` and `opt.key=S` lose S."""
    shown: list[str] = []
    hide_next = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if hide_next and not argument.startswith("--"):
            shown.append(MASK)
            hide_next = False
            continue
        secret = SECRET.search(name.lstrip("-")) is not None
        hide_next = secret and not equals and name.startswith("-")
        shown.append(f"{name}={MASK}" if secret and equals else argument)
    return shown


def mask_settings(settings: dict[str, object]) -> dict[str, object]:
    """Settings, nested ones too, without the values of those that are secret by their name."""
    shown: dict[str, object] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            shown[name] = mask_settings(value)
        elif isinstance(value, str) and SECRET.search(name):
            shown[name] = MASK
        else:
            shown[name] = value
    return shown


# --- Records to strict JSON and back: NaN and Inf become null beside a `<field>_kind` that says
# which.


Record = TypeVar("Record")

KIND_SUFFIX = "_kind"
IN_PLACE = "~float"
KINDS = ("nan", "inf", "-inf")
# Building one takes a millisecond, so each record type keeps its own.
_adapter: Callable[[type], TypeAdapter[Any]] = cache(TypeAdapter)
_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":"), ensure_ascii=False).encode
PRIVATE: dict[str, Any] = {"Incident": {"origin": {"excerpt"}}, "Origin": {"excerpt"}}
"""What never leaves the process."""


def to_plain(record: object) -> dict[str, Any]:
    """The record as nested dicts, floats as they are: what `dumps` and `Journal.write` take."""
    private = PRIVATE.get(type(record).__name__)
    plain: dict[str, Any] = _adapter(type(record)).dump_python(
        record, mode="python", exclude=private
    )
    return plain


def to_jsonable(record: object) -> dict[str, Any]:
    """The record as plain values that `json.dumps(allow_nan=False)` takes."""
    strict = strict_json(to_plain(record))
    assert isinstance(strict, dict)
    return strict


def from_jsonable(cls: type[Record], value: dict[str, Any]) -> Record:
    """Rebuild a record; raises pydantic's ValidationError where a field does not fit."""
    record: Record = _adapter(cls).validate_python(restore_floats(value))
    return record


def dumps(value: dict[str, Any]) -> str:
    """One line of strict JSON; what ends lines elsewhere or controls a terminal is escaped."""
    try:
        text = _encode(value)
    except (TypeError, ValueError):  # a number that is not finite, or a key that is no text
        text = _encode(strict_json(value))
    if text.isascii() and text.isprintable():
        return text
    # Some readers also break lines at U+2028; lone surrogates come from file names that are not
    # UTF-8; a journal may be printed with `cat`.
    return UNPRINTABLE.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    # Above U+FFFF JSON has pairs of surrogates only.
    return json.dumps(found[0])[1:-1] if found[0] != "\x7f" else "\\u007f"


def float_kind(value: float) -> str | None:
    """`nan`, `inf`, `-inf`, or None for a finite number."""
    if math.isfinite(value):
        return None
    if math.isnan(value):
        return "nan"
    return "inf" if value > 0 else "-inf"


def strict_json(value: Any) -> Any:
    """Replace every non-finite float in plain containers by null, named beside it."""
    if isinstance(value, list | tuple):
        return [strict_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if not isinstance(value, dict):
        return value
    names = [str(key) for key in value]
    out: dict[str, Any] = {}
    for key, item in zip(names, value.values(), strict=True):
        kind = _kind_of(item)
        if kind is not None and any(other.startswith(key + KIND_SUFFIX) for other in names):
            out[key] = _in_place(item)
            continue
        out[key] = strict_json(item)
        if kind is not None:
            out[key + KIND_SUFFIX] = kind
    return out


def _in_place(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_in_place(item) for item in value]
    if _kind_of(value) is None:
        return strict_json(value)
    return {IN_PLACE: float_kind(value)}


def _kind_of(value: Any) -> str | list[Any] | None:
    """The companion of a value: a kind for a float, a list of them for a list; None if finite."""
    if isinstance(value, float):
        return float_kind(value)
    if not isinstance(value, list | tuple):
        return None
    kinds = [_kind_of(item) for item in value]
    if all(kind is None for kind in kinds):
        return None
    return kinds


def restore_floats(value: Any) -> Any:
    """The inverse of `strict_json`."""
    if isinstance(value, list):
        return [restore_floats(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {IN_PLACE} and _is_kind(value[IN_PLACE], None):
        return float(value[IN_PLACE])
    out: dict[str, Any] = {}
    for key, item in value.items():
        owner = key.removesuffix(KIND_SUFFIX)
        if owner == key or owner not in value or not _is_kind(item, value[owner]):
            out[key] = _restore(item, value.get(key + KIND_SUFFIX))
    return out


def _is_kind(kind: Any, owner: Any) -> bool:
    """Is `kind` the companion of this value? It names a kind only where a value is null."""
    if not isinstance(kind, list):
        return owner is None and isinstance(kind, str) and kind in KINDS
    if not isinstance(owner, list) or len(owner) != len(kind):
        return False
    named = [place for place, part in enumerate(kind) if part is not None]
    return bool(named) and all(_is_kind(kind[place], owner[place]) for place in named)


def _restore(item: Any, kind: Any) -> Any:
    """The value with the floats that its companion names; without one, as it is."""
    if not _is_kind(kind, item):
        return restore_floats(item)
    if isinstance(kind, list):
        return [_restore(part, named) for part, named in zip(item, kind, strict=True)]
    return float(kind)


# --- Append lines to a file so that each is there wholly or not at all, whatever the disk does.


class LineFile:
    """Appends whole lines with one `write` each. One writer; several threads of it may write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # A checkpoint that is written in the background reports from its own thread.
        self._turn = threading.Lock()
        self._torn = False
        self._open()

    def append(self, line: bytes, *, durable: bool = False) -> None:
        """Write a line that ends in a newline; `durable` waits until it is on disk.

        Raises OSError where the line cannot be written.
        """
        with self._turn:
            before = os.fstat(self._fd)
            if before.st_nlink == 0:
                # Its path was deleted: make it again, the open one is invisible by now.
                self.path.parent.mkdir(parents=True, exist_ok=True)
                gone = self._fd
                self._open()
                os.close(gone)
                before = os.fstat(self._fd)
            left = b"\n" + line if self._torn else line
            try:
                while left:
                    left = left[os.write(self._fd, left) :]
            except BaseException:
                # Remove the part of the line that a full disk took, or let the next line end it.
                if os.fstat(self._fd).st_size != before.st_size:
                    self._torn = True
                    with contextlib.suppress(OSError):
                        os.ftruncate(self._fd, before.st_size)
                        self._torn = self._ends_torn()
                raise
            self._torn = False
            if durable:
                os.fsync(self._fd)

    def _open(self) -> None:
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._torn = self._ends_torn()

    def _ends_torn(self) -> bool:
        """Has a crash left half a line at the end?"""
        size = os.fstat(self._fd).st_size
        return size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


# --- Read the settings of a guard from a file: TOML, YAML or JSON, by its name.


LARGEST = 1 << 20
"""Bytes; a configuration is smaller."""


def read_table(path: Path) -> dict[str, Any]:
    """The names and values of a configuration; ConfigError says what is wrong with the file."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(
            f"{path} is not a configuration by its name; give a file that ends in "
            f"{', '.join(READERS)}."
        )
    if not path.is_file():
        raise ConfigError(f"{path} is not a file; give one with fields of GuardConfig.")
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise ConfigError(f"{path} has {size:,} bytes; a configuration is smaller.")
        found = reader(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text: {error}.") from None
    except (ValueError, RecursionError) as error:
        said = " ".join(str(error).split()).rstrip(".")[:200]
        raise ConfigError(f"{path} is not {path.suffix[1:].upper()}: {said}.") from None
    if not isinstance(found, dict):
        raise ConfigError(
            f"{path} holds a {type(found).__name__}; write names and values, such as "
            "anomalies and terminal."
        )
    return found


def number_as_text(path: Path, table: Mapping[str, Any]) -> str:
    """A sentence where YAML has read a number such as 1e-4 as text; else empty."""
    if READERS.get(path.suffix.lower()) is not _yaml:
        return ""
    for name, value in table.items():
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                float(value)
                return f" YAML reads {name}: {value} as text; write it with a point, as in 1.0e-4."
    return ""


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


# --- Show the text under each field of a dataclass in `help()`, where Python itself drops it.


T = TypeVar("T")


class DocWithFields:
    """A class docstring that is completed with its fields when somebody reads it.

    The source is read then and not before: importing the class costs nothing.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def __get__(self, instance: object, owner: type[object]) -> str:
        lines = [inspect.cleandoc(self._text), "", "Fields:"]
        indent = " " * 8
        for declaration, said in fields_with_text(owner).values():
            lines.append(f"    {declaration}")
            lines += textwrap.wrap(said, 88, initial_indent=indent, subsequent_indent=indent)
        return "\n".join(lines)


def documented(cls: type[T]) -> type[T]:
    """Let `help(cls)` list every field with its type, default and text."""
    cls.__doc__ = DocWithFields(cls.__doc__ or "")  # type: ignore[assignment]
    return cls


def fields_with_text(cls: type[object]) -> dict[str, tuple[str, str]]:
    """Field -> its declaration and the text below it, empty where it has none."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return {}  # installed without its source
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, tuple[str, str]] = {}
    field = ""
    for statement in definition.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=field)):
                found[field] = (ast.unparse(statement), "")
            case ast.Expr(value=ast.Constant(value=str(text))) if field:
                found[field] = (found[field][0], " ".join(text.split()))
                field = ""
            case _:
                field = ""
    return found
