"""A docstring that lists the fields of a dataclass."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from stepguard.records.codec import documented, fields_with_text


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A place."""

    x: float = 0.0
    """How far
    to the right.
    """
    y: float = 0.0


def test_fields_follow_the_text_with_type_default_and_their_own_text() -> None:
    assert inspect.getdoc(Point) == (
        "A place.\n\nFields:\n    x: float = 0.0\n        How far to the right.\n    y: float = 0.0"
    )
    assert Point(x=1.0).__doc__ == Point.__doc__
    assert fields_with_text(Point)["y"] == ("y: float = 0.0", "")


def test_class_without_source_keeps_its_own_text() -> None:
    scope: dict[str, type] = {}
    exec("class Made:\n    'As it is.'\n    x: int = 0\n", scope)
    assert documented(scope["Made"]).__doc__ == "As it is.\n\nFields:"
