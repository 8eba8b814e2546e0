"""A log for `tail -f` and grep, and one JSON object a step for a quick plot.

`train_<time>.log` is this run's log, `latest.log` a link to the newest, `training_log.jsonl`
continues over restarts. Every line is written out before the next step starts, so a crash can lose
at most the line being written.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from stepguard._errors import ConfigError, StepguardError
from stepguard.records import Incident, Reading, Sink
from stepguard.records.codec import LineFile, dumps
from stepguard.records.incident import place
from stepguard.report import phrases

# --- A log for `tail -f` and grep, and one JSON object a step for a quick plot.


LATEST = "latest.log"
STEPS = "training_log.jsonl"
STAMP = "%Y%m%d-%H%M%S"

_LOSS_KINDS = ("nonfinite_loss", "nonfinite_input")
_GRADIENT_KINDS = ("nonfinite_gradient", "infinite_norm", "scaler_collapse")


class HumanLog(Sink):
    """Written by rank 0; on other ranks every method does nothing (their journals have it all)."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        rank: int = 0,
        *,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.folder = Path(folder)
        self._clock = clock
        self._log: LineFile | None = None
        self._steps: LineFile | None = None
        if rank != 0:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        stamp = f"train_{clock().strftime(STAMP)}"
        self.path = self.folder / f"{stamp}.log"
        for number in count(2):
            # Two runs that start within one second do not write into the same file.
            if not self.path.exists():
                break
            self.path = self.folder / f"{stamp}-{number}.log"
        self._log = LineFile(self.path)
        point_link(self.folder / LATEST, self.path.name)
        drop_torn_line(self.folder / STEPS)
        self._steps = LineFile(self.folder / STEPS)

    def step(self, reading: Reading, committed: bool = True) -> None:
        """One line a step, and one JSON object whose `loss` is null where it is not finite."""
        self.line(step_line(reading, committed=committed))
        if self._steps is None:
            return
        named = {"components": reading.components, "followed": reading.followed}
        fields = {
            "step": reading.step,
            "loss": reading.loss,
            **{name: values for name, values in named.items() if values},
            "grad_norm": reading.grad_norm,
            "lr": list(reading.lr),
            "seconds": reading.seconds,
            "committed": committed,
            "time": self._clock().isoformat(timespec="seconds"),
        }
        self._steps.append((dumps(fields) + "\n").encode())

    def incident(self, incident: Incident) -> None:
        """The ERROR lines: what is invalid, its parts, where and why, and what is done about it."""
        for text in error_lines(incident):
            self.line(text)

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Write one line; other lines of the journal than notes and faults are for programs."""
        if kind == "fault":
            self.line(phrases.message(kind, fields))
        elif kind == "note":
            title = phrases.verdict_title(str(fields.get("kind")))
            self.line(f"note at step {fields.get('step')}: {title}: {fields.get('summary')}")

    def line(self, text: str) -> None:
        """Any line, for instance `Checking model parameters before epoch 15...`."""
        if self._log is not None:
            self._log.append((text.replace("\n", "\n  ") + "\n").encode(errors="replace"))

    def close(self) -> None:
        for file in (self._log, self._steps):
            if file is not None:
                file.close()
        self._log = self._steps = None

    def __enter__(self) -> HumanLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def step_line(reading: Reading, *, committed: bool = True) -> str:
    """`step 12 loss 2.3412 grad_norm 0.91 lr 1.00e-04 0.21s`."""
    words = [f"step {reading.step}"]
    if reading.loss is not None:
        digits = ".4f" if abs(reading.loss) < 1e6 else ".4e"
        words.append(f"loss {reading.loss:{digits}}")
    for name, value in reading.components.items():
        words.append(f"{name} {value:.4f}")
    norm = reading.grad_norm
    if norm is not None:
        readable = not math.isfinite(norm) or norm == 0 or 0.1 <= norm < 1e6
        words.append(f"grad_norm {norm:.2f}" if readable else f"grad_norm {norm:.2e}")
    if reading.lr:
        words.append(f"lr {phrases.rates(reading.lr, words='{:.2e}'.format)}")
    for name, value in reading.followed.items():
        words.append(f"{name} {phrases.number(value)}")
    if reading.seconds is not None:
        words.append(f"{reading.seconds:.2f}s")
    if not committed:
        words.append("(not committed)")
    return " ".join(words)


def error_lines(incident: Incident) -> Iterator[str]:
    """Yield the lines about one bad step, at least one of which starts with ERROR."""
    reading = incident.reading
    kind = incident.verdict.kind
    origin = incident.origin
    decision = incident.decision
    if kind in _LOSS_KINDS:
        yield f"ERROR: Invalid loss at step {incident.step}: {reading.loss}"
        for name, value in reading.components.items():
            yield f"  {name}: {value}"
    elif kind in _GRADIENT_KINDS:
        yield f"ERROR: NaN/Inf gradient norm at step {incident.step}"
        yield f"ERROR: Invalid gradient norm: {reading.grad_norm}"
    else:
        yield f"ERROR: {phrases.verdict_title(kind)} at step {incident.step}"
    if incident.verdict.summary:
        yield f"  {incident.verdict.summary}"
    if origin is not None:
        where = f"{origin.phase} {place(origin)}".rstrip()
        culprits = phrases.culprits(origin, len(reading.micro_losses))
        yield f"  origin: {phrases.joined([where, culprits])}"
        if origin.output is not None:
            yield f"  output: {origin.output.words}"
    if incident.findings:
        yield f"  cause: {incident.findings[0].code} {incident.findings[0].title}"
    if reading.lr:
        yield f"  lr: {phrases.rates(reading.lr, reading.schedule)}"
    if decision is not None:
        yield phrases.ACTION_WORDS[decision.action].log
        yield f"  {phrases.joined([phrases.budget(decision), decision.reason], ': ')}"


def point_link(link: Path, target: str) -> None:
    """Make `link` name `target` in one step: a reader sees the old or the new one, never none."""
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    try:
        fresh.symlink_to(target)
        fresh.replace(link)
    except OSError:
        # A filesystem without links still gets its log, only without the short name.
        fresh.unlink(missing_ok=True)


def drop_torn_line(path: Path) -> None:
    """A crash may have left half a line; readers of this file expect every line to be whole."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb+") as file, mmap.mmap(file.fileno(), 0) as data:
        file.truncate(data.rfind(b"\n") + 1)


