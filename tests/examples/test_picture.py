"""The README's picture can be drawn again, is complete, and asks no other host for anything."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from scripts import picture

pytestmark = pytest.mark.slow


def test_picture_is_whole_and_needs_no_network() -> None:
    svg = picture.picture(steps=60)
    ElementTree.fromstring(svg)
    assert re.findall(r"https?://[^\"' )]+", svg) == ["http://www.w3.org/2000/svg"]
    assert "@font-face" not in svg and "@import" not in svg
    words = re.sub(r"<[^>]+>", "", svg).replace("\xa0", " ").replace("&#160;", " ")
    for shown in (
        "step 57",
        "torch.log(level)",
        "SG202",
        "examples/denoiser.py",
        "stepguard report demo_run",
    ):
        assert shown in words


def test_picture_in_the_docs_needs_no_network() -> None:
    svg = picture.PICTURE.read_text(encoding="utf-8")
    ElementTree.fromstring(svg)
    assert re.findall(r"https?://[^\"' )]+", svg) == ["http://www.w3.org/2000/svg"]
