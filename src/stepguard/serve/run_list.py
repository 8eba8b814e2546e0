"""The list of runs that a server shows first."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from stepguard.report.run_page import asset, embedded

COLUMNS = ("run", "state", "steps", "loss", "incidents", "last step")


def render_list(root: str, rows: Sequence[dict[str, str]]) -> tuple[str, str, str]:
    """The page, its script and its style."""
    script = asset("list.js")
    style = asset("page.css")
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in COLUMNS)
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>runs · stepguard</title><style>{style}</style></head><body>"
        '<header class="top"><div class="brand">stepguard</div><h1>Runs</h1>'
        f'<div class="line">{escape(root)}</div></header><main class="rest">'
        f'<section class="sheet"><table class="runs-table"><thead><tr>{heads}</tr></thead>'
        '<tbody id="runs"></tbody></table><p id="none" hidden>No run here yet.</p></section></main>'
        f'<script type="application/json" id="stepguard-runs">{embedded({"runs": list(rows)})}'
        f"</script><script>{script}</script></body></html>"
    )
    return page, script, style
