"""The server as a process: streams of many pages, broken connections, addresses."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from cli.journals import run_stepguard, write_run
from serve.served import Stream, get, serving
from stepguard.journal import Journal
from stepguard.records import Reading
from stepguard.report.serve import is_loopback

RUNS = 6
PAGES = 8
ROWS = 40


def test_loopback_is_told_from_other_addresses() -> None:
    assert is_loopback("localhost") and is_loopback("127.0.0.1") and is_loopback("::1")
    assert not is_loopback("0.0.0.0") and not is_loopback("box.example")


def test_many_pages_of_many_runs_lose_no_row(tmp_path: Path) -> None:
    journals = []
    for number in range(RUNS):
        journal = Journal(tmp_path / f"run{number}")
        journal.write("run", {"stepguard": "0"})
        journals.append(journal)
    with serving(tmp_path) as address:
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
    for journal in journals:
        journal.close()


def test_connection_that_broke_goes_on_where_it_was(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with serving(run) as address:
        first = Stream(f"{address}events/run")
        assert first.until(12) == list(range(12))
        first.close()
        journal = Journal(run)
        for step in range(12, 15):
            journal.step(Reading(step=step, loss=1.0), committed=True)
        journal.close()
        second = Stream(f"{address}events/run", last=first.last)
        assert second.until(3) == [12, 13, 14]
        second.close()


def test_bound_beyond_the_loopback_a_token_is_made(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with serving(run, "--host", "0.0.0.0") as address:
        assert "?token=" in address
        assert get(address.partition("?")[0])[0] == 401
        assert get(address)[0] in (200, 307)


def test_paths_are_refused_as_they_come(tmp_path: Path) -> None:
    write_run(tmp_path / "secret")
    write_run(tmp_path / "runs" / "a")
    with serving(tmp_path / "runs") as address:
        for path in ("runs/../../secret", "runs/..%2f..%2fsecret", "events/..%2fsecret"):
            status, body = get(address + path)
            assert status in (400, 404)
            assert "journal" not in body


@pytest.mark.parametrize("words", [["nowhere"], ["."]], ids=["missing", "taken"])
def test_what_cannot_be_served_is_an_error_of_one_line(tmp_path: Path, words: list[str]) -> None:
    port = ["--port", "0"]
    if words == ["."]:
        words = [str(tmp_path)]
        port = ["--port", "1", "--host", "192.0.2.1"]
    seen = run_stepguard("serve", *words, *port)
    assert seen.returncode == 2
    assert seen.stderr.startswith("stepguard: error: ")
    assert len(seen.stderr.splitlines()) == 1
