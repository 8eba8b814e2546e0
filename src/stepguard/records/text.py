"""The one cleaner of text that came from a file, before people see it."""

from __future__ import annotations

import re

UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
"""What can move a cursor, start an escape sequence, reverse the direction or hide."""
SECRET = re.compile(r"(^|[-_.])(api-?_?key|key|token|passw(or)?d|secret|credentials?)s?$", re.I)
"""How options, settings and variables end whose value is nobody else's business."""
MASK = "***"
_CODE_SPAN = re.compile(r"(?<!`)(`[^`\n]+`)(?!`)")


def printable(text: str) -> str:
    """Replace what could control a terminal; line ends and tabs stay."""
    return UNPRINTABLE.sub("?", text)


def one_line(text: str) -> str:
    """The same, for what must not end a line."""
    return printable(text.replace("\n", " ").replace("\t", " "))


def as_markdown(text: str) -> str:
    """One line of Markdown in which nothing is HTML, a link or a table's border.

    Code spans stay: nothing in them is interpreted.
    """
    parts = _CODE_SPAN.split(one_line(text))
    for place in range(0, len(parts), 2):
        plain = parts[place].replace("&", "&amp;").replace("<", "&lt;").replace("`", "\\`")
        parts[place] = plain.replace("](", "]\\(")
    return "".join(parts).replace("|", "\\|")


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
