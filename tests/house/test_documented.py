"""Every public name says what it is, with an example or with a text for each field."""

from __future__ import annotations

import ast
import inspect
import pydoc
from dataclasses import fields, is_dataclass

import pytest

import stepguard
from stepguard.records.codec import fields_with_text

NAMES = [name for name in stepguard.__all__ if name != "__version__"]
RECORDS = [name for name in NAMES if is_dataclass(getattr(stepguard, name))]


def example_lines(text: str) -> list[str]:
    """Lines of a docstring that are Python, and more than a word."""
    found = []
    for line in text.splitlines():
        code = line.strip()
        if not any(mark in code for mark in ("(", " = ", "import ")):
            continue
        try:
            ast.parse(code if not code.endswith(":") else f"{code}\n    pass")
        except SyntaxError:
            continue
        found.append(code)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_public_name_has_a_docstring_with_an_example_or_its_fields(name: str) -> None:
    text = inspect.getdoc(getattr(stepguard, name)) or ""
    assert text.strip(), f"{name} has no docstring"
    command = "`stepguard " in text  # what raises it is a command
    assert name in RECORDS or command or example_lines(text), f"{name} shows no example: {text}"


@pytest.mark.parametrize("name", RECORDS)
def test_every_field_has_a_text_that_help_shows(name: str) -> None:
    record = getattr(stepguard, name)
    texts = fields_with_text(record)
    shown = " ".join(pydoc.plain(pydoc.render_doc(record)).replace("|", " ").split())
    for field in fields(record):
        declaration, text = texts[field.name]
        assert text, f"{name}.{field.name} has no text"
        assert field.name in shown
        assert " ".join(text.split()[:6]).replace("|", " ") in shown, (name, declaration)


@pytest.mark.parametrize("name", ["Guard", "StepResult", "Sink"])
def test_every_public_member_has_a_docstring(name: str) -> None:
    for member, value in vars(getattr(stepguard, name)).items():
        if not member.startswith("_") and (callable(value) or isinstance(value, property)):
            assert inspect.getdoc(value), f"{name}.{member} has no docstring"
