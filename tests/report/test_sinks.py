"""The readable log, records of `logging`, alerts by webhook, and a step as named numbers."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import forked
import stepguard
from report.literals import BARE, INF, MASKED_ROW, NAN, masked_row, note
from report.served import Endpoint, listening
from scenes import plain_net
from settings_of import config_of
from stepguard import ConfigError, Guard, Policy, TrainingHalted
from stepguard.engine.protect import SinkDropped
from stepguard.integrations.sinks import WebhookSink
from stepguard.records import Decision, Reading, Verdict
from stepguard.report.sinks import (
    LOGGER,
    LONGEST,
    NONFINITE,
    SKIPPED,
    HumanLog,
    LoggingSink,
    finite_only,
    payload,
    scalars,
    step_line,
)

NOON = datetime(2026, 3, 1, 12, 0, 5)
SNIPPET = """
import json
losses = []
with open('training_log.jsonl') as f:
    for line in f:
        losses.append(json.loads(line)['loss'])
import matplotlib.pyplot as plt
plt.plot(losses)
plt.yscale('log')
plt.savefig('loss_curve.png')
"""
"""Taken word for word from the report that asks for this file."""


def noon() -> datetime:
    return NOON


def reading(step: int, loss: float | None = 2.3412) -> Reading:
    return Reading(step=step, loss=loss, grad_norm=0.91, lr=(1e-4,), seconds=0.21)


def test_step_is_one_line_with_its_numbers() -> None:
    assert step_line(reading(12)) == "step 12 loss 2.3412 grad_norm 0.91 lr 1.00e-04 0.21s"
    assert step_line(Reading(step=3)) == "step 3"
    assert step_line(Reading(step=3, loss=NAN, grad_norm=INF), committed=False) == (
        "step 3 loss nan grad_norm inf (not committed)"
    )
    assert step_line(Reading(step=3, grad_norm=1e-5)) == "step 3 grad_norm 1.00e-05"


def test_files_have_the_names_people_tail(tmp_path: Path) -> None:
    with HumanLog(tmp_path / "train_logs", 0, clock=noon) as log:
        log.step(reading(0))
        # read while the log is open: every line is flushed
        assert (tmp_path / "train_logs/latest.log").read_text().startswith("step 0 loss 2.3412")
    assert sorted(path.name for path in (tmp_path / "train_logs").iterdir()) == [
        "latest.log",
        "train_20260301-120005.log",
        "training_log.jsonl",
    ]
    assert (tmp_path / "train_logs/latest.log").readlink() == Path("train_20260301-120005.log")


def test_latest_names_the_newest_run_and_old_logs_stay(tmp_path: Path) -> None:
    for loss in (1.0, 2.0):
        with HumanLog(tmp_path, 0, clock=noon) as log:
            log.step(reading(0, loss))
    assert (tmp_path / "latest.log").readlink() == Path("train_20260301-120005-2.log")
    assert (tmp_path / "latest.log").read_text().startswith("step 0 loss 2.0000")
    assert (tmp_path / "train_20260301-120005.log").read_text().startswith("step 0 loss 1.0000")
    assert len((tmp_path / "training_log.jsonl").read_text().splitlines()) == 2


def test_invalid_loss_is_an_error_with_its_parts(tmp_path: Path) -> None:
    with HumanLog(tmp_path, 0) as log:
        log.incident(MASKED_ROW)
    assert (tmp_path / "latest.log").read_text().splitlines() == [
        "ERROR: Invalid loss at step 48: nan",
        "  text_loss: nan",
        "  latent_loss: 0.4123",
        "  loss is nan (text_loss)",
        "  origin: forward aten._softmax in encoder.layers.3.attn at model.py:88, sample 5",
        "  output: float32 [8,4,16,16]; nan at [5,0]; 1,024 NaN of 8,192; finite 0 to 1",
        "  cause: SG204 softmax over a fully masked row",
        "  lr: 0.000492 / 0.0001",
        "Skipping batch and resetting gradients",
        "  1 in a row, 1 in this run",
    ]


def test_bad_gradient_norm_is_an_error_in_both_wordings(tmp_path: Path) -> None:
    bad = replace(BARE, reading=Reading(step=7, grad_norm=INF), decision=Decision(action="skip"))
    with HumanLog(tmp_path, 0) as log:
        log.incident(bad)
    lines = (tmp_path / "latest.log").read_text().splitlines()
    assert lines[:2] == [
        "ERROR: NaN/Inf gradient norm at step 7",
        "ERROR: Invalid gradient norm: inf",
    ]
    assert "Skipping batch and resetting gradients" in lines


def test_stop_says_that_training_stops(tmp_path: Path) -> None:
    with HumanLog(tmp_path, 0) as log:
        log.incident(masked_row(9, "stop"))
    assert "Stopping training to prevent corruption..." in (tmp_path / "latest.log").read_text()


def test_healthy_run_has_no_error_line(tmp_path: Path) -> None:
    with HumanLog(tmp_path, 0) as log:
        for step in range(5):
            log.step(reading(step))
        log.note("note", note("scale_calibration", "GradScaler calibration", 5))
        log.note("end", {"steps": 5})
        text = (tmp_path / "latest.log").read_text()
        assert "ERROR" not in text
        assert text.endswith("note at step 5: loss-scale calibration: GradScaler calibration\n")
        log.note("fault", {"step": 5, "error": "RuntimeError: boom"})
    assert (
        (tmp_path / "latest.log")
        .read_text()
        .endswith(
            "ERROR: the guard failed and is disarmed; training continues unguarded: "
            "RuntimeError: boom\n"
        )
    )


def test_every_step_is_a_strict_json_object_with_a_loss(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    with HumanLog(tmp_path, 0, clock=noon) as log:
        for step, loss in enumerate((2.5, NAN, INF, None)):
            log.step(
                replace(reading(step, loss), components={"text_loss": NAN}), committed=loss == 2.5
            )
    lines = (tmp_path / "training_log.jsonl").read_text().splitlines()
    objects = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [line["loss"] for line in objects] == [2.5, None, None, None]
    assert [line.get("loss_kind") for line in objects] == [None, "nan", "inf", None]
    assert objects[0]["committed"] is True and objects[1]["committed"] is False
    assert objects[0]["time"] == "2026-03-01T12:00:05"


def test_snippet_of_the_report_works_word_for_word(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with HumanLog(tmp_path, 0) as log:
        for step, loss in enumerate((2.5, NAN, 1.5, INF, 1.0)):
            log.step(reading(step, loss))
    env = {**os.environ, "MPLBACKEND": "Agg"}
    forked.python(["-c", SNIPPET], folder=tmp_path, variables=env).check_returncode()
    assert (tmp_path / "loss_curve.png").read_bytes().startswith(b"\x89PNG")


def test_lines_survive_a_killed_process(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from stepguard.records import Reading\n"
        "from stepguard.report import HumanLog\n"
        "log = HumanLog(sys.argv[1], 0)\n"
        "for step in range(3): log.step(Reading(step=step, loss=1.0))\n"
        "os._exit(9)\n"
    )
    done = forked.python(["-c", code, str(tmp_path)])
    assert done.returncode == 9
    assert len((tmp_path / "latest.log").read_text().splitlines()) == 3
    assert len((tmp_path / "training_log.jsonl").read_text().splitlines()) == 3


class Records(logging.Handler):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(record)


@pytest.fixture
def handler() -> Iterator[Records]:
    """A handler of the logger `stepguard` itself, which logs from INFO on."""
    added = Records()
    before = LOGGER.level
    LOGGER.addHandler(added)
    LOGGER.setLevel(logging.INFO)
    yield added
    LOGGER.removeHandler(added)
    LOGGER.setLevel(before)


def _everything(sink: LoggingSink) -> None:
    sink.note("note", note("tracing", "tracing the next steps", 1))
    sink.note("note", note("spike", "the loss jumped", 2))
    sink.note("note", note("save-refused", "not saved", 3))
    sink.note("end", {"steps": 4})
    sink.incident(MASKED_ROW)
    sink.halted(masked_row(52, "stop"), "stepguard-exit: step=52")
    sink.note("fault", {"step": 5, "error": "RuntimeError: boom"})


@pytest.mark.parametrize("propagate", [True, False])
def test_levels_say_how_bad_it_is(handler: Records, propagate: bool) -> None:
    _everything(LoggingSink(propagate=propagate))
    assert [(record.levelname, record.kind) for record in handler.kept] == [  # type: ignore[attr-defined]
        ("INFO", "tracing"),
        ("WARNING", "spike"),
        ("WARNING", "save-refused"),
        ("WARNING", "nonfinite_loss"),
        ("ERROR", "halted"),
        ("ERROR", "halted"),
        ("ERROR", "fault"),
    ]
    assert handler.kept[3].getMessage() == (
        "step 48 skipped: loss is nan (text_loss); aten._softmax in encoder.layers.3.attn at "
        "model.py:88; sample 5; SG204"
    )
    assert handler.kept[3].step == 48  # type: ignore[attr-defined]
    LoggingSink(propagate=propagate).incident(BARE)
    assert handler.kept[-1].getMessage() == f"step 7 is bad: {BARE.verdict.summary}"


def test_root_handlers_get_messages_only_in_place_of_the_terminal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        _everything(LoggingSink(propagate=False))
        assert caplog.records == []
        _everything(LoggingSink(propagate=True))
        assert len(caplog.records) == 7


def test_level_and_filters_of_the_logger_hold_for_its_own_handlers(handler: Records) -> None:
    handler.setLevel(logging.ERROR)
    only_faults = logging.Filter()
    only_faults.filter = lambda record: record.kind == "fault"  # type: ignore[assignment,attr-defined,method-assign]
    LOGGER.addFilter(only_faults)
    try:
        _everything(LoggingSink(propagate=False))
    finally:
        LOGGER.removeFilter(only_faults)
    assert [record.levelname for record in handler.kept] == ["ERROR"]


def test_message_names_its_guard_where_there_are_several(handler: Records) -> None:
    LoggingSink(propagate=False, whose=lambda: "optimizer 1").note("note", note("veto", "no", 1))
    assert handler.kept[0].getMessage() == "(optimizer 1) step 1: no"


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with listening() as server:
        yield server


def train(sink: WebhookSink, bad: range, steps: int = 12, **settings: Any) -> Guard:
    """A run whose `bad` steps are NaN."""
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    config = config_of(terminal="quiet", locate=False, sinks=(sink,), **settings)
    with stepguard.Guard(model, optimizer, config=config) as guard:
        size = next(model.parameters()).shape[1]
        for step in range(steps):
            guard.step(loss_fn, torch.full((2, size), NAN if step in bad else 1.0))
    return guard


def test_incidents_arrive_as_slack_wants_them_and_ever_rarer(endpoint: Endpoint) -> None:
    guard = train(WebhookSink(endpoint.url, name="nightly"), range(2, 11))
    assert len(guard.incidents) == 9
    texts = [message["text"] for message in endpoint.got]
    assert [text.split(":")[0] for text in texts] == ["nightly"] * 4
    assert texts[0].startswith("nightly: step 2 ")
    assert "(incident 8)" in texts[-1]
    for message in endpoint.got:
        assert set(message) == {"text", "blocks"}
        assert message["blocks"][0]["text"] == {"type": "mrkdwn", "text": message["text"]}


def test_stop_is_told_always(endpoint: Endpoint) -> None:
    with pytest.raises(TrainingHalted):
        train(WebhookSink(endpoint.url), range(2, 9), policy=Policy(max_consecutive=2))
    assert "Stopping training" in endpoint.got[-1]["text"]
    assert "HALTED step=" in endpoint.got[-1]["text"]


@pytest.mark.filterwarnings("always::stepguard.engine.protect.SinkDropped")
def test_endpoint_that_refuses_costs_one_line_without_its_address(endpoint: Endpoint) -> None:
    endpoint.status = 404
    with pytest.warns(SinkDropped) as caught:
        guard = train(WebhookSink(endpoint.url), range(2, 11))
    (line,) = [str(one.message) for one in caught]
    assert "WebhookSink(127.0.0.1) failed and is dropped" in line
    assert "HTTPError, status 404" in line and "SECRET" not in line
    assert len(guard.incidents) == 9 and guard.armed


@pytest.mark.filterwarnings("always::stepguard.engine.protect.SinkDropped")
def test_redirect_is_not_followed_and_told_without_addresses(endpoint: Endpoint) -> None:
    with listening() as other:
        endpoint.status = 307
        endpoint.redirect = other.url
        with pytest.warns(SinkDropped) as caught:
            train(WebhookSink(endpoint.url), range(2, 4))
        assert other.got == []
    (line,) = [str(one.message) for one in caught]
    assert "HTTPError, status 307" in line and "SECRET" not in line


def test_long_answer_is_not_read(endpoint: Endpoint) -> None:
    endpoint.answer = 300 << 20
    guard = train(WebhookSink(endpoint.url), range(2, 3))
    assert guard.armed and endpoint.sent < 16 << 20


def test_endpoint_that_is_not_there_costs_one_line() -> None:
    server = Endpoint()
    url = server.url
    server.server_close()
    with pytest.warns(SinkDropped, match=r"URLError \(ConnectionRefusedError\)"):
        guard = train(WebhookSink(url), range(2, 4))
    assert guard.armed


def test_endpoint_that_hangs_never_holds_training_back(endpoint: Endpoint) -> None:
    """Training ends while the first request still waits for its answer."""
    endpoint.open.clear()
    sink = WebhookSink(endpoint.url, timeout=0.05)
    with pytest.warns(SinkDropped, match="TimeoutError"):
        guard = train(sink, range(2, 11))
    assert len(guard.incidents) == 9 and endpoint.got == []


def test_queue_is_bounded_and_what_is_left_out_is_counted(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepguard.report.sinks.WAITING", 2)
    endpoint.open.clear()
    sink = WebhookSink(endpoint.url, timeout=30.0)
    for number in range(20):
        sink.note("fault", {"error": f"number {number}"})
    assert sink._waiting.qsize() <= 2
    endpoint.open.set()
    sink.close()
    assert 2 <= len(endpoint.got) <= 3
    assert any("messages before this one were dropped" in one["text"] for one in endpoint.got)


def test_text_is_no_markup_and_not_too_long() -> None:
    assert payload("<!channel> & <a>")["text"] == "&lt;!channel&gt; &amp; &lt;a&gt;"
    assert len(payload("x" * 9000)["text"]) == LONGEST + 3


@pytest.mark.parametrize("url", ["", "hooks.slack.com/x", "file:///etc/passwd", "ftp://a/b", 3])
def test_address_that_is_none_is_refused(url: Any) -> None:
    with pytest.raises(ConfigError, match="url must be an address"):
        WebhookSink(url)
    with pytest.raises(ConfigError, match="timeout=0"):
        WebhookSink("https://a/b", timeout=0)


HEALTHY: dict[str, Any] = {
    "step": 7,
    "loss": 2.0,
    "micro_losses": (2.0,),
    "grad_norm": 0.5,
    "lr": (1e-3, 1e-4),
}


@pytest.mark.parametrize(
    "trouble",
    [
        {"loss": math.nan},
        {"loss": -math.inf},
        {"micro_losses": (2.0, math.nan)},
        {"components": {"mse": math.inf}},
        {"grad_norm": math.inf},
        {"lr": (math.nan,)},
        {"grads_finite": False},
        {"bad_state": ("param:weight",)},
    ],
    ids=lambda trouble: next(iter(trouble)),
)
def test_whatever_is_non_finite_raises_the_companion(trouble: dict[str, Any]) -> None:
    values = scalars(Reading(**{**HEALTHY, **trouble}), committed=False)
    assert (values[NONFINITE], values[SKIPPED]) == (1.0, 1.0)
    stored = finite_only(values)
    assert stored[NONFINITE] == 1.0 and all(map(math.isfinite, stored.values()))
    assert scalars(Reading(**HEALTHY, components={"mse": 1.5}), committed=True) == {
        "stepguard/loss": 2.0,
        "stepguard/loss/mse": 1.5,
        "stepguard/grad_norm": 0.5,
        "stepguard/lr": 1e-3,
        "stepguard/lr/1": 1e-4,
        NONFINITE: 0.0,
        SKIPPED: 0.0,
    }


@pytest.mark.parametrize("before", [b"", b"whole\n", b"whole\ntorn", b"torn", b"a\n" + b"b" * 9000])
def test_half_a_line_of_a_crash_is_dropped_before_the_next_run(
    tmp_path: Path, before: bytes
) -> None:
    steps = tmp_path / "training_log.jsonl"
    steps.write_bytes(before)
    with HumanLog(tmp_path, 0) as log:
        log.step(reading(2))
    whole = before[: before.rfind(b"\n") + 1]
    assert steps.read_bytes().startswith(whole + b'{"step":2')


def test_every_incident_starts_with_error_and_other_ranks_write_nothing(tmp_path: Path) -> None:
    for kind in ("nonfinite_parameter", "spike", "drift", "nonfinite_buffer", "scaler_collapse"):
        verdict = Verdict(kind=kind, severity="incident", summary="what is wrong")  # type: ignore[arg-type]
        with HumanLog(tmp_path / kind, 0) as log, HumanLog(tmp_path / "other", 1) as other:
            log.incident(replace(BARE, verdict=verdict))
            other.incident(MASKED_ROW)
            other.step(reading(0))
        text = (tmp_path / kind / "latest.log").read_text()
        assert text.startswith("ERROR: ") and "at step 7" in text and "  what is wrong" in text
    assert not (tmp_path / "other").exists()
