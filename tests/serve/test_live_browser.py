"""The live page in a real browser: rows and incidents arrive, and nothing is lost."""

from __future__ import annotations

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
