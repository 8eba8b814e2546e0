"""The page of a run in a real browser, from disk and live: it draws what the journal says."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from browser import OpenPage, opened, started
from cli.journals import NAN, write_run
from forked import FULL
from report.literals import hostile_run
from report.real_runs import fixed, in_part, restarted, rewound, silently_wrong, two_ranks
from report.served import serving
from report.test_page import train_gan
from stepguard.cli.runs import report_page
from stepguard.journal import Journal
from stepguard.records import Decision, Finding, Incident, Origin, Reading, Remedy, Verdict

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with started() as found:
        yield found


@pytest.fixture(scope="module")
def rewound_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rewound(tmp_path_factory.mktemp("runs") / "rewound")


def _page(run: Path) -> Path:
    path = run / "report.html"
    path.write_text(report_page(run, 0), encoding="utf-8")
    return path


def _lines(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    return [line for line in lines if line["type"] == kind]


def test_marks_stand_at_the_steps_that_were_not_finite(browser: Any, rewound_run: Path) -> None:
    incidents = [line["incident"] for line in _lines(rewound_run, "incident")]
    bad = sorted(one["step"] for one in incidents if one["reading"].get("loss_kind"))
    with opened(browser, _page(rewound_run)) as seen:
        marks = seen.drawn("loss", "marks")
        assert sorted(mark["step"] for mark in marks) == bad
        assert {mark["kind"] for mark in marks} == {"NaN"}
        assert seen.troubles == []
        _at_their_steps(seen, marks)


def _at_their_steps(seen: OpenPage, marks: list[dict[str, Any]]) -> None:
    """Every mark is above the plot at the place of its step, and there is ink in the canvas."""
    low, high = seen.view()
    box = seen.ask(
        "(() => { const b = stepguardPage.panels[0].plot.bbox; const r = devicePixelRatio;"
        " return [b.left / r, b.top / r, b.width / r]; })()"
    )
    left, top, width = box
    for mark in marks:
        wanted = left + (mark["step"] - low) / (high - low) * width
        assert mark["x"] == pytest.approx(wanted, abs=1.5)
        assert mark["y"] < top
        ink = seen.ask(
            "(() => { const c = document.querySelector('#panel-loss canvas').getContext('2d');"
            f" return c.getImageData({mark['x']:.0f}, {mark['y']:.0f}, 1, 1).data[3]; }})()"
        )
        assert ink > 100


def test_rewind_is_drawn_as_a_branch_that_was_left(browser: Any, rewound_run: Path) -> None:
    rewinds = _lines(rewound_run, "rewind")
    with opened(browser, _page(rewound_run)) as seen:
        branches = seen.drawn("loss", "branches")
        assert [branch["kind"] for branch in branches] == ["rewind"] * len(rewinds)
        assert [branch["first"] for branch in branches] == [line["to"] for line in rewinds]
        assert [branch["last"] for branch in branches] == [line["step"] - 1 for line in rewinds]
        lane = seen.lane("branches")
        assert [(one["first"], one["last"]) for one in lane] == [
            (one["first"], one["last"]) for one in branches
        ]
        states = {(one["step"], one["state"]) for one in seen.lane("checkpoints")}
        assert (rewinds[0]["to"], "rewound to") in states
        steps = seen.ask("stepguardPage.panels[0].sources[0].steps")
        assert steps == sorted(set(steps))


def test_click_on_an_incident_zooms_and_shows_its_card(browser: Any, rewound_run: Path) -> None:
    with opened(browser, _page(rewound_run)) as seen:
        whole = seen.view()
        seen.page.locator(".incident-dot").first.click()
        low, high = seen.view()
        step = _lines(rewound_run, "incident")[0]["incident"]["step"]
        assert low < step < high and high - low < whole[1] - whole[0]
        assert seen.page.locator("#card h2").inner_text() == f"Step {step}"
        assert "SG101" in seen.page.locator("#card").inner_text()
        # every panel and the lanes follow
        scales = seen.ask(
            "stepguardPage.panels.map(p => [p.plot.scales.x.min, p.plot.scales.x.max])"
        )
        assert scales == [[low, high]] * len(scales)


def test_keyboard_pans_zooms_and_walks_through_incidents(browser: Any, rewound_run: Path) -> None:
    with opened(browser, _page(rewound_run)) as seen:
        page = seen.page
        whole = seen.view()
        page.keyboard.press("+")
        near = seen.view()
        assert near[1] - near[0] < whole[1] - whole[0]
        page.keyboard.press("ArrowRight")
        assert seen.view()[0] > near[0]
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("-")
        page.keyboard.press("0")
        assert seen.view() == pytest.approx(whole)
        steps = [line["incident"]["step"] for line in _lines(rewound_run, "incident")]
        shown = []
        for _ in steps:
            page.keyboard.press("n")
            shown.append(seen.ask("stepguardPage.view.selected.step"))
        assert shown == steps
        page.keyboard.press("p")
        assert seen.ask("stepguardPage.view.selected.step") == steps[-2]
        page.keyboard.press("?")
        assert page.locator("#help").is_visible()
        page.keyboard.press("Escape")
        assert not page.locator("#help").is_visible()
        assert seen.troubles == []


def test_theme_changes_by_key_and_follows_the_system(browser: Any, tmp_path: Path) -> None:
    page = _page(write_run(tmp_path / "run"))
    ground = "getComputedStyle(document.body).backgroundColor"
    with opened(browser, page, color_scheme="light") as seen:
        light = seen.ask(ground)
    with opened(browser, page, color_scheme="dark") as seen:
        assert seen.ask(ground) != light
        seen.page.keyboard.press("t")
        assert seen.ask(ground) == light
        assert seen.troubles == []


def test_dragging_over_a_curve_zooms_and_a_double_click_shows_all(
    browser: Any, rewound_run: Path
) -> None:
    with opened(browser, _page(rewound_run)) as seen:
        whole = seen.view()
        box = seen.page.locator("#panel-loss .u-over").bounding_box()
        middle = box["y"] + box["height"] / 2
        seen.page.mouse.move(box["x"] + box["width"] * 0.25, middle)
        seen.page.mouse.down()
        seen.page.mouse.move(box["x"] + box["width"] * 0.5, middle, steps=4)
        seen.page.mouse.up()
        low, high = seen.view()
        span = whole[1] - whole[0]
        assert (low, high) == pytest.approx((whole[0] + span / 4, whole[0] + span / 2), abs=0.5)
        seen.page.mouse.dblclick(box["x"] + 20, middle)
        assert seen.view() == pytest.approx(whole)


def test_restart_is_a_branch_and_checkpoints_are_marked(browser: Any, tmp_path: Path) -> None:
    run = restarted(tmp_path / "restarted")
    with opened(browser, _page(run)) as seen:
        (branch,) = seen.drawn("loss", "branches")
        assert (branch["kind"], branch["first"], branch["last"]) == ("restart", 24, 29)
        states = {(one["step"], one["state"]) for one in seen.lane("checkpoints")}
        assert {(8, "good"), (16, "good"), (24, "good"), (24, "restored")} <= states
        assert seen.troubles == []


def test_second_run_in_a_folder_shows_nothing_of_the_first(browser: Any, tmp_path: Path) -> None:
    run = fixed(tmp_path / "fixed")
    with opened(browser, _page(run)) as seen:
        assert seen.drawn("loss", "marks") == []
        assert seen.page.locator("#verdict").inner_text() == "ended, no incident"
        seen.page.locator("#chosen-run").select_option("0")
        seen.settle()
        assert [mark["step"] for mark in seen.drawn("loss", "marks")] == [9]
        assert seen.page.locator("#card h2").inner_text() == "Step 9"
        assert seen.troubles == []


def test_part_of_a_step_left_out_is_marked_and_told(browser: Any, tmp_path: Path) -> None:
    run = in_part(tmp_path / "part")
    with opened(browser, _page(run)) as seen:
        assert [mark["step"] for mark in seen.drawn("loss", "marks")] == [12]
        assert [(one["step"], one["state"]) for one in seen.lane("updates")] == [(12, 3)]
        assert "micro-batch" in seen.page.locator("#card .done").inner_text()


def test_each_rank_has_a_lane_and_the_blamed_one_is_marked(browser: Any, tmp_path: Path) -> None:
    run = two_ranks(tmp_path / "ranks")
    with opened(browser, _page(run)) as seen:
        marks = seen.lane("ranks")
        assert [(one["rank"], one["step"], one["blamed"]) for one in marks] == [
            (0, 5, False),
            (1, 5, True),
        ]
        assert seen.troubles == []


@pytest.mark.parametrize("scheme", ["light", "dark"] if FULL else ["dark"])
def test_axe_finds_no_serious_fault(browser: Any, rewound_run: Path, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    with opened(browser, _page(rewound_run), color_scheme=scheme) as seen:
        seen.page.keyboard.press("n")
        found = Axe().run(seen.page).response["violations"]
        serious = [one for one in found if one["impact"] in ("serious", "critical")]
        assert [(one["id"], one["nodes"][0]["html"][:200]) for one in serious] == []


def test_hostile_journal_is_shown_as_text_and_executes_nothing(
    browser: Any, tmp_path: Path
) -> None:
    run = hostile_run(tmp_path / "hostile")
    with opened(browser, _page(run)) as seen:
        seen.page.keyboard.press("n")
        assert seen.ask("globalThis.attacked") is None
        assert seen.page.locator("img, iframe, object, embed").count() == 0
        assert seen.page.locator("script").count() == 2
        text = seen.page.locator("body").inner_text()
        assert "<img src=x onerror=" in text
        assert seen.troubles == []


def test_looks_are_shown_with_their_history(browser: Any, tmp_path: Path) -> None:
    page = _page(silently_wrong(tmp_path / "run"))
    with opened(browser, page, color_scheme="dark") as seen:
        told = seen.ask("[...document.querySelectorAll('#concerns li')].map(i => i.innerText)")
        assert len(told) == 1 and "SG902" in told[0]
        curves = seen.ask("document.querySelectorAll('#looks polyline').length")
        assert curves > 5
        words = seen.ask("document.querySelector('#looks svg').getAttribute('aria-label')")
        assert "at step 2" in words and "at step 8" in words
        seen.page.set_viewport_size({"width": 400, "height": 800})
        seen.settle()
        assert seen.ask("document.documentElement.scrollWidth") == 400
        assert seen.troubles == []


def test_cause_and_fix_stand_on_top_of_the_card(browser: Any, tmp_path: Path) -> None:
    page = _page(_with_a_fix(tmp_path / "run"))
    with opened(browser, page) as seen:
        titles = seen.ask("[...document.querySelectorAll('#card h3')].map(h => h.innerText)")
        assert titles[:4] == ["Cause", "Fix", "What was done", "Where"]
        assert seen.page.locator("#card details").count() == 0
        assert seen.ask("document.getElementById('looks').hidden")
        fix = seen.page.locator("#card .remedy")
        assert fix.locator("pre").inner_text() == "if bad:\n    x = safe_log(x)"
        assert fix.locator("p code").all_inner_texts() == ["safe_log(x)", "x"]
        assert "`" not in seen.page.locator("#card").inner_text()
        assert seen.page.locator("#card .code .hit").inner_text().strip() == "> 7 | y = x.log()"
        style = seen.ask("(s => [s.overflowY, s.maxHeight])(getComputedStyle(card))")
        assert style == ["visible", "none"]
        for width in (1400, 390) if FULL else (390,):
            seen.page.set_viewport_size({"width": width, "height": 844})
            seen.settle()
            assert seen.ask("document.documentElement.scrollWidth") == width
            hidden = "[...card.querySelectorAll('pre')].some(p => p.scrollWidth > p.clientWidth)"
            assert not seen.ask(hidden)
        assert seen.troubles == []


def _with_a_fix(folder: Path) -> Path:
    remedy = Remedy(
        title="`safe_log(x)` where `x` is 0",
        snippet="\n        if bad:\n            x = safe_log(x)\n",
    )
    found = Finding(
        code="SG202",
        title="log of a non-positive value",
        certainty="certain",
        evidence=("`x` spans 0 to 1",),
        remedies=(remedy,),
    )
    lines = ("  6 |         " + "a = " + "b + " * 60 + "c", "> 7 |         y = x.log()")
    place = Origin(step=8, phase="forward", op="aten.log", source="model.py:7", context=lines)
    reading = Reading(step=8, loss=math.nan)
    incident = Incident(
        id="8-0",
        step=8,
        verdict=Verdict(kind="nonfinite_loss", summary="loss is nan"),
        reading=reading,
        origin=place,
        findings=(found,),
        decision=Decision(action="skip", consecutive=1, total=1),
    )
    journal = Journal(folder)
    journal.write("run", {"stepguard": "0"})
    for step in range(8):
        journal.step(Reading(step=step, loss=1.0), committed=True)
    journal.step(reading, committed=False)
    journal.incident(incident)
    journal.close()
    return folder


def test_many_bad_steps_are_shaded_spans(browser: Any, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run")
    journal.write("run", {"stepguard": "0"})
    bad = {*range(400, 500), *range(700, 1380, 20), 1450}
    for step in range(1500):
        loss = math.nan if step in bad else 1.0
        journal.step(Reading(step=step, loss=loss), committed=step not in bad)
    journal.close()
    with opened(browser, _page(tmp_path / "run")) as seen:
        assert len(seen.drawn("loss", "marks")) == 135
        spans = [(one["first"], one["last"], one["count"]) for one in seen.drawn("loss", "spans")]
        assert spans == [(400, 499, 100), (700, 1360, 34)]
        seen.ask("stepguardPage.view.set(700, 900)")
        seen.settle()
        assert len(seen.drawn("loss", "marks")) == 11
        assert seen.drawn("loss", "spans") == []
        assert seen.troubles == []


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
        for step in range(10, 29):
            journal.step(_reading(step), committed=True)
        seen.page.wait_for_selector("body[data-rows='29']")
        assert seen.ask("stepguardPage.panels[0].plot.data[0]") == list(range(29))
        seen.page.keyboard.press("+")
        before = seen.view()
        journal.step(_reading(29), committed=True)
        seen.page.wait_for_selector("body[data-rows='30']")
        assert seen.view() == before, "the view of the user stays"
        seen.page.keyboard.press("0")
        journal.step(replace(_reading(30), loss=NAN), committed=False)
        journal.incident(_incident(30))
        seen.page.wait_for_selector(".incident-dot")
        seen.settle()
        assert [mark["step"] for mark in seen.drawn("loss", "marks")] == [30]
        assert seen.page.locator("#card h2").inner_text() == "Step 30"
        assert seen.ask("stepguardPage.live.rows") == 21
        assert seen.ask("stepguardPage.live.lost") == 0
        assert seen.page.locator("#live-state").inner_text() == "live"
        assert seen.page.locator("#verdict").inner_text() == "running, 1 incident"
        journal.write("end", {})
        seen.page.wait_for_selector("#live-state", state="hidden")
        assert seen.page.locator("#verdict").inner_text() == "ended, 1 incident"
        assert seen.troubles == []
        journal.close()
        with opened(browser, f"{address}runs/run") as again:
            again.page.wait_for_selector("#live-state.good", state="attached")
            assert again.page.locator("#verdict").inner_text() == "ended, 1 incident"
            assert again.page.locator("#live-state").is_hidden(), "what has ended is not live"


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
        for width in (390, 1200) if FULL else (390,):
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


def test_several_optimizers_are_lanes_of_one_page(browser: Any, tmp_path: Path) -> None:
    train_gan(tmp_path / "gan", tmp_path / "gan")
    with opened(browser, _page(tmp_path / "gan")) as seen:
        page = seen.page
        assert page.locator(".lane-run").all_inner_texts() == ["opt_g", "opt_d"]
        assert page.locator("#run-name").inner_text() == "gan"
        assert "bad" in str(page.locator("#verdict").get_attribute("class"))
        assert page.locator("#tiles dt").all_inner_texts() == ["opt_g", "opt_d"]
        assert page.locator("#incident-rows").inner_text().count("opt_d: ") > 0
        assert seen.troubles == []
