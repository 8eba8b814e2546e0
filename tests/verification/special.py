"""Files that would block or never end if they were read: FIFOs, sockets, devices."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def special_file(folder: Path, kind: str) -> Iterator[Path]:
    """Something that would block or never end if it were read."""
    path = Path(kind) if kind.startswith("/") else folder / kind
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "other.json":
        path.write_text("{}")
    with socket.socket(socket.AF_UNIX) as listening:
        if kind == "socket":
            _bind(listening, path)
        yield path


def _bind(listening: socket.socket, path: Path) -> None:
    """By a relative name: the path of a socket may not be longer than a hundred letters."""
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        listening.bind(path.name)
    finally:
        os.chdir(before)
