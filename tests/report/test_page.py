"""The document of a run's page, its file, and that no text of a journal can leave its place."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import math
import re
import shutil
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from torch import nn
from torch.optim import SGD, Adam
from typer.testing import CliRunner

import stepguard
from cli.journals import write_run
from report.literals import ATTACK, Written, as_json, hostile_run, step_line, told
from report.real_runs import batch, build, silently_wrong
from stepguard.cli.app import app
from stepguard.journal import Journal, runs_below
from stepguard.locate.source import variable_name
from stepguard.records import Decision, Incident, Operand, Origin, Reading, Verdict
from stepguard.report.page import (
    DROPPED,
    FINITE,
    LONGEST_TEXT,
    MINUS_INF,
    MISSING,
    NAN,
    NOT_FINITE,
    PLUS_INF,
    SCRIPTS,
    Folders,
    asset,
    bad_values,
    columns,
    embedded,
    gradient_heat,
    incident_card,
    overview,
    packed,
    policy,
    render_page,
    samples_of,
    story_document,
    tiles,
    verdict,
    version,
)
from stepguard.report.run_report import render_terminal
from stepguard.report.serve import PageProgress, RunFollower
from stepguard.report.story import StoryIncident, read_story
from stepguard.report.summary import summarize

LARGEST_PAGE = 6_000_000


def unpacked(column: dict[str, Any]) -> NDArray[Any]:
    """What `data.js` does."""
    dtype = np.dtype(column["type"]).newbyteorder("<")
    data = zlib.decompress(base64.b64decode(column["data"]))
    by_place = np.frombuffer(data, np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(by_place.T).reshape(-1).view(dtype)


def test_values_that_are_not_finite_or_missing_keep_their_kind() -> None:
    losses = [1.0, np.nan, np.inf, None, -np.inf, None]
    steps = [step_line(step, loss, committed=step != 1) for step, loss in enumerate(losses)]
    found = columns(told(Written(steps=steps)))
    values, kinds = found["loss"]
    assert kinds.tolist() == [FINITE, NAN, PLUS_INF, MISSING, MINUS_INF, MISSING]
    assert values.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert found["state"][0].tolist() == [0, DROPPED, 0, 0, 0, 0]


def test_rows_from_the_middle_leave_out_what_none_of_them_has() -> None:
    steps = [step_line(0, 1.0, scale=2.0), step_line(1, 2.0), step_line(2, np.nan), step_line(3)]
    found = columns(told(Written(steps=steps)), 2)
    assert found["step"][0].tolist() == [2, 3]
    assert found["loss"][0].tolist() == [0.0, 1.0]
    assert found["loss"][1].tolist() == [NAN, FINITE]
    assert "scale" not in found


def test_a_hundred_thousand_steps_of_eight_series_stay_below_six_megabytes() -> None:
    count = 100_000
    noise = np.random.default_rng(0)
    drawn = [noise.lognormal(size=count).astype(np.float32).astype(np.float64) for _ in range(7)]
    drawn.append(1e-3 * (1 + np.cos(np.linspace(0, np.pi, count))))
    finite = np.zeros(count, np.uint8)
    sizes = [len(packed(values, finite)["data"]) for values in drawn]
    assert sum(sizes) < LARGEST_PAGE - 200_000


def test_card_tells_what_where_why_and_what_was_done(tmp_path: Path) -> None:
    (run,) = story_document(read_story(write_run(tmp_path / "run")), "run")["runs"]
    (card,) = run["incidents"]
    assert card["summary"] == "loss is nan"
    assert card["where"]["text"] == "forward: aten._softmax in attn at model.py:88"
    assert card["cause"] == "SG204 softmax over a fully masked row"
    assert card["done"] == "skipped"
    assert card["bad"] == {"loss": 1, "grad_norm": 1}
    assert "stepguard explain SG204" in card["commands"]
    (part,) = run["parts"]
    assert (part["first"], part["last"], part["left"]) == (0, 12, None)
    assert run["looks"] is None
    assert any("SG204" in link["text"] for link in run["chain"])
    times = [link["first"] for link in run["chain"]]
    assert times == sorted(times)
    story = read_story(tmp_path / "run")
    shown = {label: (value, note) for label, value, note in tiles(summarize(story.latest))}
    assert shown["steps committed"] == ("11", "of 12 seen")
    assert shown["updates dropped"] == ("1", "")
    assert shown["loss"] == ("0.9", "best 0.9")
    assert run["verdict"] == {"text": "running, 1 incident", "weight": "note", "over": False}
    row = overview(story)
    assert (row["steps"], row["incidents"], row["last"]) == ("11", "1", "11")


def test_version_changes_with_an_incident_and_not_with_a_row(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write("run", {"stepguard": "0"})
    journal.step(Reading(step=0, loss=1.0), committed=True)
    first = version(read_story(tmp_path).latest)
    journal.step(Reading(step=1, loss=1.0), committed=True)
    assert version(read_story(tmp_path).latest) == first
    journal.note("note", {"step": 1, "kind": "x", "summary": "x"})
    journal.close()
    assert version(read_story(tmp_path).latest) != first


@pytest.mark.slow
def test_hostile_journal_loses_no_row_and_is_not_shown_at_any_length(tmp_path: Path) -> None:
    story = read_story(hostile_run(tmp_path / "run"))
    document = story_document(story, ATTACK, Folders())
    text = json.dumps(document, allow_nan=False)
    assert len(story.latest.steps) == 14
    assert len(text) < 400_000
    assert LONGEST_TEXT < 10_000
    (run,) = document["runs"]
    assert run["unread"] == "not shown, because they cannot be read: 5 lines of the journal"
    assert ATTACK in run["incidents"][0]["where"]["text"]


INCIDENT = Incident(
    id="8-0", step=8, verdict=Verdict(kind="nonfinite_loss"), reading=Reading(step=8)
)
TABLE = {"steps": [7, 8], "modules": ["a", "b", "b.c"], "norms": [[1, 2], [3, "nan"], [1, "inf"]]}


def _heat(folder: Path, table: Any, incident: Incident = INCIDENT) -> dict[str, Any] | None:
    place = folder / "incidents" / "8-0"
    place.mkdir(parents=True, exist_ok=True)
    (place / "gradients.json").write_text(json.dumps(table))
    return gradient_heat(incident, folder)


def test_first_bad_cell_is_that_of_the_origin(tmp_path: Path) -> None:
    assert _heat(tmp_path, TABLE)["first"] == [1, 1]
    born = replace(INCIDENT, origin=Origin(step=8, phase="forward", module="b.c"))
    table = {**TABLE, "modules": ["a", "x", "b.c"]}
    assert _heat(tmp_path, table, born)["first"] == [2, 1]


@pytest.mark.parametrize(
    "table",
    [[], {}, {**TABLE, "norms": [[1]]}, {**TABLE, "steps": ["x"]}, {**TABLE, "norms": 3}],
    ids=["list", "empty", "short", "words", "number"],
)
def test_a_damaged_file_is_no_heat_map(tmp_path: Path, table: Any) -> None:
    assert _heat(tmp_path, table) is None


def test_an_id_that_leads_out_of_the_run_opens_nothing(tmp_path: Path) -> None:
    (tmp_path / "gradients.json").write_text(json.dumps(TABLE))
    assert gradient_heat(replace(INCIDENT, id="../.."), tmp_path / "run") is None
    assert gradient_heat(replace(INCIDENT, id=".."), tmp_path) is None


def test_incident_of_a_real_run_has_the_norms_of_the_steps_before(tmp_path: Path) -> None:
    _, guard, loss_fn = build(tmp_path)
    for number in range(6):
        guard.step(loss_fn, batch(number, bad=number == 5))
    guard.close()
    (incident,) = guard.incidents
    heat = gradient_heat(incident, tmp_path)
    assert heat["steps"] == list(range(6))
    assert heat["modules"] == ["0", "2"]
    assert heat["first"] == [0, 5]
    assert [row[5] for row in heat["values"]] == ["nan", "nan"]
    assert all(isinstance(value, float) for row in heat["values"] for value in row[:5])


def _in_story(incident: Incident) -> StoryIncident:
    return StoryIncident(
        incident=incident, done="dropped", attempt=0, row=3, at=4, order=9, kept=True
    )


def test_operand_is_told_with_the_range_of_its_dtype() -> None:
    operand = Operand(
        name="x",
        dtype="float16",
        shape=(2, 3),
        min=-1.0,
        max=60000.0,
        posinf=1,
        index=(0, 1),
        value=math.inf,
        exponents=((0, 4), (15, 1)),
    )
    origin = Origin(step=1, phase="forward", op="aten.exp", inputs=(operand,))
    reading = Reading(step=1, loss=math.nan)
    verdict = Verdict(kind="nonfinite_loss", summary="loss is nan")
    incident = Incident(id="a", step=1, verdict=verdict, reading=reading, origin=origin)
    (shown,) = incident_card(_in_story(incident))["operands"]
    assert shown["type"] == "float16 2 x 3" and "loss" in bad_values(reading)
    assert shown["bad"] == "1 +Inf of 6"
    assert shown["at"] == "inf at [0,1]"
    assert shown["range"] == {"least": -24, "normal": -14, "most": 16}
    assert shown["exponents"] == [[0, 4], [15, 1]]


def test_card_of_a_rewind_says_where_it_went_and_what_was_not_finite() -> None:
    reading = Reading(
        step=1,
        loss=math.nan,
        components={"a": math.inf, "b": 1.0},
        followed={"kl": -math.inf},
        grad_norm=2.0,
    )
    decision = Decision(action="rewind", rewound_to=24, consecutive=1, total=2)
    bad = Verdict(kind="nonfinite_parameter", summary="bad")
    incident = Incident(id="a", step=1, verdict=bad, reading=reading, decision=decision)
    card = incident_card(_in_story(incident))
    assert card["done"] == "rewound to step 24"
    assert card["where"] is None and card["unplaced"]
    assert card["bad"] == {"loss": NAN, "loss/a": PLUS_INF, "followed/kl": MINUS_INF}


def test_looks_and_what_was_told_are_listed(tmp_path: Path) -> None:
    (run,) = story_document(read_story(silently_wrong(tmp_path / "run")), "run")["runs"]
    ((weight, text),) = run["concerns"]
    assert weight == "note" and text.startswith("step 5: SG902 ")
    section = run["looks"]
    titles = [table["title"] for table in section["tables"]]
    assert titles[:2] == [
        "Room left in the dtype, least first",
        "Updates, the most suspicious first",
    ]
    assert [step for step, _ in section["tables"][1]["rows"][0]["history"]] == [2, 5, 8]
    assert section["remarks"] == ["the step started with the previous step's gradients"]


def _of_capsule(capsule: str | None = "incidents/x/capsule", micro: int = 0) -> Incident:
    return Incident(
        id="x",
        step=1,
        verdict=Verdict(kind="nonfinite_loss"),
        reading=Reading(step=1),
        origin=Origin(step=1, phase="forward", samples=(1,), micro_batch=micro),
        capsule=capsule,
    )


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A kept whose capsule holds pictures, numbers and texts."""
    folder = tmp_path / "kept" / "incidents" / "x" / "capsule"
    folder.mkdir(parents=True)
    picture = np.zeros((2, 3, 8, 10), np.float32)
    picture[1, :, 0, 0] = np.nan
    picture[1, 0, 1, 1] = 1.0
    ids = np.arange(200).reshape(2, 100)
    save_file(
        {"batch/0/picture": picture, "batch/0/ids": ids, "model/w": ids},
        folder / "tensors.safetensors",
    )
    text = {"list": [{"value": "good", "kind": "str"}, {"value": "<b>bad</b>", "kind": "str"}]}
    facts = {"micro_batches": [{"mapping": [["caption", text]], "attributes": False}]}
    (folder / "capsule.json").write_text(json.dumps(facts))
    return tmp_path / "kept"


