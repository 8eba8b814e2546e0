"""Write a run's page: one HTML file with its style, its script and its data, and nothing else.

The page opens from disk and asks no network for anything. What a journal says is put into the page
as JSON and shown as text only: a policy in the page lets no other script run than the one written
here, so that nothing of a journal can be executed.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from importlib.resources import files
from typing import Any

SCRIPTS = (
    "uPlot.min.js",
    "drawing.js",
    "data.js",
    "view.js",
    "charts.js",
    "lanes.js",
    "figures.js",
    "cards.js",
    "live.js",
    "looks.js",
    "main.js",
)
"""In the order in which they need each other."""
STYLES = ("uPlot.min.css", "page.css")
_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


@cache
def asset(name: str) -> str:
    """A file that is part of the page."""
    return (files("stepguard.report") / "page" / name).read_text(encoding="utf-8")


@cache
def _joined(names: tuple[str, ...]) -> str:
    return "\n".join(asset(name) for name in names)


def script_text() -> str:
    """All scripts in one, strict and without names of their own in the window."""
    own = _joined(SCRIPTS[1:])
    return f"{asset(SCRIPTS[0])}\n(() => {{\n'use strict';\n{own}\n}})();\n"


def policy(script: str, style: str, *, connects: bool = False) -> str:
    """What the browser may do with this page: run this script, use this style, nothing else."""
    allowed = [
        "default-src 'none'",
        f"script-src '{_digest(script)}'",
        f"style-src '{_digest(style)}'",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    if connects:
        allowed.append("connect-src 'self'")
    return "; ".join(allowed)


def _digest(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
    return f"sha256-{digest}"


def render_page(document: dict[str, Any], *, home: str = "") -> str:
    """The whole page. `home` is the address of the list of runs, on a server that has several."""
    script = script_text()
    style = _joined(STYLES)
    link = f'<a class="plain" href="{home}">all runs</a>' if home else ""
    pieces = {
        "{policy}": policy(script, style, connects=document.get("live") is not None),
        "{style}": style,
        "{home}": link,
        "{data}": embedded(document),
        "{script}": script,
    }
    rest = asset("page.html")
    text = []
    # In the template's order: what is put in is never looked at again for names to replace.
    for name, piece in pieces.items():
        before, _, rest = rest.partition(name)
        text += [before, piece]
    return "".join([*text, rest])


def embedded(document: dict[str, Any]) -> str:
    """JSON that ends no script element and holds no character that HTML gives a meaning."""
    text = json.dumps(document, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.translate(_ESCAPES)
