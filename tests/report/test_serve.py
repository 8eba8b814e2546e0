"""`stepguard serve`: who is let in, which runs are found, and that pages get every row once."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from cli.journals import invoke, write_run
from report.literals import ATTACK
from report.served import Stream, get, serving
from stepguard import ConfigError
from stepguard._errors import JournalError
from stepguard.cli.app import app
from stepguard.journal import Journal, runs_below
from stepguard.records import Reading
from stepguard.report import serve as serving_module
from stepguard.report.serve import COOKIE, PageProgress, RunFollower, build_app, is_loopback


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
    shown = ask(runs / "a", "/runs/a")
    assert "stepguard-data" in shown.text
    assert shown.headers["x-frame-options"] == "DENY"
    assert shown.headers["x-content-type-options"] == "nosniff"
    assert shown.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("kind", ["runs", "events"])
@pytest.mark.parametrize(
    "name", ["%2e%2e/secret", "..%2fsecret", "a/%2e%2e/%2e%2e/secret", "nothing", "%00", ATTACK]
)
def test_no_path_leads_out_of_the_folder(runs: Path, kind: str, name: str) -> None:
    answer = ask(runs, f"/{kind}/{name}?number=1&from=0&version=")
    assert answer.status_code == 404
    assert "loss is nan" not in answer.text


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
    for own in (b"LOCALHOST:8321", b"127.0.0.1", b"[::1]:8321"):
        asyncio.run(answer(own))
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


@pytest.mark.parametrize(
    "name",
    [
        "../secret",
        "a/../../secret",
        "..",
        ".",
        "",
        "/",
        "a/",
        "link",
        "empty",
        "a\0b",
        "..\\secret",
        "a//b",
    ],
)
def test_no_other_name_opens_anything(runs: Path, name: str) -> None:
    write_run(runs / "group" / "b")
    (runs / "empty").mkdir()
    (runs / "link").symlink_to(runs.parent / "secret")
    assert runs_below(runs).get(name) is None
    assert runs_below(runs).get(str(runs.parent / "secret")) is None
    assert list(runs_below(runs)) == ["a", "b<img src=x>", "group/b"]
    assert runs_below(runs)["group/b"] == (runs / "group" / "b").resolve()
    with pytest.raises(JournalError, match="is not a folder; give a run directory"):
        build_app(runs / "a" / "journal.jsonl")


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_module, "EVERY", 0.0)
    monkeypatch.setattr(serving_module, "REST", 0.0)


def test_rows_come_once_and_facts_when_something_else_was_written(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    following = RunFollower(run, "run")

    async def ask(place: PageProgress) -> tuple[PageProgress, dict[str, object]] | None:
        return await following.since(place, "0")

    place, message = asyncio.run(ask(PageProgress(1, 0, "")))
    assert (message["from"], message["count"]) == (0, 12)
    assert "facts" in message and "parts" in message
    assert asyncio.run(ask(place)) is None
    journal = Journal(run)
    journal.step(Reading(step=12, loss=0.5), committed=True)
    place, message = asyncio.run(ask(place))
    assert (message["from"], message["count"]) == (12, 1)
    assert "facts" not in message and "parts" not in message
    journal.note("note", {"step": 12, "kind": "x", "summary": "x"})
    journal.close()
    place, message = asyncio.run(ask(place))
    assert message["count"] == 0 and "facts" in message
    write_run(run)  # another run in the folder: the page loads itself again
    now, message = asyncio.run(ask(place))
    assert now.number == 2 and message == {}
    assert PageProgress.parse(str(place)) == place
    for text in ("", "1", "1:", "a:1:", "1:-1:", "1:1e3:"):
        assert PageProgress.parse(text) is None


def test_page_of_a_journal_that_was_replaced_is_loaded_again(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    following = RunFollower(run, "run")
    document = asyncio.run(following.document("/events/run"))
    assert document["runs"][0]["incidents"]
    lines = ['{"v":1,"type":"run","run":"other"}']
    lines += [f'{{"v":1,"type":"step","step":{step},"loss":1}}' for step in range(40)]
    (run / "new").write_text("\n".join(lines) + "\n")
    (run / "new").replace(run / "journal.jsonl")
    place, message = asyncio.run(following.since(PageProgress(1, 12, ""), "0"))
    assert message == {} and place.rows == 40
    again = asyncio.run(following.document("/events/run"))
    assert again["runs"][0]["incidents"] == []
    assert document["live"] == {"events": "/events/run?journal=0"}
    assert again["live"] == {"events": "/events/run?journal=1"}


RUNS = 3
PAGES = 4
ROWS = 40


def test_many_pages_of_many_runs_lose_no_row(tmp_path: Path) -> None:
    journals = []
    write_run(tmp_path / "secret")
    for number in range(RUNS):
        journal = Journal(tmp_path / "runs" / f"run{number}")
        journal.write("run", {"stepguard": "0"})
        journals.append(journal)
    with serving(tmp_path / "runs") as address:
        streams = [Stream(f"{address}events/run{page % RUNS}") for page in range(PAGES)]
        readers = [threading.Thread(target=one.until, args=(ROWS,)) for one in streams]
        for reader in readers:
            reader.start()
        for step in range(ROWS):
            for journal in journals:
                journal.step(Reading(step=step, loss=1.0), committed=True)
        for reader in readers:
            reader.join()
        for stream in streams:
            assert stream.steps == list(range(ROWS))
            stream.close()
        for step in range(ROWS, ROWS + 3):
            journals[0].step(Reading(step=step, loss=1.0), committed=True)
        again = Stream(f"{address}events/run0", last=streams[0].last)
        assert again.until(3) == [ROWS, ROWS + 1, ROWS + 2], "a broken connection goes on"
        again.close()
        for path in ("runs/../../secret", "runs/..%2f..%2fsecret", "events/..%2fsecret"):
            status, body = get(address + path)
            assert status in (400, 404) and "journal" not in body
    for journal in journals:
        journal.close()


def test_bound_beyond_the_loopback_a_token_is_made(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with serving(run, "--host", "0.0.0.0") as address:
        assert "?token=" in address
        assert get(address.partition("?")[0])[0] == 401
        assert get(address)[0] in (200, 307)
    assert is_loopback("localhost") and is_loopback("127.0.0.1") and is_loopback("::1")
    assert not is_loopback("0.0.0.0") and not is_loopback("box.example")


@pytest.mark.parametrize("words", [["nowhere"], ["."]], ids=["missing", "taken"])
def test_what_cannot_be_served_is_an_error_of_one_line(tmp_path: Path, words: list[str]) -> None:
    port = ["--port", "0"]
    if words == ["."]:
        words = [str(tmp_path)]
        port = ["--port", "1", "--host", "192.0.2.1"]
    seen = invoke("serve", *words, *port)
    assert seen.exit_code == 2
    assert seen.stderr.startswith("stepguard: error: ")
    assert len(seen.stderr.splitlines()) == 1