# --- Messages for people as records of Python's `logging`, under the logger `stepguard`.


LOGGER = logging.getLogger("stepguard")
INFORMATION = frozenset(
    {
        "callback-only",
        "loader",
        "restored",
        "scale_calibration",
        "schedule",
        "signal",
        "snapshots",
        "tracing",
    }
)
"""Kinds of notes that report nothing bad; all others are warnings."""


class LoggingSink(Sink):
    """Logs every message for people once, in one line.

    Records carry `step` and `kind`, for filters. With `propagate` the handlers of the root logger
    get them too; without, only handlers that were added to the logger `stepguard` itself.
    """

    def __init__(self, *, propagate: bool, whose: Callable[[], str] = str) -> None:
        self._propagate = propagate
        self._whose = whose

    def incident(self, incident: Incident) -> None:
        text = phrases.incident_line(incident)
        self._log(logging.WARNING, text, step=incident.step, kind=incident.verdict.kind)

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        level, topic = logging.ERROR, "fault"
        if kind == "note":
            topic = str(fields.get("kind"))
            level = logging.INFO if topic in INFORMATION else logging.WARNING
        if kind in ("note", "fault"):
            self._log(level, phrases.message(kind, fields), step=fields.get("step"), kind=topic)

    def halted(self, incident: Incident, exit_line: str) -> None:
        for text in (phrases.stopping(incident), exit_line):
            self._log(logging.ERROR, text, step=incident.step, kind="halted")

    def _log(self, level: int, text: str, **fields: Any) -> None:
        if not LOGGER.isEnabledFor(level):
            return
        whose = self._whose()
        if whose:
            text = f"({whose}) {text}"
        if self._propagate:
            LOGGER.log(level, text, extra=fields)
            return
        # The terminal prints these messages already. A handler of the root logger, which
        # logging.basicConfig adds, would print each of them a second time.
        record = LOGGER.makeRecord(LOGGER.name, level, __file__, 0, text, (), None, extra=fields)
        for handler in LOGGER.handlers if LOGGER.filter(record) else ():
            if level >= handler.level:
                handler.handle(record)


