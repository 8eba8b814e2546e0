"""The web application: who is let in, and what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from cli.journals import write_run
from report.hostile import ATTACK
from stepguard.serve.app import COOKIE, build_app


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


def test_nothing_is_cached_framed_or_guessed(runs: Path) -> None:
    headers = ask(runs, "/runs/a").headers
    assert headers["x-frame-options"] == "DENY"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
