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
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar, dataclass_transform, overload

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
    shown = []
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
    # Above U+FFFF JSON has pairs of surrogates only.
    return UNPRINTABLE.sub(lambda found: json.dumps(found[0])[1:-1], text).replace(
        "\x7f", "\\u007f"
    )


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
        return list(map(strict_json, value))
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if not isinstance(value, dict):
        return value
    names = list(map(str, value))
    out = {}
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
        return list(map(_in_place, value))
    if _kind_of(value) is None:
        return strict_json(value)
    return {IN_PLACE: float_kind(value)}


def _kind_of(value: Any) -> str | list[Any] | None:
    """The companion of a value: a kind for a float, a list of them for a list; None if finite."""
    if isinstance(value, float):
        return float_kind(value)
    if not isinstance(value, list | tuple):
        return None
    kinds = list(map(_kind_of, value))
    if all(kind is None for kind in kinds):
        return None
    return kinds


def restore_floats(value: Any) -> Any:
    """The inverse of `strict_json`."""
    if isinstance(value, list):
        return list(map(restore_floats, value))
    if not isinstance(value, dict):
        return value
    if value.keys() == {IN_PLACE} and _is_kind(value[IN_PLACE], None):
        return float(value[IN_PLACE])
    out = {}
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


# Not `float`, which takes "nan" and "infinity" for numbers as well.
NUMBER = re.compile(r"\s*[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?\s*")


class UnquotedNumber(str):
    """`1e-4` in YAML, without quotes: PyYAML (YAML 1.1) reads a text, OmegaConf a number."""


def read_table(
    path: Path, what: str = "configuration", largest: int = 1 << 20, **more: Reader
) -> dict[str, Any]:
    """The names and values of a configuration; ConfigError says what is wrong with the file.

    `largest`: bytes that are read. `more`: readers of further kinds of files, by their suffix.
    """
    kind = path.suffix.lower()
    readers = READERS | {f".{suffix}": reader for suffix, reader in more.items()}
    if kind not in readers:
        raise ConfigError(
            f"{path}: {kind or 'no suffix'} is not a {what} file; use one of {', '.join(readers)}."
        )
    try:
        size = path.stat().st_size
        if size > largest:
            raise ConfigError(f"{path} has {size:,} bytes; a {what} file has at most {largest:,}.")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise ConfigError(f"{path} cannot be read as a {what}: {fault}.") from fault
    try:
        # An empty YAML is None.
        found = readers[kind](text) or {}
    except (ValueError, SyntaxError, RecursionError) as fault:
        said = " ".join(str(fault).split()).rstrip(".")[:200]
        raise ConfigError(f"{path} is not valid {kind[1:]}: {said}.") from fault
    if not isinstance(found, dict):
        raise ConfigError(
            f"{path} holds a {type(found).__name__}; a {what} is a mapping of names to values."
        )
    return found


def _yaml(text: str) -> Any:
    # PyYAML takes 40 ms to import, and most configurations are built in code.
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """PyYAML's reading, with a mark at texts that were meant as numbers."""

    def marked(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
        value = str(loader.construct_scalar(node))
        if node.style is None and NUMBER.fullmatch(value):
            return UnquotedNumber(value)
        return value

    Loader.add_constructor("tag:yaml.org,2002:str", marked)
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


Reader = Callable[[str], Any]
READERS: dict[str, Reader] = {
    ".json": json.loads,
    ".toml": tomllib.loads,
    ".yaml": _yaml,
    ".yml": _yaml,
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


@overload
def record(cls: type[T], /) -> type[T]: ...
@overload
def record(*, repr: bool = True, eq: bool = True) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def record(cls: Any = None, /, **options: bool) -> Any:
    """Make a frozen dataclass of keyword arguments; `help` lists every field with its text."""
    if cls is None:
        return partial(record, **options)
    text = cls.__doc__ or ""
    made: Any = dataclass(frozen=True, slots=True, kw_only=True, **options)(cls)
    made.__doc__ = DocWithFields(text)
    return made


def fields_with_text(cls: type[object]) -> dict[str, tuple[str, str]]:
    """Field -> its declaration and the text below it, empty where it has none."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return {}  # installed without its source
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.ClassDef)
    found = {}
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