def test_text_numbers_and_picture_of_the_named_sample_are_shown(kept: Path) -> None:
    text, ids, picture = samples_of(_of_capsule(), kept)
    assert (text["kind"], text["text"]) == ("text", "<b>bad</b>")
    assert ids["text"].startswith("100, 101, 102") and ids["text"].endswith("52 more")
    assert (picture["kind"], picture["width"], picture["height"]) == ("image", 10, 8)
    pixels = np.frombuffer(base64.b64decode(picture["pixels"]), np.uint8).reshape(8, 10, 3)
    assert tuple(pixels[0, 0]) == NOT_FINITE
    assert tuple(pixels[1, 1]) == (255, 0, 0)


def test_a_capsule_outside_of_the_kept_opens_nothing(kept: Path) -> None:
    assert samples_of(_of_capsule("../kept/../../etc"), kept) == []
    inside = kept / "incidents" / "x" / "capsule"
    assert samples_of(_of_capsule(str(inside)), kept / "incidents" / "nothing") == []
    assert samples_of(_of_capsule("a\0b"), kept) == []


def test_damaged_capsule_says_that_it_cannot_be_shown(kept: Path) -> None:
    (kept / "incidents" / "x" / "capsule" / "capsule.json").write_text("[1, 2")
    (shown,) = samples_of(_of_capsule(), kept)
    assert shown["caption"].startswith("sample 1 cannot be shown")


