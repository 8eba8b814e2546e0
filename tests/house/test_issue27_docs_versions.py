"""Sites of several versions lie beside each other, and the newest one is opened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripts import docs_versions

import stepguard


def built(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "index.html").write_text(text, encoding="utf-8")
    return folder


def test_a_version_is_added_beside_the_others(tmp_path: Path) -> None:
    public = tmp_path / "public"
    public.mkdir()
    docs_versions.add(built(tmp_path / "b", "ten"), public, "0.10.0")
    docs_versions.add(built(tmp_path / "a", "two"), public, "0.2.0")
    docs_versions.add(built(tmp_path / "c", "two, again"), public, "0.2.1")
    assert (public / "0.2" / "index.html").read_text() == "two, again"
    assert (public / "0.10" / "index.html").read_text() == "ten"
    assert "url=0.10/index.html" in (public / "index.html").read_text()
    assert json.loads((public / "versions.json").read_text()) == [
        {"version": "0.10", "title": "0.10.0", "aliases": ["latest"]},
        {"version": "0.2", "title": "0.2.1", "aliases": []},
    ]


def test_without_a_site_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="make docs"):
        docs_versions.add(tmp_path / "none", tmp_path, "0.2.0")
    assert list(tmp_path.iterdir()) == []


def test_the_version_is_the_package_s() -> None:
    assert docs_versions.source_version() == stepguard.__version__
