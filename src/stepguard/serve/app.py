"""The web application: a list of runs, a page for each, and a stream of what comes."""

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
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any
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
from stepguard.records import Incident
from stepguard.report.page import (
    Extras,
    drawn_columns,
    overview,
    parts,
    plain_columns,
    quick_facts,
    run_facts,
    states_of,
    story_document,
    version,
)
from stepguard.report.page_extras import asset, embedded, page_extras, policy, render_page
from stepguard.report.story import Run, Story, StoryReader, belongs_to_run_above, is_journal

# --- The runs below a folder, by name. A name that is not among them opens nothing.


DEEPEST = 5
"""Folders below the given one in which runs are looked for."""
MOST_RUNS = 2000
SKIPPED = frozenset({"incidents", "checkpoints", "capsule", "__pycache__", "node_modules"})


class RunFolders:
    """Finds run folders below `root`, which may be a run itself."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise JournalError(
                f"{root} is not a folder; give a run directory, or a folder with run directories."
            )
        self.root = root.resolve()

    @property
    def single(self) -> bool:
        """Is the folder itself a run?"""
        return _is_run(self.root)

    def names(self) -> list[str]:
        """Names of the runs, as paths below the root; the root itself is its own folder name."""
        if self.single:
            return [self.root.name]
        return sorted(path.relative_to(self.root).as_posix() for path in self._found())

    def path(self, name: str) -> Path | None:
        """The folder of a run; None for anything that is not one of `names`."""
        if self.single:
            return self.root if name == self.root.name else None
        # Built from the name's own parts only: no part can lead up or out.
        parts = name.split("/")
        if any(
            not part or part in SKIPPED or part.startswith(".") or "\\" in part for part in parts
        ):
            return None
        try:
            path = self.root.joinpath(*parts).resolve()
        except (OSError, ValueError):
            return None
        if not path.is_relative_to(self.root) or not _is_run(path):
            return None
        return path

    def _found(self) -> Iterator[Path]:
        count = 0
        for folder, below, _ in os.walk(self.root):
            here = Path(folder)
            depth = len(here.relative_to(self.root).parts)
            if depth and _is_run(here) and not belongs_to_run_above(here):
                count += 1
                yield here
            below[:] = [name for name in below if name not in SKIPPED and not name.startswith(".")]
            if depth >= DEEPEST or count >= MOST_RUNS:
                below.clear()


def _is_run(folder: Path) -> bool:
    try:
        return any(is_journal(path) for path in folder.glob("journal*.jsonl"))
    except OSError:
        return False


# --- Tails one run for all pages that show it, and says to each what came since it last asked.


EVERY = 0.4
"""Seconds between two looks at a journal that somebody watches."""
_NUMBER = re.compile(r"[0-9]{1,15}")
REST = 8
"""A look that took long is followed by so many times as long a rest."""


@dataclass(frozen=True, slots=True)
class PageProgress:
    """How far a page has come: which run of the folder, how many rows, which facts."""

    number: int
    rows: int
    version: str

    def __str__(self) -> str:
        return f"{self.number}:{self.rows}:{self.version}"

    @classmethod
    def parse(cls, text: str) -> PageProgress | None:
        """What `str` wrote; None for anything else."""
        number, _, rest = text.partition(":")
        rows, _, facts = rest.partition(":")
        if not _NUMBER.fullmatch(number) or not _NUMBER.fullmatch(rows):
            return None
        return cls(int(number), int(rows), facts)


class RunFollower:
    """One run folder. Reading happens in a thread, one look at a time."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self._reader = StoryReader(folder, steps_of="all")
        self._extras = Extras()
        self._samples: dict[str, Any] = {}
        self._lock = asyncio.Lock()
        self._next_look = 0.0

    async def look(self) -> Story:
        """The story up to now; a journal is read at most every `EVERY` seconds."""
        async with self._lock:
            if time.monotonic() >= self._next_look:
                began = time.monotonic()
                await asyncio.to_thread(self._read)
                now = time.monotonic()
                self._next_look = now + max(EVERY, REST * (now - began))
            return self._reader.story()

    def _read(self) -> None:
        restarts = self._reader.restarts
        if self._reader.read():
            if self._reader.restarts != restarts:
                self._samples.clear()
            story = self._reader.story()
            self._extras = page_extras(story, self.folder, self._kept)

    def _kept(self, incident: Incident, card: dict[str, Any], folder: Path) -> bool:
        """Take what an earlier look found in the incident's folder."""
        found = self._samples.setdefault(f"{folder}/{incident.rank}/{incident.id}", card)
        if found is card:
            return False
        card["samples"] = found["samples"]
        card["heat"] = found["heat"]
        return True

    async def document(self, events: str) -> dict[str, Any]:
        """The whole page's document, with the address of what comes after it."""
        story = await self.look()
        document = await asyncio.to_thread(story_document, story, self.name, self._extras)
        return {**document, "live": {"events": f"{events}?journal={self._reader.restarts}"}}

    async def since(
        self, place: PageProgress, journal: str, lane: int = 0
    ) -> tuple[PageProgress, dict[str, Any]] | None:
        """What came since to one optimizer of the run; None if nothing did.

        The page has to be made anew, and gets nothing, for a new run, for another optimizer, and
        where a journal was replaced: `journal` is which one the page shows.
        """
        story = await self.look()
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
        return now, await asyncio.to_thread(self._message, story.latest, run, place, now)

    def _message(
        self, whole: Run, run: Run, place: PageProgress, now: PageProgress
    ) -> dict[str, Any]:
        names = drawn_columns(run.steps)
        message: dict[str, Any] = {
            "from": place.rows,
            "count": now.rows - place.rows,
            "columns": plain_columns(run.steps, names, states_of(run), place.rows),
            "always": quick_facts(run, whole),
        }
        if now.version != place.version or not place.rows:
            message["parts"] = parts(run)
            message["facts"] = run_facts(run, self.name, self._extras, whole)
        return message


