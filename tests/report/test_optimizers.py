"""Several optimizers of one process are one run: a lane for each, the worst state, the sum."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from typer.testing import CliRunner

import stepguard
from browser import opened, started
from report.literals import as_json
from stepguard.cli.app import app
from stepguard.cli.runs import report_page
from stepguard.journal import runs_below
from stepguard.locate.source import variable_name
from stepguard.report.page import overview, story_document, verdict
from stepguard.report.run_report import render_markdown, render_terminal
from stepguard.report.serve import PageProgress, RunFollower
from stepguard.report.story import read_story
from stepguard.report.summary import summarize

STEPS, BAD = 12, 6


def update(model: nn.Module, optimizer: Any, *, bad: bool = False) -> None:
    optimizer.zero_grad()
    (model(torch.randn(8, 4)).square().mean() * (torch.nan if bad else 1.0)).backward()
    optimizer.step()


def train(first: Path, second: Path) -> None:
    """A GAN whose second optimizer gets a NaN in the middle, and is stopped by its policy."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 1), nn.Linear(4, 1)
    opt_g, opt_d = Adam(generator.parameters()), SGD(critic.parameters(), lr=0.1)
    policy = stepguard.Policy(max_consecutive=2)
    configs = [
        stepguard.GuardConfig(run_dir=folder, terminal="quiet", policy=policy)
        for folder in (first, second)
    ]
    with (
        stepguard.watch(generator, opt_g, config=configs[0]),
        stepguard.watch(critic, opt_d, config=configs[1]),
        pytest.raises(stepguard.TrainingHalted),
    ):
        for step in range(STEPS):
            update(critic, opt_d, bad=step >= BAD)
            update(generator, opt_g)


@pytest.fixture(scope="module")
def gan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "gan"
    train(folder, folder)
    return folder


def test_the_run_has_a_lane_for_each_optimizer_named_as_in_the_script(gan: Path) -> None:
    run = read_story(gan).latest
    assert [lane.name for lane in run.lanes] == ["opt_g", "opt_d"]
    assert [bool(lane.incidents) for lane in run.lanes] == [False, True]
    assert verdict(run)["weight"] == "bad"
    assert verdict(run)["text"].startswith("stopped by its policy, ")


def test_the_report_counts_the_incidents_of_all_optimizers(gan: Path) -> None:
    story = read_story(gan)
    summary = summarize(story.latest, story)
    told = json.loads(as_json(summary))
    assert told["state"] == "stopped"
    assert told["incidents"] == sum(len(lane.incidents) for lane in story.latest.lanes) > 0
    assert [lane["name"] for lane in told["optimizers"]] == ["opt_g", "opt_d"]
    assert {group["optimizer"] for group in told["groups"]} == {"opt_d"}
    for text in (render_terminal(summary), render_markdown(summary)):
        assert "opt_d: non-finite loss" in text
        assert "stopped by its policy" in text
        assert "hat led to what: opt_g" in text


def test_live_and_the_list_of_runs_show_the_worst(gan: Path) -> None:
    told = CliRunner().invoke(app, ["live", str(gan), "--once", "--json"])
    assert told.exit_code == 3
    assert json.loads(told.output)["incidents"] > 0
    row = overview(read_story(gan))
    assert row["weight"] == "bad" and row["incidents"] != "0"
    assert list(runs_below(gan.parent)) == ["gan"]


def test_the_page_has_a_lane_for_each_and_the_state_of_the_run(gan: Path) -> None:
    document = story_document(read_story(gan), "gan")
    assert [run["name"] for run in document["runs"]] == ["opt_g", "opt_d"]
    assert {run["title"] for run in document["runs"]} == {"gan"}
    assert {run["verdict"]["weight"] for run in document["runs"]} == {"bad"}


def test_a_live_page_follows_each_lane_and_is_made_anew_for_another(gan: Path) -> None:
    async def ask(place: PageProgress, lane: int) -> Any:
        return await RunFollower(gan, "gan").since(place, "0", lane)

    place, message = asyncio.run(ask(PageProgress(1, 0, ""), 1))
    assert message["count"] == len(read_story(gan).latest.lanes[1].steps)
    assert message["facts"]["name"] == "opt_d"
    assert asyncio.run(ask(place, 1)) is None
    before = PageProgress(1, place.rows, f"{place.version.rpartition('-')[0]}-1")
    assert asyncio.run(ask(before, 1))[1] == {}


def test_guards_with_folders_of_their_own_are_two_runs(tmp_path: Path) -> None:
    train(tmp_path / "g", tmp_path / "g" / "d")
    assert not read_story(tmp_path / "g").latest.further
    assert read_story(tmp_path / "g").elsewhere == (tmp_path / "g" / "d",)
    assert list(runs_below(tmp_path)) == ["g", "g/d"]


def test_a_second_start_keeps_its_lanes_apart_from_the_first(gan: Path, tmp_path: Path) -> None:
    again = shutil.copytree(gan, tmp_path / "again")
    train(again, again)
    runs = read_story(again).runs
    assert [[len(lane.attempts) for lane in run.lanes] for run in runs] == [[1, 1], [1, 1]]


class Trainer:
    def __init__(self) -> None:
        self.opt_actor = SGD(nn.Linear(1, 1).parameters(), lr=0.1)

    def name(self) -> str | None:
        return variable_name(self.opt_actor)


opt_global = SGD(nn.Linear(1, 1).parameters(), lr=0.1)


def test_an_optimizer_is_known_by_variable_attribute_or_global_name() -> None:
    local = SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    assert variable_name(local) == "local"
    assert Trainer().name() == "opt_actor"
    assert variable_name(opt_global) == "opt_global"
    assert variable_name(SGD(nn.Linear(1, 1).parameters(), lr=0.1)) is None


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with started() as found:
        yield found


@pytest.mark.process
def test_the_page_in_a_browser_names_both(browser: Any, gan: Path) -> None:
    path = gan / "report.html"
    path.write_text(report_page(gan, None), encoding="utf-8")
    with opened(browser, path) as shown:
        page = shown.page
        assert page.locator(".lane-run").all_inner_texts() == ["opt_g", "opt_d"]
        assert page.locator("#run-name").inner_text() == "gan"
        assert "bad" in str(page.locator("#verdict").get_attribute("class"))
        assert page.locator("#tiles dt").all_inner_texts() == ["opt_g", "opt_d"]
        assert page.locator("#incident-rows").inner_text().count("opt_d: ") > 0
        assert shown.troubles == []
