"""A real Chromium for tests of web pages: Debian's, driven by playwright.

Where it is missing the tests are skipped, and the end of the session says how many (conftest.py).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NO_BROWSER = "no Chromium"
"""What the reason of every skipped browser test begins with."""
NO_SITE = "the build of docs/, for mkdocs is not installed: pip install '.[docs]'"
"""What is said where docs/ cannot be built as a site."""
SIZE = {"width": 1400, "height": 1000}
PATIENCE = 20_000
"""Milliseconds until a page that does not answer fails its test."""


def chromium() -> str | None:
    """Where Chromium is: `STEPGUARD_CHROMIUM`, or what the system has."""
    return os.environ.get("STEPGUARD_CHROMIUM") or shutil.which("chromium")


@dataclass
class OpenPage:
    """A page, and whatever went wrong in it."""

    page: Any
    troubles: list[str] = field(default_factory=list)

    def ask(self, expression: str) -> Any:
        return self.page.evaluate(expression)

    def drawn(self, panel: str, what: str) -> list[dict[str, Any]]:
        """Marks or branches that a panel drew, with their places."""
        found = f"stepguardPage.panels.find(p => p.spec.id === {panel!r})"
        drawn: list[dict[str, Any]] = self.ask(f"{found}.drawn.{what}")
        return drawn

    def lane(self, what: str) -> list[dict[str, Any]]:
        drawn: list[dict[str, Any]] = self.ask(f"stepguardPage.lanes.drawn.{what}")
        return drawn

    def view(self) -> tuple[float, float]:
        low, high = self.ask("[stepguardPage.view.min, stepguardPage.view.max]")
        return low, high

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.ask("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


@contextmanager
def started() -> Iterator[Any]:
    """A browser; skips the test where there is none."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.skip(f"{NO_BROWSER} tests: playwright is not installed")
    binary = chromium()
    if binary is None:
        pytest.skip(f"{NO_BROWSER} found; `make browser` installs it")
    # Containers mostly run as root, for which Chromium has no sandbox.
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Any, address: str | Path, **settings: Any) -> Iterator[OpenPage]:
    """The page at this address, ready; errors in its console are collected."""
    context = browser.new_context(**{"viewport": SIZE, **settings})
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    seen = OpenPage(page)
    page.on("console", lambda message: _note(seen, message))
    page.on("pageerror", lambda error: seen.troubles.append(str(error)))
    page.on("requestfailed", lambda request: seen.troubles.append(f"failed: {request.url}"))
    where = address.resolve().as_uri() if isinstance(address, Path) else address
    try:
        page.goto(where)
        page.wait_for_selector("body[data-ready]")
        seen.settle()
        yield seen
    finally:
        context.close()


def _note(seen: OpenPage, message: Any) -> None:
    if message.type in ("error", "warning"):
        seen.troubles.append(f"{message.type}: {message.text}")
