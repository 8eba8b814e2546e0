"""What a page is sent: everything once, from where it is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cli.journals import write_run
from stepguard.journal import Journal
from stepguard.records import Reading
from stepguard.report import serve as app
from stepguard.report.serve import PageProgress, RunFollower


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "EVERY", 0.0)
    monkeypatch.setattr(app, "REST", 0.0)


def test_place_is_read_back_and_nonsense_is_not() -> None:
    place = PageProgress(2, 17, "1-2-3")
    assert PageProgress.parse(str(place)) == place
    for text in ("", "1", "1:", "a:1:", "1:-1:", "1:1e3:"):
        assert PageProgress.parse(text) is None


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


def test_another_run_in_the_folder_is_told_without_rows(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    following = RunFollower(run, "run")
    place, _ = asyncio.run(following.since(PageProgress(1, 0, ""), "0"))
    write_run(run)
    now, message = asyncio.run(following.since(place, "0"))
    assert now.number == 2 and message == {}


def test_document_says_where_further_rows_come_from(tmp_path: Path) -> None:
    following = RunFollower(write_run(tmp_path / "run"), "run")
    document = asyncio.run(following.document("/events/run"))
    assert document["live"] == {"events": "/events/run?journal=0"}
    assert document["runs"][0]["incidents"][0]["step"] == 8


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
    assert again["live"] == {"events": "/events/run?journal=1"}
