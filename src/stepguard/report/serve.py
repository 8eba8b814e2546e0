"""The live page: an application in a process of its own that tails journals of runs."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import os
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable
from html import escape
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stepguard._errors import ConfigError, JournalError
from stepguard.journal import is_run, runs_below
from stepguard.report.page import (
    Folders,
    Json,
    asset,
    columns,
    embedded,
    overview,
    parts,
    policy,
    quick_facts,
    render_page,
    run_facts,
    story_document,
    version,
)
from stepguard.report.story import Story, StoryReader

# --- Follows one run for all pages that show it, and sends each what came since it last asked.


EVERY = 0.4
"""Seconds between two reads of a journal that somebody watches."""
REST = 8
"""A read that took long is followed by a rest this many times as long."""
_PROGRESS = re.compile(r"([0-9]{1,15}):([0-9]{1,15}):(.*)", re.DOTALL)


class PageProgress(NamedTuple):
    """How far a page has come: which run of the folder, how many rows, which facts."""

    number: int
    rows: int
    version: str

    def __str__(self) -> str:
        return f"{self.number}:{self.rows}:{self.version}"

    @classmethod
    def parse(cls, text: str) -> PageProgress | None:
        """What `str` wrote; None for anything else."""
        found = _PROGRESS.fullmatch(text)
        return cls(int(found[1]), int(found[2]), found[3]) if found else None


class RunFollower:
    """One run folder. Reading happens in a thread, one read at a time."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self._reader = StoryReader(folder)
        self._folders = Folders()
        self._lock = asyncio.Lock()
        self._next_read = 0.0

    async def story(self) -> Story:
        """The story up to now; a journal is read at most every `EVERY` seconds."""
        async with self._lock:
            if time.monotonic() >= self._next_read:
                began = time.monotonic()
                restarts = self._reader.restarts
                await asyncio.to_thread(self._reader.read)
                if self._reader.restarts != restarts:
                    self._folders = Folders()
                now = time.monotonic()
                self._next_read = now + max(EVERY, REST * (now - began))
            return self._reader.story()

    async def document(self, events: str) -> Json:
        """The whole page's document, with the address of what comes after it."""
        story = await self.story()
        document = await asyncio.to_thread(story_document, story, self.name, self._folders)
        return {**document, "live": {"events": f"{events}?journal={self._reader.restarts}"}}

    async def since(
        self, place: PageProgress, journal: str, lane: int = 0
    ) -> tuple[PageProgress, Json] | None:
        """What came since to one optimizer of the run; None if nothing did.

        The page has to be made anew, and gets nothing, for a new run, for another optimizer, and
        where a journal was replaced: `journal` is which one the page shows.
        """
        story = await self.story()
        lanes = story.latest.lanes
        run = lanes[lane] if lane < len(lanes) else lanes[0]
        now = PageProgress(run.number, len(run.steps), version(run, len(lanes)))
        if journal != str(self._reader.restarts):
            return now, {}
        if now == place:
            return None
        others = place.version.rpartition("-")[2] not in ("", str(len(lanes)))
        if now.number != place.number or now.rows < place.rows or others:
            return now, {}

        def message() -> Json:
            fresh = {}
            for name, (values, kinds) in columns(run, place.rows).items():
                fresh[name] = {"values": values.tolist(), "kinds": kinds.tolist()}
            said: Json = {"from": place.rows, "count": now.rows - place.rows}
            said |= {"columns": fresh, "always": quick_facts(run, story.latest)}
            if now.version != place.version or not place.rows:
                said["parts"] = parts(run)
                said["facts"] = run_facts(run, self.name, self._folders, story.latest)
            return said

        return now, await asyncio.to_thread(message)


# --- The web application.


