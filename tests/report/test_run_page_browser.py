"""The page of a run in a real browser: what is drawn is what the journal says."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import OpenPage, opened, started
from cli.journals import run_stepguard, write_run
from report.hostile import hostile_run
from report.real_runs import fixed, in_part, restarted, rewound, silently_wrong
from report.two_ranks import two_ranks
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


def test_steps_of_the_kept_line_rise(browser: Any, rewound_run: Path) -> None:
    with opened(browser, _page(rewound_run)) as seen:
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


@pytest.mark.parametrize("scheme", ["light", "dark"])
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


def test_theme_changes_by_key_and_follows_the_system(browser: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with opened(browser, _page(run), color_scheme="dark") as seen:
        dark = seen.ask("getComputedStyle(document.body).backgroundColor")
        seen.page.keyboard.press("t")
        light = seen.ask("getComputedStyle(document.body).backgroundColor")
        assert dark != light
        assert seen.troubles == []


def test_two_runs_are_drawn_over_one_axis(browser: Any, rewound_run: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other")
    seen = run_stepguard("compare", str(other), str(rewound_run), "--html")
    assert seen.returncode == 0, seen.stderr
    with opened(browser, rewound_run / "compare.html") as page:
        runs = {mark["run"] for mark in page.drawn("loss", "marks")}
        assert runs == {0, 1}
        assert [mark["step"] for mark in page.drawn("loss", "marks") if mark["run"] == 0] == [8]
        table = page.page.locator("#comparison").inner_text()
        assert "bad steps" in table and "other" in table and "rewound" in table
        assert page.troubles == []


def test_looks_are_shown_with_their_history(browser: Any, tmp_path: Path) -> None:
    page = _page(silently_wrong(tmp_path / "run"))
    with opened(browser, page, color_scheme="dark") as seen:
        told = seen.ask("[...document.querySelectorAll('#looks .silent li')].map(i => i.innerText)")
        assert len(told) == 1 and "SG902" in told[0]
        curves = seen.ask("document.querySelectorAll('#looks polyline').length")
        assert curves > 5
        words = seen.ask("document.querySelector('#looks svg').getAttribute('aria-label')")
        assert "at step 2" in words and "at step 8" in words
        seen.page.set_viewport_size({"width": 400, "height": 800})
        seen.settle()
        assert seen.ask("document.documentElement.scrollWidth") == 400
        assert seen.troubles == []


def test_run_without_looks_has_no_section_of_them(browser: Any, tmp_path: Path) -> None:
    with opened(browser, _page(write_run(tmp_path / "run"))) as seen:
        assert seen.ask("document.getElementById('looks').hidden")


def test_cause_and_fix_stand_on_top_of_the_card(browser: Any, tmp_path: Path) -> None:
    page = _page(_with_a_fix(tmp_path / "run"))
    with opened(browser, page) as seen:
        titles = seen.ask("[...document.querySelectorAll('#card h3')].map(h => h.innerText)")
        assert titles[:4] == ["Cause", "Fix", "What was done", "Where"]
        assert seen.page.locator("#card details").count() == 0
        fix = seen.page.locator("#card .remedy")
        assert fix.locator("pre").inner_text() == "if bad:\n    x = safe_log(x)"
        assert fix.locator("p code").all_inner_texts() == ["safe_log(x)", "x"]
        assert "`" not in seen.page.locator("#card").inner_text()
        assert seen.page.locator("#card .code .hit").inner_text().strip() == "> 7 | y = x.log()"
        style = seen.ask("(s => [s.overflowY, s.maxHeight])(getComputedStyle(card))")
        assert style == ["visible", "none"]
        for width in (1400, 390):
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
