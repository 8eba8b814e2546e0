"""The web application: a list of runs, a page for each, and a stream of what comes."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
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

from stepguard._errors import ConfigError
from stepguard.report.page_facts import overview
from stepguard.report.run_page import policy, render_page
from stepguard.serve.folders import RunFolders
from stepguard.serve.follower import EVERY, PageProgress, RunFollower
from stepguard.serve.run_list import render_list

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
