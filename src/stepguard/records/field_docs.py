"""Show the text under each field of a dataclass in `help()`, where Python itself drops it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import TypeVar

T = TypeVar("T")
WIDTH = 88


class DocWithFields:
    """A class docstring that is completed with its fields when somebody reads it.

    The source is read then and not before: importing the class costs nothing.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._whole: str | None = None

    def __get__(self, instance: object, owner: type[object]) -> str:
        if self._whole is None:
            self._whole = _whole(self._text, owner)
        return self._whole


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
    following = [*definition.body[1:], None]
    for statement, after in zip(definition.body, following, strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            found[statement.target.id] = (ast.unparse(statement), _text(after))
    return found


def _text(statement: ast.stmt | None) -> str:
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
        return ""
    value = statement.value.value
    return " ".join(value.split()) if isinstance(value, str) else ""


def _whole(text: str, owner: type[object]) -> str:
    lines = [inspect.cleandoc(text), "", "Fields:"]
    for declaration, said in fields_with_text(owner).values():
        lines.append(f"    {declaration}")
        lines += textwrap.wrap(said, WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines)