# --- Alerts by webhook: incidents, stops and faults as Slack-shaped JSON.


WAITING = 64
"""Messages that may wait to be sent; more are counted and left out."""
LONGEST = 2900
"""Characters of a message: Slack refuses a section of more than 3000."""
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
                "without spaces."
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
            self._post(phrases.incident_line(incident, counted))

    def halted(self, incident: Incident, exit_line: str) -> None:
        self._post(f"{phrases.stopping(incident)}\n{exit_line}")

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "fault":
            self._post(phrases.message(kind, fields))

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
                text += f"\n({self._left_out} messages before this one were dropped)"
                self._left_out = 0
            try:
                body = json.dumps(payload(f"{self._name}: {text}")).encode()
                request = Request(self._url, body, {"Content-Type": "application/json"})
                with build_opener(_NoRedirects).open(request, timeout=self._timeout) as answer:
                    # Bytes of an answer that are read; nothing in it is used
                    answer.read(1 << 16)
            except Exception as error:
                # Type and status only: the text of an error may hold the address, a secret.
                why = type(error).__name__
                if isinstance(error, HTTPError):
                    why += f", status {error.code}"
                    error.close()
                elif isinstance(reason := getattr(error, "reason", None), Exception):
                    why += f" ({type(reason).__name__})"
                self._fault = WebhookFailed(f"{self._host} did not accept an alert: {why}")
                return

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


# --- A step as named numbers for a logger, with a finite one that tells of non-finite ones.


PREFIX = "stepguard/"
NONFINITE = PREFIX + "nonfinite"
SKIPPED = PREFIX + "skipped"
INCIDENTS = PREFIX + "incidents"


def named_numbers(reading: Reading) -> dict[str, float]:
    """The numbers seen in a step, non-finite ones included, by the names of their series."""
    seen: dict[str, float | None] = {"loss": reading.loss}
    seen |= {f"loss/{name}": value for name, value in reading.components.items()}
    seen |= {f"followed/{name}": value for name, value in reading.followed.items()}
    seen["grad_norm"] = reading.grad_norm
    for group, rate in enumerate(reading.lr):
        # The first group keeps the plain name: most runs have one only.
        seen["lr" if group == 0 else f"lr/{group}"] = rate
    for name in ("clip_factor", "scale", "labels", "seconds"):
        seen[name] = getattr(reading, name)
    return {name: float(value) for name, value in seen.items() if value is not None}


def scalars(reading: Reading, *, committed: bool) -> dict[str, float]:
    """Everything seen in the step, with `nonfinite` and `skipped`."""
    found = {PREFIX + name: value for name, value in named_numbers(reading).items()}
    finite = all(map(math.isfinite, (*found.values(), *reading.micro_losses)))
    # A gradient element or a stored tensor may be non-finite where all numbers are finite.
    healthy = finite and reading.grads_finite and not reading.bad_state
    return {**found, NONFINITE: float(not healthy), SKIPPED: float(not committed)}


def finite_only(values: dict[str, float]) -> dict[str, float]:
    """The values for a backend that drops or distorts NaN and Inf; `nonfinite` stays to say so."""
    return {name: value for name, value in values.items() if math.isfinite(value)}
