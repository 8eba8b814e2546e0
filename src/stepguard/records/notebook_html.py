"""How records look in a notebook: small HTML without colours of its own, so it fits any theme.

Every text is escaped: it may come from a file name or a class of the user's.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TypeAlias

Row: TypeAlias = tuple[str, str]
"""A label, and what it says: text, or HTML made by one of the functions below."""
BOX = "border-left:4px solid {color};padding:2px 0 2px 12px;margin:4px 0;line-height:1.4"
LABEL = "text-align:left;vertical-align:top;padding:0 12px 2px 0;opacity:.65;font-weight:600"
VALUE = "text-align:left;vertical-align:top;padding:0 0 2px 0"
CODE = "margin:0;background:none;padding:0;font-family:monospace"
BAD = "#c2410c"
GOOD = "#15803d"


class Html(str):
    """Text that is HTML already."""


def box(title: str, rows: Iterable[Row], *, bad: bool) -> str:
    """A title and a table of labels and values; rows that say nothing are left out."""
    lines = []
    for label, said in rows:
        if said:
            lines.append(
                f'<tr><th scope="row" style="{LABEL}">{escape(label)}</th>'
                f'<td style="{VALUE}">{as_html(said)}</td></tr>'
            )
    style = BOX.format(color=BAD if bad else GOOD)
    table = f'<table style="border:0">{"".join(lines)}</table>' if lines else ""
    return f'<div style="{style}"><strong>{escape(title)}</strong>{table}</div>'


def as_html(said: str) -> str:
    """Escaped, unless it is HTML made here."""
    return said if isinstance(said, Html) else escape(said)


def code(lines: Iterable[str]) -> Html:
    """Source lines; the marked one (`> 5 | ...`) in bold."""
    shown = []
    for line in lines:
        text = escape(line)
        shown.append(f"<b>{text}</b>" if line.startswith(">") else text)
    if not shown:
        return Html("")
    inner = "\n".join(shown)
    return Html(f'<pre style="{CODE}">{inner}</pre>')


def stacked(parts: Iterable[str]) -> Html:
    """Several texts below each other."""
    said = [as_html(part) for part in parts if part]
    return Html("<br>".join(said))


def number(value: float | None) -> str:
    """Six digits are enough to read."""
    return "not read" if value is None else f"{value:.6g}"
