"""docs/ as a site: it builds strictly, without a network, and what is generated is up to date."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from scripts import write_reference

import stepguard
from house.left_out import NO_SITE

ROOT = Path(__file__).parents[2]


def test_configuration_and_options_are_up_to_date() -> None:
    assert write_reference.stale() == [], "python scripts/write_reference.py"


def test_a_changed_option_would_make_the_page_stale() -> None:
    page = write_reference.COMMAND_LINE.read_text(encoding="utf-8")
    assert write_reference.command_line(page.replace("| `--once` |", "| `--twice` |")) == page


def test_a_command_without_a_section_gets_one() -> None:
    page = write_reference.command_line("# Command line\n")
    assert "## stepguard explain" in page
    assert "| `--restore WHICH` |" in page


def test_api_page_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^::: stepguard\.(\w+)$", page, re.MULTILINE))
    assert named == set(stepguard.__all__) - {"__version__"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_spec("mkdocs") is None or find_spec("mkdocstrings") is None:
        pytest.skip(NO_SITE)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    # a proxy that nobody listens at: a build that asks the network fails
    away = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    environment = {**os.environ, **away, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_site_builds_strictly_with_a_page_for_each_file(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        built = site / page.relative_to(ROOT / "docs").with_suffix(".html")
        assert built.is_file(), page
    assert (site / "repository" / "CONTRIBUTING.html").is_file()


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    loads = re.compile(
        r"<(?:script|img|iframe)[^>]+src=\"?https?:|<link[^>]+stylesheet[^>]+https?:"
    )
    for page in site.rglob("*.html"):
        assert not loads.search(page.read_text(encoding="utf-8")), page


def test_api_page_shows_signatures_and_examples_as_code(site: Path) -> None:
    page = (site / "api.html").read_text(encoding="utf-8")
    text = re.sub(r"<[^>]+>", "", page)
    assert "grad_norm" in text
    assert 'id="stepguard.Guard.step"' in page
    example = re.search(r"<code>[^`]*?result[^`]*?loss_fn", page)
    assert example is not None


def test_a_bar_in_the_code_of_a_table_has_no_backslash(site: Path) -> None:
    page = (site / "configuration.html").read_text(encoding="utf-8")
    assert "float | None = None" in page
    assert "\\|" not in page


def test_every_picture_is_shown_on_a_page() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    for picture in (ROOT / "docs" / "images").iterdir():
        assert f"images/{picture.name})" in text, picture.name
