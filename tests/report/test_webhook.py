"""Alerts by webhook, against a real HTTP server on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import stepguard
from report.endpoint import Endpoint, listening
from scenes import NAN, plain_net
from settings_of import config_of
from stepguard import ConfigError, Guard, Policy, TrainingHalted
from stepguard.engine.protect import SinkDropped
from stepguard.integrations.sinks import WebhookSink
from stepguard.report.sinks import LONGEST, payload


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
