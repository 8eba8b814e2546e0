"""Real servers on this machine: `stepguard serve` in a process, and one that takes alerts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import stepguard

PATIENCE = 60.0
"""Seconds until a server or a stream that says nothing fails its test."""


@contextmanager
def serving(runs: Path, *options: str) -> Iterator[str]:
    """The address of a server of these runs, at a free port; it must end without a word."""
    source = str(Path(stepguard.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": source, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "stepguard", "serve", str(runs), "--port", "0", *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )
    assert process.stdout is not None
    watchdog = threading.Timer(PATIENCE, process.kill)
    watchdog.start()
    try:
        said = process.stdout.readline()
        watchdog.cancel()
        address = re.search(r"http://\S+", said)
        assert address is not None, said + process.stdout.read()
        yield address[0]
    finally:
        watchdog.cancel()
        process.terminate()
        process.wait(timeout=PATIENCE)
        left = process.stdout.read()
        process.stdout.close()
    assert left == ""


def get(address: str, **headers: str) -> tuple[int, str]:
    """Status and body, the path as it is written."""
    parts = urlsplit(address)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE)
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


class Stream:
    """Reads a page's events as a browser does."""

    def __init__(self, address: str, place: str = "1:0:", last: str = "") -> None:
        parts = urlsplit(address)
        number, rows, facts = place.split(":", 2)
        query = f"number={number}&from={rows}&version={facts}"
        self._connection = HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE)
        headers = {"Last-Event-ID": last} if last else {}
        self._connection.request("GET", f"{parts.path}?{query}", headers=headers)
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200
        self.steps: list[int] = []
        self.last = last
        self.kinds: list[str] = []

    def read(self) -> dict[str, Any]:
        """The next event."""
        fields: dict[str, str] = {}
        while True:
            line = self._answer.readline().decode().rstrip("\n")
            if not line and "data" in fields:
                break
            name, _, value = line.partition(": ")
            if name:
                fields[name] = value
        self.last = fields["id"]
        self.kinds.append(fields["event"])
        message: dict[str, Any] = json.loads(fields["data"])
        if message:
            assert message["from"] == len(self.steps) or not self.steps
            self.steps += message["columns"]["step"]["values"]
        return message

    def until(self, rows: int) -> list[int]:
        """Read until so many rows have come; their step numbers."""
        while len(self.steps) < rows:
            self.read()
        return self.steps

    def close(self) -> None:
        self._connection.close()


class Endpoint(ThreadingHTTPServer):
    """Keeps what it is sent. `status` is its answer; while `open` is not set it does not answer."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Taking)
        self.got: list[dict[str, Any]] = []
        self.status = 200
        self.redirect = ""
        self.answer = 0
        """Bytes that it announces and sends, a block at a time."""
        self.sent = 0
        self.open = threading.Event()
        self.open.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/services/T0/SECRET"


class Taking(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        self.server.open.wait(60)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append(json.loads(body))
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(self.server.answer))
        if self.server.redirect:
            self.send_header("Location", self.server.redirect)
        self.end_headers()
        with suppress(OSError):  # whoever asked has had enough
            while self.server.sent < self.server.answer:
                self.server.sent += self.wfile.write(b"x" * (1 << 16))

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def listening() -> Iterator[Endpoint]:
    """Serve until the block ends."""
    server = Endpoint()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.open.set()
        server.shutdown()
        thread.join()
        server.server_close()
