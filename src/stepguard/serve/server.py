"""Binds the live page to an address and says where it is."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

from stepguard._errors import ConfigError

FIRST_PERSON, NOBODY = 1000, 65534
"""User numbers of people; below are services."""
FURTHER_PORTS = 20
"""Ports above the usual one that are tried when it is taken."""


def is_loopback(host: str) -> bool:
    """Can only this machine reach this address?"""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def shared_machine() -> bool:
    """Do other people use this machine now? Root is not counted: it can read the runs anyway."""
    processes = Path("/proc")
    if not processes.is_dir():
        return True  # not known
    users = set()
    for process in processes.iterdir():
        if process.name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended
                users.add(process.stat().st_uid)
    return any(FIRST_PERSON <= user < NOBODY for user in users - {os.getuid()})


def serve_runs(
    root: Path, host: str, port: int | None, token: str | None, say: Callable[[str], None]
) -> None:
    """Serve until Ctrl+C. A token is made where none is given and others could ask."""
    try:
        import uvicorn

        from stepguard.serve.app import build_app
    except ImportError as missing:
        raise ConfigError(
            f"the live page needs {missing.name}: pip install 'stepguard[serve]'."
        ) from missing
    if token is None and (not is_loopback(host) or shared_machine()):
        token = secrets.token_urlsafe(24)
    servers: list[uvicorn.Server] = []
    app = build_app(root, token, lambda: any(server.should_exit for server in servers))
    with _bound(host, port) as listening:
        at = listening.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        ending = f"/?token={token}" if token else "/"
        say(f"serving {root} at http://{shown}:{at}{ending} (Ctrl+C ends it)")
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=3)
        servers.append(uvicorn.Server(config))
        servers[0].run(sockets=[listening])


def _bound(host: str, port: int | None) -> socket.socket:
    """A socket at this port; without one, at the first free port from 8321 on."""
    wanted = range(8321, 8321 + FURTHER_PORTS) if port is None else range(port, port + 1)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    why = ""
    for number in wanted:
        listening = socket.socket(family)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, number))
        except OSError as error:
            listening.close()
            why = error.strerror or str(error)
            continue
        listening.listen(128)
        return listening
    raise ConfigError(f"{host} port {wanted[0]} cannot be used: {why}; give another with --port.")
