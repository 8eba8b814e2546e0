"""What `recipes/<name>/modes.py` lists: failures, how to run them, and what must come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from recipes.common.expect import Expectation
from recipes.common.outcome import Mode, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A failure of a recipe, run in four modes."""

    name: str
    title: str
    run: Callable[[Mode, bool], Outcome]
    """Called with the mode, and whether the short form is wanted."""
    expected: Expectation
    in_short: bool = True
    in_full: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Beforehand:
    """A failure that has to be found before the first step."""

    name: str
    title: str
    look: Callable[[], tuple[str, list[str]]]
    """What was said about the settings, and what is wrong with that."""
