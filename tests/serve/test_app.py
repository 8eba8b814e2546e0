"""The web application: who is let in, and what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from cli.journals import write_run
from report.hostile import ATTACK
from stepguard import ConfigError
from stepguard.cli.app import app
from stepguard.report.serve import COOKIE, build_app


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_run(tmp_path / "runs" / "a")
    write_run(tmp_path / "runs" / "b<img src=x>")
    write_run(tmp_path / "secret")
    return tmp_path / "runs"


def ask(
    root: Path, path: str, token: str | None = None, host: str = "localhost", **more: str
) -> httpx.Response:
    """One request to the application itself, without a server."""

    async def answer() -> httpx.Response:
        transport = httpx.ASGITransport(app=build_app(root, token))
        base = f"http://{host}"
        async with httpx.AsyncClient(transport=transport, base_url=base) as client:
            return await client.get(path, headers=more)

    return asyncio.run(answer())


def test_list_names_every_run_as_text(runs: Path) -> None:
    answer = ask(runs, "/")
    assert answer.status_code == 200
    assert "<img src=x>" not in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    names = [row["name"] for row in ask(runs, "/runs.json").json()["runs"]]
    assert names == ["a", "b<img src=x>"]


def test_single_run_is_shown_at_once(runs: Path) -> None:
    answer = ask(runs / "a", "/")
    assert (answer.status_code, answer.headers["location"]) == (307, "/runs/a")
    assert "stepguard-data" in ask(runs / "a", "/runs/a").text


@pytest.mark.parametrize("kind", ["runs", "events"])
@pytest.mark.parametrize(
    "name", ["%2e%2e/secret", "..%2fsecret", "a/%2e%2e/%2e%2e/secret", "nothing", "%00", ATTACK]
)
def test_no_path_leads_out_of_the_folder(runs: Path, kind: str, name: str) -> None:
    answer = ask(runs, f"/{kind}/{name}?number=1&from=0&version=")
    assert answer.status_code == 404
    assert "loss is nan" not in answer.text


def test_name_of_another_site_is_refused_without_a_token(runs: Path) -> None:
    assert ask(runs, "/", host="evil.example").status_code == 403
    assert ask(runs, "/", host="127.0.0.1").status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        b"evil.example",
        b"evil.example:8321",
        b"evil.example\x7f@localhost",
        b"localhost@evil.example",
        b"local_host",
        b"evil^localhost",
        b"localhost.evil.example",
        b"localhost:80:90",
        b"",
        b" localhost",
        b"[::1]evil",
    ],
)
def test_raw_host_header_decides(runs: Path, host: bytes) -> None:
    """starlette drops characters of a name it cannot parse; a browser sends them."""
    sent: list[int] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            sent.append(message["status"])

    async def answer(*hosts: bytes) -> None:
        scope = {
            "type": "http",
            "method": "GET",
            "path": "/runs.json",
            "query_string": b"",
            "server": ("127.0.0.1", 8321),
            "headers": [(b"host", one) for one in hosts],
        }
        await build_app(runs)(scope, _nothing, send)  # type: ignore[arg-type]

    asyncio.run(answer(host))
    asyncio.run(answer())
    asyncio.run(answer(b"localhost", host))
    assert sent == [403, 403, 403]
    asyncio.run(answer(b"LOCALHOST:8321"))
    assert sent[-1] == 200


async def _nothing() -> dict[str, str]:
    return {"type": "http.request"}


@pytest.mark.parametrize("token", ["", "  "])
def test_empty_token_is_an_error_not_an_open_door(runs: Path, token: str) -> None:
    with pytest.raises(ConfigError, match="the token is empty"):
        build_app(runs, token)
    words = ["serve", str(runs), "--host", "127.0.0.1", "--token", token]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2 and "the token is empty" in done.output


def test_stale_cookie_does_not_hide_a_valid_bearer(runs: Path) -> None:
    stale = f"{COOKIE}=old"
    answer = ask(runs, "/", token="right", cookie=stale, authorization="Bearer right")
    assert answer.status_code == 200
    assert ask(runs, "/?token=right", token="right", cookie=stale).status_code == 200


def test_hidden_folders_and_links_open_nothing(runs: Path) -> None:
    write_run(runs / ".hidden")
    write_run(runs / "a" / "checkpoints" / "c")
    (runs / "linked").mkdir()
    (runs / "linked" / "journal.jsonl").symlink_to(runs.parent / "secret" / "journal.jsonl")
    for name in (".hidden", "a/checkpoints/c", "linked"):
        assert ask(runs, f"/runs/{name}").status_code == 404


def test_token_is_asked_for_and_then_kept_in_a_cookie(runs: Path) -> None:
    assert ask(runs, "/", token="right", host="box").status_code == 401
    assert ask(runs, "/?token=wrong", token="right", host="box").status_code == 401
    let_in = ask(runs, "/?token=right", token="right", host="box")
    assert let_in.status_code == 200
    assert "HttpOnly; SameSite=Strict" in let_in.headers["set-cookie"]
    again = ask(runs, "/", token="right", host="box", cookie=f"{COOKIE}=right")
    assert again.status_code == 200
    bearer = ask(runs, "/", token="right", host="box", authorization="Bearer right")
    assert bearer.status_code == 200


def test_stream_without_a_place_is_refused(runs: Path) -> None:
    assert ask(runs, "/events/a").status_code == 400
    assert ask(runs, "/events/a?number=x&from=-1&version=").status_code == 400
    digits = "9" * 5000
    assert ask(runs, f"/events/a?number={digits}&from={digits}&version=").status_code == 400


def test_nothing_is_cached_framed_or_guessed(runs: Path) -> None:
    headers = ask(runs, "/runs/a").headers
    assert headers["x-frame-options"] == "DENY"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
