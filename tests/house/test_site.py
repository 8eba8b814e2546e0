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
from browser import started
from house.left_out import NO_SITE

ROOT = Path(__file__).parents[2]


def test_configuration_and_options_are_up_to_date() -> None:
    assert write_reference.stale() == [], "python scripts/write_reference.py"


def test_a_changed_option_would_make_the_page_stale() -> None:
    page = write_reference.COMMAND_LINE.read_text(encoding="utf-8")
    assert write_reference.command_line(page.replace("`--once`", "`--twice`")) == page


def test_every_command_is_in_the_table() -> None:
    page = write_reference.command_line("# Command line\n")
    assert "| `stepguard explain [CODE]` |" in page
    assert "`--restore`" in page


def test_api_page_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^::: stepguard\.(\w+)$", page, re.MULTILINE))
    assert named == set(stepguard.__all__) - {"__version__"}


def built(settings: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Build a site as `make docs` does. With --quiet mkdocs counts no warning, so never quiet."""
    if find_spec("mkdocs") is None or find_spec("mkdocstrings") is None:
        pytest.skip(NO_SITE)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    # a proxy that nobody listens at: a build that asks the network fails
    away = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    return subprocess.run(
        [*command, "-f", str(settings), "-d", str(folder)],
        cwd=ROOT,
        env={**os.environ, **away, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = built(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_a_dead_link_would_fail_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[dead](nothing.md)\n", encoding="utf-8")
    (tmp_path / "mkdocs.yml").write_text("site_name: a\n", encoding="utf-8")
    done = built(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 1
    assert "nothing.md" in done.stderr


def test_site_builds_strictly_with_a_page_for_each_file(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        built = site / page.relative_to(ROOT / "docs").with_suffix(".html")
        assert built.is_file(), page
    assert (site / "repository" / "CONTRIBUTING.html").is_file()


def test_links_between_docs_and_the_repository_lead_to_pages_of_the_site(site: Path) -> None:
    page = (site / "how-it-works.html").read_text(encoding="utf-8")
    assert 'href="repository/CONTRIBUTING.html"' in page
    back = (site / "repository" / "CONTRIBUTING.html").read_text(encoding="utf-8")
    assert 'href="../how-it-works.html"' in back
    recipe = (site / "repository" / "recipes" / "sft" / "index.html").read_text(encoding="utf-8")
    assert 'src="half-adapters.png"' in recipe


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    loads = re.compile(
        r"<(?:script|img|iframe)[^>]+src=\"?https?:|<link[^>]+stylesheet[^>]+https?:"
    )
    for page in site.rglob("*.html"):
        assert not loads.search(page.read_text(encoding="utf-8")), page


def test_search_works_in_a_site_that_is_opened_from_disk(site: Path) -> None:
    with started() as browser:
        page = browser.new_page()
        page.goto((site / "tasks" / "loss-is-nan.html").as_uri())
        page.fill(".md-search__input", "overflow")
        page.wait_for_selector(".md-search-result__item")
        assert "matching documents" in page.inner_text(".md-search-result__meta")


def test_api_page_shows_signatures_and_examples_as_code(site: Path) -> None:
    page = (site / "api.html").read_text(encoding="utf-8")
    text = re.sub(r"<[^>]+>", "", page)
    assert "grad_norm" in text
    members = set(re.findall(r'id="stepguard\.(?:Guard|StepResult|Incident)\.(\w+)"', page))
    assert {"step", "loss", "on_commit", "committed", "findings"} <= members
    # what the package itself calls
    assert not members & {"port", "in_use", "replaced", "ended_by", "resolve", "html_rows"}
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
