"""The live page in a real browser: rows and incidents arrive, and nothing is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from browser import opened, started
from cli.journals import NAN, write_run
from serve.served import serving
from stepguard.journal import Journal
from stepguard.records import Decision, Incident, Reading, Verdict


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with started() as found:
        yield found


def _reading(step: int) -> Reading:
    return Reading(step=step, loss=2.0 - step / 100, grad_norm=0.5, lr=(1e-4,))


def _incident(step: int) -> Incident:
    return Incident(
        id=f"{step}-0",
        step=step,
        verdict=Verdict(kind="nonfinite_loss", severity="incident", summary="loss is nan"),
        reading=replace(_reading(step), loss=NAN),
        decision=Decision(action="skip", consecutive=1, total=1),
    )


def test_rows_and_incidents_arrive_while_the_page_is_open(browser: Any, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run")
    journal.write("run", {"stepguard": "0", "time": 1e9})
    for step in range(10):
        journal.step(_reading(step), committed=True)
    with serving(tmp_path) as address, opened(browser, f"{address}runs/run") as seen:
        assert seen.ask("stepguardPage.runs[0].rowCount") == 10
        for step in range(10, 30):
            journal.step(_reading(step), committed=True)
        seen.page.wait_for_selector("body[data-rows='30']")
        assert seen.ask("stepguardPage.panels[0].plot.data[0]") == list(range(30))
        journal.step(replace(_reading(30), loss=NAN), committed=False)
        journal.incident(_incident(30))
        seen.page.wait_for_selector(".incident-dot")
        seen.settle()
        assert [mark["step"] for mark in seen.drawn("loss", "marks")] == [30]
        assert seen.page.locator("#card h2").inner_text() == "Step 30"
        assert seen.ask("stepguardPage.live.rows") == 21
        assert seen.ask("stepguardPage.live.lost") == 0
        assert seen.page.locator("#live-state").inner_text() == "live"
        assert seen.troubles == []
    journal.close()


def test_view_of_the_user_stays_while_rows_arrive(browser: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with serving(run) as address, opened(browser, f"{address}runs/run") as seen:
        seen.page.keyboard.press("+")
        before = seen.view()
        journal = Journal(run)
        journal.step(_reading(12), committed=True)
        journal.close()
        seen.page.wait_for_selector("body[data-rows='13']")
        assert seen.view() == before


def test_new_run_in_the_folder_takes_the_page_over(browser: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with serving(run) as address, opened(browser, f"{address}runs/run") as seen:
        journal = Journal(run)
        journal.write("run", {"stepguard": "0"})
        journal.step(_reading(0), committed=True)
        journal.close()
        seen.page.wait_for_selector("body[data-run='2'][data-ready]")
        assert seen.ask("stepguardPage.runs[0].rowCount") == 1


def test_list_of_runs_leads_to_their_pages(browser: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "first")
    write_run(tmp_path / "second")
    with serving(tmp_path) as address:
        context = browser.new_context()
        page = context.new_page()
        troubles: list[str] = []
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.goto(address)
        assert page.locator("tbody a").all_inner_texts() == ["first", "second"]
        page.get_by_role("link", name="second").click()
        page.wait_for_selector("body[data-ready]")
        assert page.locator("h1").inner_text() == "second"
        page.get_by_role("link", name="all runs").click()
        page.wait_for_selector("#runs")
        context.close()
        assert troubles == []


def _begun(folder: Path, began: float, losses: list[float]) -> Journal:
    journal = Journal(folder)
    journal.write("run", {"stepguard": "0", "time": began})
    for step, loss in enumerate(losses):
        journal.step(Reading(step=step, loss=loss), committed=True)
    return journal


def _names(page: Any) -> list[str]:
    names: list[str] = page.locator("#runs a").all_inner_texts()
    return names


def test_list_has_the_newest_run_first_and_can_be_sorted(browser: Any, tmp_path: Path) -> None:
    from axe_playwright_python.sync_playwright import Axe

    now = time.time()
    for name, age, loss in (("a", 7300, 3.0), ("b", 90, 1.0), ("c", 200_000, 2.0)):
        _begun(tmp_path / name, now - age, [4.0, loss]).close()
    with serving(tmp_path) as address:
        context = browser.new_context(viewport={"width": 390, "height": 844})
        page = context.new_page()
        page.goto(address)
        assert _names(page) == ["b", "a", "c"]
        assert page.locator("#runs .of-age").all_inner_texts() == ["1 min", "2 h", "2 d"]
        assert page.locator("#runs svg polyline").count() == 3
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        page.get_by_role("button", name="loss").click()
        assert _names(page) == ["b", "c", "a"]
        page.get_by_role("button", name="loss").click()
        assert _names(page) == ["a", "c", "b"]
        head = page.locator("th[aria-sort]")
        assert (head.inner_text(), head.get_attribute("aria-sort")) == ("loss", "descending")
        for width in (390, 1200):
            page.set_viewport_size({"width": width, "height": 844})
            found = Axe().run(page).response["violations"]
            serious = [one["id"] for one in found if one["impact"] in ("serious", "critical")]
            assert serious == []
        context.close()


def test_row_under_the_mouse_stays_while_the_list_changes(browser: Any, tmp_path: Path) -> None:
    now = time.time()
    journal = _begun(tmp_path / "old", now - 100, [4.0])
    with serving(tmp_path) as address:
        context = browser.new_context()
        page = context.new_page()
        page.goto(address)
        page.hover("#runs a")
        page.evaluate("globalThis.before = document.querySelector('#runs a')")
        journal.step(Reading(step=1, loss=3.0), committed=True)
        journal.close()
        _begun(tmp_path / "new", now, [4.0]).close()
        page.wait_for_selector("#runs tr:nth-child(2)")
        page.locator("#runs .of-steps").first.get_by_text("2", exact=True).wait_for()
        assert _names(page) == ["old", "new"]
        assert page.evaluate("before.isConnected && before.matches(':hover')")
        page.mouse.move(0, 0)
        page.wait_for_function("document.querySelector('#runs a').innerText === 'new'")
        assert page.evaluate("before.isConnected")
        context.close()


def test_page_of_a_run_that_has_not_begun_waits_for_it(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "soon").mkdir()
    with serving(tmp_path) as address:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{address}runs/soon")
        assert "no run of this name yet" in page.locator("main").inner_text()
        assert page.get_by_role("link", name="all runs").get_attribute("href") == "/"
        (tmp_path / "soon" / "journal.jsonl").touch()
        assert page.goto(f"{address}runs/soon").status in (200, 404)
        _begun(tmp_path / "soon", time.time(), [4.0, 3.0]).close()
        page.wait_for_selector("body[data-rows='2']")
        context.close()
