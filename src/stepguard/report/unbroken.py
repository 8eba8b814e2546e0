"""Keep names and paths in one piece: lines break between words, longer words lose their middle."""

from __future__ import annotations

import re

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.rule import Rule
from rich.text import Text

CUT = "…"
"""Stands for the middle; `screen.put` replaces it where the stream's encoding lacks it."""
NARROWEST = 20
"""Columns that a table gives to such a cell before it takes them from others."""
MARGIN = 8
"""Columns of a rule that its title leaves free."""
_WORD = re.compile(r"\S+")


def middle(text: str, width: int) -> str:
    """`runs/a-long-…/model.pt`: the end of a path tells more, so it gets more of the room."""
    if len(text) <= width:
        return text
    if width <= 0:
        return ""
    if width <= 2:
        return text[-width:]
    tail = (2 * (width - 1) + 2) // 3
    name = text.rfind("/", 0, len(text) - 1)
    if 0 < len(text) - name <= width - 2:
        tail = max(tail, len(text) - name)
    return text[: width - 1 - tail] + CUT + text[len(text) - tail :]


class Unbroken:
    """A cell: a text of which no word is ever broken in two."""

    def __init__(self, text: str | Text, style: str = "") -> None:
        self.text = text if isinstance(text, Text) else Text(text, style=style)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        # rich would not go below the longest word; a cell that shortens words can be narrower.
        whole = Measurement.get(console, options, self.text)
        return Measurement(
            min(whole.minimum, NARROWEST, options.max_width), min(whole.maximum, options.max_width)
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield fitted(self.text, options.max_width)


class Name(Unbroken):
    """A cell that is one name or path: one line, whatever it holds."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        plain = self.text.plain
        yield Text(
            middle(plain, options.max_width), style=self.text.style, no_wrap=True, overflow="crop"
        )


def fitted(text: Text, width: int) -> Text:
    """The same text with every word that is longer than a line shortened to one."""
    long = [found for found in _WORD.finditer(text.plain) if len(found[0]) > width]
    if not long:
        return text
    result = Text(style=text.style, no_wrap=text.no_wrap, overflow=text.overflow)
    end = 0
    for found in long:
        kept = text[end : found.start()]
        word = text[found.start() : found.end()]
        cut = middle(found[0], width)
        at = cut.index(CUT) if CUT in cut else len(cut)
        result.append_text(kept)
        result.append_text(word[:at])
        result.append_text(Text(CUT))
        result.append_text(word[len(word) - (len(cut) - at - 1) :])
        end = found.end()
    result.append_text(text[end:])
    return result


def titled(title: str, *, width: int, unicode: bool) -> Rule:
    """A rule with a title. Of a long path at its end the middle goes, never the end."""
    before, blank, path = title.rpartition(" ")
    room = width - len(before) - len(blank) - MARGIN
    shown = f"{before}{blank}{middle(path, max(room, MARGIN))}"
    return Rule(
        Text(shown, style="bold"), characters="─" if unicode else "-", style="dim", align="left"
    )