# --- The list of runs that a server shows first.


COLUMNS = ("run", "state", "steps", "loss", "incidents", "last step")


def render_list(root: str, rows: Sequence[dict[str, str]]) -> tuple[str, str, str]:
    """The page, its script and its style."""
    script = asset("list.js")
    style = asset("page.css")
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in COLUMNS)
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>runs · stepguard</title><style>{style}</style></head><body>"
        '<header class="top"><div class="brand">stepguard</div><h1>Runs</h1>'
        f'<div class="line">{escape(root)}</div></header><main class="rest">'
        f'<section class="sheet"><table class="runs-table"><thead><tr>{heads}</tr></thead>'
        '<tbody id="runs"></tbody></table><p id="none" hidden>No run here yet.</p></section></main>'
        f'<script type="application/json" id="stepguard-runs">{embedded({"runs": list(rows)})}'
        f"</script><script>{script}</script></body></html>"
    )
    return page, script, style


# --- The web application: a list of runs, a page for each, and a stream of what comes.


KEEP_ALIVE = 15.0
"""Seconds without a row after which a line says that the stream is alive."""
COOKIE = "stepguard-token"
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


class LiveRuns:
    """The followers of the runs that somebody looks at, one for each run."""

    def __init__(self, folders: RunFolders, ending: Callable[[], bool]) -> None:
        self.folders = folders
        self._ending = ending
        self._followers: dict[str, RunFollower] = {}

    def follower(self, name: str) -> RunFollower:
        """The follower of this run; 404 for a name that is no run below the folder."""
        path = self.folders.path(name)
        if path is None:
            raise HTTPException(404, "there is no run of this name")
        if name not in self._followers:
            self._followers[name] = RunFollower(path, name)
        return self._followers[name]

    async def home(self, request: Request) -> Response:
        if self.folders.single:
            return RedirectResponse(_address("runs", self.folders.root.name))
        page, script, style = render_list(str(self.folders.root), await self._rows())
        allowed = policy(script, style, connects=True)
        return HTMLResponse(page, headers={"Content-Security-Policy": allowed})

    async def listing(self, request: Request) -> Response:
        return JSONResponse({"runs": await self._rows()})

    async def _rows(self) -> list[dict[str, str]]:
        rows = []
        for name in await asyncio.to_thread(self.folders.names):
            story = await self.follower(name).look()
            rows.append({"name": name, "address": _address("runs", name), **overview(story)})
        return rows

    async def page(self, request: Request) -> Response:
        name = request.path_params["name"]
        follower = self.follower(name)
        document = await follower.document(_address("events", name))
        home = "" if self.folders.single else "/"
        text = await asyncio.to_thread(render_page, document, home=home)
        return HTMLResponse(text)

    async def events(self, request: Request) -> Response:
        follower = self.follower(request.path_params["name"])
        place = _asked_place(request)
        if place is None:
            raise HTTPException(400, "from, number and version say how far the page has come")
        # Pages of an earlier server name no journal.
        journal = request.query_params.get("journal", "0")
        lane = request.query_params.get("lane", "0")
        stream = _stream(follower, place, journal, self._ending, int(lane) if lane in LANES else 0)
        return StreamingResponse(stream, media_type="text/event-stream")


def _asked_place(request: Request) -> PageProgress | None:
    """How far the page has come: as it says, or after a broken connection as the browser says."""
    last = request.headers.get("last-event-id")
    if last:
        return PageProgress.parse(last)
    asked = [request.query_params.get(name, "") for name in ("number", "from", "version")]
    return PageProgress.parse(":".join(asked))


async def _stream(
    follower: RunFollower,
    place: PageProgress,
    journal: str,
    ending: Callable[[], bool],
    lane: int,
) -> AsyncIterator[str]:
    quiet = 0.0
    while not ending():
        found = await follower.since(place, journal, lane)
        if found is None:
            await asyncio.sleep(EVERY)
            quiet += EVERY
            if quiet >= KEEP_ALIVE:
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
        refused = self._refused(request)
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

    def _refused(self, request: Request) -> Response | None:
        if self._token is None:
            # A foreign site's name that was made to point here must not read the runs. The raw
            # header: a parsed address has lost characters.
            hosts = [value for name, value in request.scope["headers"] if name == b"host"]
            if len(hosts) != 1 or not LOOPBACK.fullmatch(hosts[0]):
                return PlainTextResponse("ask for localhost", status_code=403)
            return None
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        offered = (request.query_params.get("token"), request.cookies.get(COOKIE), bearer)
        if any(hmac.compare_digest((one or "").encode(), self._token.encode()) for one in offered):
            return None
        return PlainTextResponse("the token is missing or wrong", status_code=401)


def build_app(
    root: Path, token: str | None = None, ending: Callable[[], bool] = lambda: False
) -> Starlette:
    """The application for a run, or a folder of runs; without a token for the loopback only.

    `ending`: the server is about to stop, so streams end by themselves.
    """
    if token is not None and not token.strip():
        raise ConfigError(
            "the token is empty (an unset variable?); give --token TEXT, or leave the option out "
            "and one is made where it is needed."
        )
    runs = LiveRuns(RunFolders(root), ending)
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
