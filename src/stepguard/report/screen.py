"""Write to a terminal that other programs write to as well: progress bars stay whole."""

from __future__ import annotations

import contextlib
import os
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, Literal, TextIO

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.rule import Rule
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from stepguard.records.codec import UNPRINTABLE, printable


@contextlib.contextmanager
def same_random_numbers() -> Iterator[None]:
    """Whatever rich draws inside, the program's next random number is what it would have been."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


Paint = Callable[[Console], None]
WIDEST = 110
"""Longer lines are hard to read, however wide the window is."""
NARROWEST = 40
PIPE_WIDTH = 100
CUT = "…"
"""Stands for the middle of a long word; `put` replaces it where the encoding lacks it."""


def is_tty(stream: TextIO) -> bool:
    """False as well for streams that are closed or know no `isatty`."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError, OSError):
        return False


def wants_colour(stream: TextIO) -> bool:
    """ANSI only for a real terminal, and never against NO_COLOR (https://no-color.org)."""
    return is_tty(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def takes_links(stream: TextIO) -> bool:
    """Whether a file name may be a link (OSC 8): in a terminal of a person, with colours."""
    return wants_colour(stream) and os.environ.get("TERM") != "linux" and "CI" not in os.environ


def takes_unicode(stream: TextIO) -> bool:
    """Whether box and bar characters survive this stream's encoding."""
    return (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "").startswith("utf")


def columns(stream: TextIO) -> int:
    """How wide to write: the window's width within reason, a fixed width for files and pipes."""
    try:
        window = int(os.environ["COLUMNS"])
    except (KeyError, ValueError):
        window = PIPE_WIDTH
        if is_tty(stream):
            window = 0
            with contextlib.suppress(AttributeError, ValueError, OSError):
                window = os.get_terminal_size(stream.fileno()).columns
            # A terminal that does not know its size answers 0.
            window = window or 80
    return max(NARROWEST, min(window, WIDEST))


class CleanConsole(Console):
    """A console on which printed text cannot control the terminal, wherever it came from.

    The console's own styles and cursor movements are added after `render`, or marked as control.
    """

    links = False
    """Whether places in source files are links: `draw` says so for the stream it draws for."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control is None and UNPRINTABLE.search(segment.text):
                yield Segment(printable(segment.text), segment.style)
            else:
                yield segment


def paper(*, width: int, colour: bool, record: bool = False) -> CleanConsole:
    """A console that draws into memory and ignores the environment: same input, same text."""
    colours: Literal["truecolor", "standard"] | None = None
    if colour:
        colours = "truecolor" if record else "standard"
    return CleanConsole(
        file=StringIO(),
        width=width,
        height=100,
        force_terminal=colour,
        force_interactive=False,
        force_jupyter=False,
        color_system=colours,
        no_color=not colour,
        legacy_windows=False,
        highlight=False,
        emoji=False,
        markup=False,
        record=record,
        _environ={},
    )


def draw(stream: TextIO, paint: Paint) -> str:
    """What `paint` prints, as text that fits this stream's width and colours."""
    console = paper(width=columns(stream), colour=wants_colour(stream))
    console.links = takes_links(stream)
    with same_random_numbers():
        paint(console)
    return text_on(console)


def text_on(console: Console) -> str:
    """What was printed to a console made by `paper`, without trailing blanks."""
    assert isinstance(console.file, StringIO)
    lines = console.file.getvalue().splitlines()
    return "".join(line.rstrip() + "\n" for line in lines)


def put(text: str, stream: TextIO) -> None:
    """Write above a progress bar on the screen. A terminal that is gone never ends a run."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    if not takes_unicode(stream):
        text = text.replace(CUT, "~")
    safe = text.encode(encoding, "replace").decode(encoding)
    # The user's global console, where a progress bar of rich may be redrawn right now.
    console: Any = getattr(sys.modules.get("rich"), "_console", None)
    live = getattr(console, "_live_stack", None) or getattr(console, "_live", None)
    # tqdm's own way to write between its bars.
    tqdm: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
    between_bars = getattr(tqdm, "external_write_mode", None)
    with contextlib.suppress(OSError, ValueError):
        if live and console.is_terminal and is_tty(stream):
            with same_random_numbers():
                console.print(Text.from_ansi(safe.rstrip("\n")), soft_wrap=True)
            return
        with between_bars(file=stream) if between_bars else contextlib.nullcontext():
            stream.write(safe)
            stream.flush()


# --- Keep names and paths in one piece: lines break between words, longer words lose their
# middle.


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
        # columns that a table gives to such a cell before it takes them from others
        return Measurement(
            min(whole.minimum, 20, options.max_width),
            min(whole.maximum, options.max_width),
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield fitted(self.text, options.max_width)


class Place(Unbroken):
    """A text that names `train.py:15`, which is a link to the file where the console has links."""

    def __init__(self, text: str, source: str | None) -> None:
        super().__init__(text)
        self._source = source or ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        name, _, line = self._source.rpartition(":")
        path = Path(name).absolute()
        if getattr(console, "links", False) and line.isdigit() and path.is_file():
            link = Style(link=f"{path.as_uri()}#{line}")
            self.text.highlight_words([self._source], style=link)
        yield from super().__rich_console__(console, options)


class Name(Unbroken):
    """A cell that is one name or path: one line, whatever it holds."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        plain = self.text.plain
        yield Text(
            middle(plain, options.max_width), style=self.text.style, no_wrap=True, overflow="crop"
        )


def fitted(text: Text, width: int) -> Text:
    """Shorten every word that is longer than a line."""
    long = [found for found in _WORD.finditer(text.plain) if len(found[0]) > width]
    if not long:
        return text
    result = Text(style=text.style, no_wrap=text.no_wrap, overflow=text.overflow)
    end = 0
    for found in long:
        head, _, tail = middle(found[0], width).partition(CUT)
        result.append_text(text[end : found.start() + len(head)])
        result.append(CUT)
        end = found.end() - len(tail)
    return result.append_text(text[end:])


def table(
    rows: Iterable[Sequence[RenderableType]],
    headings: Sequence[str] = (),
    *,
    first: str = "cyan",
    numbers_from: int | None = None,
    widths: Sequence[int] = (),
) -> Table:
    """Rows without lines between them; texts in it are `Unbroken`.

    The first column is in the style `first` and is never wrapped; under headings, columns from
    `numbers_from` on hold numbers, which stand on the right. `widths` are those of the first ones.
    """
    drawn = Table(
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
        header_style="dim",
        show_header=bool(headings),
    )
    drawn.add_column(*headings[:1], no_wrap=True, style=first)
    for place, heading in enumerate(headings[1:], start=1):
        number = numbers_from is not None and place >= numbers_from
        drawn.add_column(heading, justify="right" if number else "left", no_wrap=number)
    for row in rows:
        cells = [Unbroken(cell) if isinstance(cell, str) else cell for cell in row[1:]]
        drawn.add_row(row[0], *cells)
    for column, width in zip(drawn.columns, widths, strict=False):
        column.width = width
    return drawn


def titled(title: str, *, width: int, unicode: bool) -> Rule:
    """A rule with a title. Of a long path at its end the middle goes, never the end."""
    before, blank, path = title.rpartition(" ")
    room = width - len(before) - len(blank) - MARGIN
    shown = f"{before}{blank}{middle(path, max(room, MARGIN))}"
    return Rule(
        Text(shown, style="bold"), characters="─" if unicode else "-", style="dim", align="left"
    )