COLUMNS = {
    "name": "run",
    "state": "state",
    "curve": "loss curve",
    "loss": "loss",
    "steps": "steps",
    "incidents": "incidents",
    "last": "last step",
    "started": "started",
    "age": "age",
}
"""Columns of the list of runs as `list.js` knows them, and their headings."""
COOKIE = "stepguard-token"
LIST_SCRIPTS = ("drawing.js", "list.js")
LANES = frozenset(map(str, range(100)))
"""Numbers by which a page asks for an optimizer of the run."""
LOOPBACK = re.compile(rb"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
"""Host headers of who asks this machine by a name of its own."""
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}
LIST = """<!doctype html><html lang="en"><head><meta charset="utf-8">\
<meta name="viewport" content="width=device-width, initial-scale=1">\
<title>runs · stepguard</title><style>{style}</style></head><body>\
<header class="top"><div class="brand">stepguard</div><h1>Runs</h1>\
<div class="line">{root}</div></header><main class="rest">\
<section class="sheet"><table class="runs-table"><thead><tr>{heads}</tr></thead>\
<tbody id="runs"></tbody></table><p id="none" hidden>No runs here yet.</p></section></main>\
<script type="application/json" id="stepguard-runs">{data}</script>\
<script>{script}</script></body></html>"""
NOT_BEGUN = """<!doctype html><html lang="en"><head><meta charset="utf-8">\
<meta name="viewport" content="width=device-width, initial-scale=1">\
<meta http-equiv="refresh" content="{retry}">\
<title>{name} · stepguard</title><style>{style}</style></head><body>\
<header class="top"><div class="brand">stepguard</div><h1>{name}</h1>\
<span class="chip note">not started</span></header><main class="rest"><section class="sheet">\
<p>There is no run of this name yet. This page checks again every \
{retry} seconds, and shows the run as soon as it starts.</p>\
<p><a href="/">all runs</a></p></section></main></body></html>"""


