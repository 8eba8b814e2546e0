"""Text for people is in plain English: pages, findings and messages of the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripts import check_style

ROOT = Path(__file__).resolve().parents[2]
WORST = (
    "Median ratio to the bare step",
    "have had them, and keep it",
    "incidents that are born in the step",
    "died of NaN, healthy, unguarded",
    "need not obey missing gradients",
    "trainings it was not fitted to",
    "none waits for one that does not come",
    "a scale that is still finding its place",
    "It falls when it is what overflows",
    "taken in these very weights",
    "Of several elements the largest magnitude counts",
    "One word changes the second",
    "defaults tell and never act",
    "look so in good health",
    "Whoever slips through gets the guard",
    "makes the verdict itself impossible disarms it",
    "that led past the fault it answered",
    "only where it runs away: ten times",
    "three quarters of what was learned are lost",
    "nearly every pair must agree on the direction",
    "a power cut it need not",
    "born outside the model",
    "input: batch:input in 0",
    "judges no losses",
    "its operands reach 30495.7, the limit is",
)
"""One piece of each of the 25 sentences that a new user found hardest to read."""


def texts() -> Iterator[tuple[str, str]]:
    """Every page and source file, on one line each, so that a line break hides nothing."""
    source = ROOT / "src" / "stepguard"
    found = [p for kind in ("*.py", "*.md", "*.js") for p in source.rglob(kind)]
    for path in [*check_style.pages(), *found]:
        text = re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8"))
        yield str(path.relative_to(ROOT)), " ".join(text.split())


def messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The string literals of a module with spaces in them, docstrings aside."""
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            if isinstance(node, ast.Expr) or not isinstance(child, ast.Constant):
                continue
            if isinstance(child.value, str) and " " in child.value:
                yield child.lineno, child.value


def wrong_words(source: str) -> list[tuple[int, str]]:
    return [
        (line, text)
        for line, text in messages(ast.parse(source))
        if any(re.search(pattern, text, re.IGNORECASE) for pattern in check_style.PHRASES)
    ]


def test_none_of_the_worst_sentences_is_left() -> None:
    assert len(WORST) == 25
    assert [
        (name, piece)
        for name, text in texts()
        for piece in WORST
        if piece.casefold() in text.casefold()
    ] == []


def test_messages_keep_to_the_words_of_the_docs() -> None:
    paths = sorted((ROOT / "src").rglob("*.py"))
    found = {str(path): wrong_words(path.read_text(encoding="utf-8")) for path in paths}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def test_pages_keep_to_the_style(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_style.main([]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('say("the value was born here")', [1]),
        ('x = 1\nsay(f"step {x} is told")', [2]),
        ('"""Whoever reads this docstring."""\nborn = {"state_born": 1}', []),
    ],
)
def test_docstrings_and_names_are_not_messages(source: str, lines: list[int]) -> None:
    assert [line for line, _ in wrong_words(source)] == lines
