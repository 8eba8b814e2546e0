"""Which runs a server finds, and that no name leads anywhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.journals import write_run
from stepguard._errors import JournalError
from stepguard.report.serve import RunFolders


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_run(tmp_path / "secret")
    write_run(tmp_path / "runs" / "a")
    write_run(tmp_path / "runs" / "group" / "b")
    (tmp_path / "runs" / "empty").mkdir()
    return tmp_path / "runs"


def test_runs_below_a_folder_are_found_by_their_paths(runs: Path) -> None:
    folders = RunFolders(runs)
    assert folders.names() == ["a", "group/b"]
    assert folders.path("group/b") == (runs / "group" / "b").resolve()


def test_a_run_itself_is_the_only_one(runs: Path) -> None:
    folders = RunFolders(runs / "a")
    assert folders.single
    assert folders.names() == ["a"]
    assert folders.path("a") == (runs / "a").resolve()
    assert folders.path("../group/b") is None


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
        "empty",
        "a\0b",
        "..\\secret",
        "a//b",
    ],
)
def test_no_other_name_opens_anything(runs: Path, name: str) -> None:
    assert RunFolders(runs).path(name) is None


def test_absolute_names_and_links_out_of_the_folder_are_refused(runs: Path) -> None:
    (runs / "link").symlink_to(runs.parent / "secret")
    folders = RunFolders(runs)
    assert folders.path(str(runs.parent / "secret")) is None
    assert folders.path("link") is None
    assert "link" not in folders.names()


def test_a_file_is_no_folder(runs: Path) -> None:
    with pytest.raises(JournalError, match="is not a folder; give a run directory"):
        RunFolders(runs / "a" / "journal.jsonl")