class LiveRuns:
    """A list of runs, a page for each that somebody watches, and a stream of what comes."""

    def __init__(self, root: Path, ending: Callable[[], bool]) -> None:
        self.root = root.resolve()
        self.single = is_run(root)
        self._ending = ending
        self._followers: dict[str, RunFollower] = {}

    def follower(self, name: str, path: Path | None) -> RunFollower:
        """The follower of this run; 404 for a name that is not a run below the folder."""
        if path is None:
            raise HTTPException(404, "there is no run of this name")
        return self._followers.setdefault(name, RunFollower(path, name))

    def asked(self, request: Request) -> RunFollower:
        """The follower of the run that the address names."""
        name = request.path_params["name"]
        return self.follower(name, runs_below(self.root).get(name))

    async def home(self, request: Request) -> Response:
        if self.single:
            return RedirectResponse(_address("runs", self.root.name))
        script = "\n".join(["(() => {", "'use strict';", *map(asset, LIST_SCRIPTS), "})();"])
        style = asset("page.css")
        heads = ""
        for column, title in COLUMNS.items():
            if column != "curve":
                title = f'<button class="sort" type="button">{title}</button>'
            heads += f'<th scope="col" id="by-{column}">{title}</th>'
        page = LIST.format(
            style=style,
            root=escape(str(self.root)),
            heads=heads,
            data=embedded({"runs": await self._rows()}),
            script=script,
        )
        allowed = policy(script, style, connects=True)
        return HTMLResponse(page, headers={"Content-Security-Policy": allowed})

    async def listing(self, request: Request) -> Response:
        return JSONResponse({"runs": await self._rows()})

    async def _rows(self) -> list[Json]:
        rows = []
        for name, path in (await asyncio.to_thread(runs_below, self.root)).items():
            story = await self.follower(name, path).story()
            rows.append({"name": name, "address": _address("runs", name), **overview(story)})
        return rows

    async def page(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in await asyncio.to_thread(runs_below, self.root):
            style = asset("page.css")
            # The page asks again after three seconds
            text = NOT_BEGUN.format(style=style, name=escape(name), retry=3)
            allowed = {"Content-Security-Policy": policy("", style)}
            return HTMLResponse(text, status_code=404, headers=allowed)
        follower = self.asked(request)
        document = await follower.document(_address("events", follower.name))
        home = "" if self.single else "/"
        return HTMLResponse(await asyncio.to_thread(render_page, document, home=home))

    async def events(self, request: Request) -> Response:
        follower = self.asked(request)
        asked = request.query_params
        # As the page says, or after a broken connection as the browser says.
        said = ":".join(asked.get(name, "") for name in ("number", "from", "version"))
        place = PageProgress.parse(request.headers.get("last-event-id") or said)
        if place is None:
            raise HTTPException(400, "from, number and version must be whole numbers of at least 0")
        lane = asked.get("lane", "0")
        number = int(lane) if lane in LANES else 0
        stream = self._stream(follower, place, asked.get("journal", "0"), number)
        return StreamingResponse(stream, media_type="text/event-stream")

    async def _stream(
        self, follower: RunFollower, place: PageProgress, journal: str, lane: int
    ) -> AsyncIterator[str]:
        quiet = 0.0
        while not self._ending():
            found = await follower.since(place, journal, lane)
            if found is None:
                await asyncio.sleep(EVERY)
                quiet += EVERY
                # After so long without a row, a line says that the stream is alive
                if quiet >= 15.0:
                    quiet = 0.0
                    yield ": still here\n\n"
                continue
            quiet = 0.0
            place, message = found
            kind = "rows" if message else "other-run"
            # JSON of ASCII letters has no line end in it, so one line of data is always enough.
            data = json.dumps(message, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
            yield f"id: {place}\nevent: {kind}\ndata: {data}\n\n"
            if not message:
                return  # the page loads itself again


def _address(kind: str, name: str) -> str:
    return f"/{kind}/{quote(name, safe='/')}"


class AccessCheck:
    """Lets in who has the token; without one, who asks the loopback address by its own name."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        refused: Response | None = None
        if self._token is None:
            # A foreign site's name that was made to point here must not read the runs. The raw
            # header: a parsed address has lost characters.
            hosts = [value for name, value in scope["headers"] if name == b"host"]
            if len(hosts) != 1 or not LOOPBACK.fullmatch(hosts[0]):
                refused = PlainTextResponse("ask for localhost", status_code=403)
        else:
            bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
            offered = (request.query_params.get("token"), request.cookies.get(COOKIE), bearer)
            token = self._token.encode()
            if not any(hmac.compare_digest((one or "").encode(), token) for one in offered):
                refused = PlainTextResponse("the token is missing or wrong", status_code=401)
        is_asked = refused is None and request.query_params.get("token") == self._token
        cookie = self._token if is_asked else None

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                if cookie is not None:
                    headers.append("Set-Cookie", f"{COOKIE}={cookie}; HttpOnly; SameSite=Strict")
            await send(message)

        await (refused or self._app)(scope, receive, send_with_headers)


def build_app(
    root: Path, token: str | None = None, ending: Callable[[], bool] = lambda: False
) -> Starlette:
    """The application for a run, or a folder of runs; without a token for the loopback only.

    `ending`: the server is about to stop, so streams end by themselves.
    """
    if token is not None and not token.strip():
        raise ConfigError(
            "the token is empty (an unset variable?); give --token TEXT, or omit the "
            "option: one is generated where it is needed."
        )
    if not root.is_dir():
        raise JournalError(
            f"{root} is not a folder; give a run directory, or a folder with run directories."
        )
    runs = LiveRuns(root, ending)
    routes = [
        Route("/", runs.home),
        Route("/runs.json", runs.listing),
        Route("/runs/{name:path}", runs.page),
        Route("/events/{name:path}", runs.events),
    ]
    return Starlette(routes=routes, middleware=[Middleware(AccessCheck, token=token)])


# --- Binds the live page to an address and says where it is.


FIRST_PERSON, NOBODY = 1000, 65534
"""User numbers of people; below are services."""


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
    for process in processes.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            user = process.stat().st_uid
            if user != os.getuid() and FIRST_PERSON <= user < NOBODY:
                return True
    return False


def serve_runs(
    root: Path, host: str, port: int | None, token: str | None, say: Callable[[str], None]
) -> None:
    """Serve until Ctrl+C. A token is made where none is given and others could ask."""
    try:
        import uvicorn

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
    # The next ports are tried when the usual one is taken
    wanted = range(8321, 8321 + 20) if port is None else range(port, port + 1)
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
