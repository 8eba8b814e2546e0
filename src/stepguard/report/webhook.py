"""Alerts by webhook: incidents, stops and faults as Slack-shaped JSON.

Messages are sent by a thread of their own, so a slow or dead endpoint costs training nothing: the
queue is bounded, every request has a time-out, and the first failure ends the sink with one line.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Mapping
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from stepguard._errors import ConfigError, StepguardError
from stepguard.records import Incident, Sink
from stepguard.report import messages

WAITING = 64
"""Messages that may wait to be sent; more are counted and left out."""
LONGEST = 2900
"""Characters of a message: Slack refuses a section of more than 3000."""
LARGEST_ANSWER = 1 << 16
"""Bytes of an answer that are read; nothing in it is used."""
SPECIAL = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
"""Slack reads these as markup."""


class WebhookFailed(StepguardError):  # noqa: N818 (an outcome, like SaveRefused)
    """An alert could not be delivered. The address is a secret, and not part of the message."""


class _NoRedirects(HTTPRedirectHandler):
    """An alert goes to the given host only: a redirect is a failure with its status."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class WebhookSink(Sink):
    """Posts `{"text": ..., "blocks": [...]}` to `url`: Slack, Mattermost, Discord with `/slack`.

    Sent are the 1st, 2nd, 4th, 8th, ... incident of the run, a stop, and a guard that disarms
    itself. `name` says which run speaks.
    """

    def __init__(self, url: str, *, name: str = "stepguard", timeout: float = 5.0) -> None:
        plain = isinstance(url, str) and url.isascii() and url.isprintable() and " " not in url
        parts = urlsplit(url) if plain else None
        if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                "WebhookSink: url must be an address such as https://hooks.slack.com/services/..., "
                "without blanks."
            )
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout <= 0:
            raise ConfigError(
                f"WebhookSink: timeout={timeout!r} must be a number of seconds above 0."
            )
        self._url = url
        self._host = parts.hostname
        self._name = name
        self._timeout = float(timeout)
        self._incidents = 0
        self._left_out = 0
        self._waiting: queue.Queue[str | None] = queue.Queue(WAITING)
        self._thread: threading.Thread | None = None
        self._fault: WebhookFailed | None = None

    def incident(self, incident: Incident) -> None:
        self._incidents += 1
        if self._incidents & (self._incidents - 1) == 0:
            counted = f"incident {self._incidents}" if self._incidents > 1 else ""
            self._post(messages.incident_line(incident, counted))

    def halted(self, incident: Incident, exit_line: str) -> None:
        self._post(f"{messages.stopping(incident)}\n{exit_line}")

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "fault":
            self._post(messages.disarmed(fields))

    def close(self) -> None:
        """Let the thread send what waits, for at most the time-out."""
        thread = self._thread
        self._thread = None
        if thread is not None:
            try:
                self._waiting.put(None, timeout=self._timeout)
            except queue.Full:
                pass  # the endpoint hangs; the thread ends with the process
            else:
                thread.join(self._timeout)
        self._raise_fault()

    def _post(self, text: str) -> None:
        self._raise_fault()
        if self._thread is None:
            # A daemon: an endpoint that hangs must not keep the process alive.
            self._thread = threading.Thread(
                target=self._send_all, name="stepguard-webhook", daemon=True
            )
            self._thread.start()
        try:
            self._waiting.put_nowait(text)
        except queue.Full:
            self._left_out += 1

    def _raise_fault(self) -> None:
        """Tell a failure of the thread where it is heard: the guard drops the sink with a line."""
        fault = self._fault
        self._fault = None
        if fault is not None:
            raise fault

    def _send_all(self) -> None:
        while (text := self._waiting.get()) is not None:
            if self._left_out:
                text += f"\n({self._left_out} messages before this one were left out)"
                self._left_out = 0
            try:
                self._send(text)
            except Exception as error:
                # Type and status only: the text of an error may hold the address, a secret.
                why = type(error).__name__
                if isinstance(error, HTTPError):
                    why += f", status {error.code}"
                    error.close()
                elif isinstance(reason := getattr(error, "reason", None), Exception):
                    why += f" ({type(reason).__name__})"
                self._fault = WebhookFailed(f"{self._host} did not take an alert: {why}")
                return

    def _send(self, text: str) -> None:
        body = json.dumps(payload(f"{self._name}: {text}")).encode()
        request = Request(self._url, body, {"Content-Type": "application/json"})
        with build_opener(_NoRedirects).open(request, timeout=self._timeout) as answer:
            answer.read(LARGEST_ANSWER)

    def __repr__(self) -> str:
        return f"WebhookSink({self._host})"


def payload(text: str) -> dict[str, Any]:
    """One message as Slack takes it: plain text for notifications, a block to read."""
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]}..."
    for character, written in SPECIAL.items():
        text = text.replace(character, written)
    block = {"type": "section", "text": {"type": "mrkdwn", "text": text}}
    return {"text": text, "blocks": [block]}