DOCUMENT = {"format": 1, "runs": [], "live": None, "text": ATTACK}


def test_policy_names_the_very_script_and_style_of_the_page() -> None:
    page = render_page(DOCUMENT)
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    for text in (script, style):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in page
    assert "default-src 'none'" in page
    assert "unsafe" not in policy(script, style)
    assert page.count("<script") == page.count("</script") == 2 and ATTACK not in page
    text = embedded(DOCUMENT)
    assert json.loads(text) == DOCUMENT and not set("<>&") & set(text)
    with pytest.raises(ValueError, match="not JSON compliant"):
        embedded({"loss": float("nan")})
    # no network, but for a live page that asks its own server
    assert not re.search(r"""(?:src|href|url)\s*[=(]\s*["']?https?:""", page)
    assert "connect-src" not in page
    assert "connect-src 'self'" in render_page({**DOCUMENT, "live": {"events": "/events/x"}})


def test_every_asset_is_used() -> None:
    import stepguard.report.page as module

    folder = Path(module.__file__).parent / "page"
    used = {*SCRIPTS, "uPlot.min.css", "page.css", "page.html", "uPlot.LICENSE", "list.js"}
    assert {path.name for path in folder.iterdir()} == used
    assert "MIT License" in asset("uPlot.LICENSE") and "v1.6.32" in asset("uPlot.min.js")
    writes_html = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(")
    for name in SCRIPTS[1:]:
        assert len(asset(name).splitlines()) < 400 and not writes_html.search(asset(name))


STEPS, BAD = 12, 6


def update(model: nn.Module, optimizer: Any, *, bad: bool = False) -> None:
    optimizer.zero_grad()
    (model(torch.randn(8, 4)).square().mean() * (torch.nan if bad else 1.0)).backward()
    optimizer.step()


def train_gan(first: Path, second: Path) -> None:
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
    train_gan(folder, folder)
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
    document = story_document(story, "gan")
    assert [run["name"] for run in document["runs"]] == ["opt_g", "opt_d"]
    assert {run["title"] for run in document["runs"]} == {"gan"}
    assert {run["verdict"]["weight"] for run in document["runs"]} == {"bad"}
    text = render_terminal(summary)
    assert "opt_d: non-finite loss" in text and "stopped by its policy" in text
    assert "what led to what: opt_g" in text


def test_live_and_the_list_of_runs_show_the_worst(gan: Path) -> None:
    told = CliRunner().invoke(app, ["live", str(gan), "--once", "--json"])
    assert told.exit_code == 3
    assert json.loads(told.output)["incidents"] > 0
    row = overview(read_story(gan))
    assert row["weight"] == "bad" and row["incidents"] != "0"
    assert list(runs_below(gan.parent)) == ["gan"]


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
    train_gan(tmp_path / "g", tmp_path / "g" / "d")
    assert not read_story(tmp_path / "g").latest.further
    assert read_story(tmp_path / "g").elsewhere == (tmp_path / "g" / "d",)
    assert list(runs_below(tmp_path)) == ["g", "g/d"]


def test_a_second_start_keeps_its_lanes_apart_from_the_first(gan: Path, tmp_path: Path) -> None:
    again = shutil.copytree(gan, tmp_path / "again")
    train_gan(again, again)
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


def test_columns_settings_and_concerns_are_those_that_were_recorded(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write("run", {"torch": ATTACK, "config": {"policy": {"max_total": 3}}})
    for step in range(100):
        reading = Reading(
            step=step,
            loss=1.0 + step % 7 / 10,
            components={"text": 0.5},
            followed={"kl": 0.1},
            grad_norm=2.0,
            clip_factor=0.5,
            scale=1024.0,
            lr=(0.0, 0.0),
            seconds=0.1,
        )
        journal.step(reading, committed=True)
    note = {"kind": "silent", "code": "SG912", "step": 9, "summary": "SG912 learning rate"}
    journal.write("note", note)
    journal.close()
    (run,) = story_document(read_story(tmp_path), "run")["runs"]
    drawn = {"loss", "loss/text", "followed/kl", "grad_norm", "grad_norm_clipped"}
    assert set(run["columns"]) == drawn | {"step", "state", "lr", "lr/1", "scale", "seconds"}
    groups = {group["title"]: group["rows"] for group in run["groups"]}
    assert groups["Configuration"] == [["policy.max_total", "3"]]
    assert ["versions", f"torch {ATTACK}"] in groups["Run facts"]
    assert run["concerns"] == [["note", "step 9: SG912 learning rate"]] and run["looks"] is None


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8])
def test_column_is_read_back_to_the_last_bit(dtype: type[Any]) -> None:
    values = (np.random.default_rng(0).normal(size=257) * 100).astype(dtype)
    column = packed(values, np.zeros(257, np.uint8))
    assert unpacked(column).tobytes() == values.tobytes() and "kinds" not in column
