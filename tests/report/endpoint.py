"""A real HTTP server on this machine that takes alerts."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


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
