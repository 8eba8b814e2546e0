"""The file of a page: self-contained, and nothing of a journal can leave its place in it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest

from report.hostile import ATTACK
from stepguard.report.page import SCRIPTS, asset, embedded, policy, render_page

DOCUMENT = {"format": 1, "mode": "report", "runs": [], "live": None, "text": ATTACK}


def test_data_is_read_back_and_ends_no_element() -> None:
    text = embedded(DOCUMENT)
    assert json.loads(text) == DOCUMENT
    assert not set("<>&") & set(text)


def test_page_has_one_script_and_one_document() -> None:
    page = render_page(DOCUMENT)
    assert page.count("<script") == 2
    assert page.count("</script") == 2
    assert ATTACK not in page


def test_policy_names_the_very_script_and_style_of_the_page() -> None:
    page = render_page(DOCUMENT)
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    for text in (script, style):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in page
    assert "default-src 'none'" in page
    assert "unsafe" not in policy(script, style)


def test_page_asks_no_network_for_anything() -> None:
    page = render_page(DOCUMENT)
    addresses = set(re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(https?:[^"')\s]+)""", page))
    assert addresses == set()
    assert "connect-src" not in page


def test_live_page_may_ask_its_own_server_only() -> None:
    page = render_page({**DOCUMENT, "live": {"events": "/events/x"}})
    assert "connect-src 'self'" in page


def test_numbers_that_json_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        embedded({"loss": float("nan")})


@pytest.mark.parametrize("name", SCRIPTS[1:])
def test_own_scripts_are_short_and_write_no_html(name: str) -> None:
    text = asset(name)
    assert len(text.splitlines()) < 400
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)


def test_licence_of_the_bundled_library_lies_beside_it() -> None:
    assert "MIT License" in asset("uPlot.LICENSE")
    assert "v1.6.32" in asset("uPlot.min.js")


def test_every_asset_is_used() -> None:
    import stepguard.report.page as module

    folder = Path(module.__file__).parent / "page"
    used = {*SCRIPTS, "uPlot.min.css", "page.css", "page.html", "uPlot.LICENSE", "list.js"}
    assert {path.name for path in folder.iterdir()} == used
