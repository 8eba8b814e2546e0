"""Which runs a server finds, and that no name leads anywhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.journals import write_run
from stepguard._errors import JournalError
from stepguard.journal import is_run, runs_below
from stepguard.report.serve import build_app


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_run(tmp_path / "secret")
    write_run(tmp_path / "runs" / "a")
    write_run(tmp_path / "runs" / "group" / "b")
    (tmp_path / "runs" / "empty").mkdir()
    return tmp_path / "runs"


def test_runs_below_a_folder_are_found_by_their_paths(runs: Path) -> None:
    folders = runs_below(runs)
    assert list(folders) == ["a", "group/b"]
    assert folders.get("group/b") == (runs / "group" / "b").resolve()


def test_a_run_itself_is_the_only_one(runs: Path) -> None:
    folders = runs_below(runs / "a")
    assert is_run(runs / "a") and not is_run(runs)
    assert list(folders) == ["a"]
    assert folders.get("a") == (runs / "a").resolve()
    assert folders.get("../group/b") is None


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
    assert runs_below(runs).get(name) is None


def test_absolute_names_and_links_out_of_the_folder_are_refused(runs: Path) -> None:
    (runs / "link").symlink_to(runs.parent / "secret")
    folders = runs_below(runs)
    assert folders.get(str(runs.parent / "secret")) is None
    assert folders.get("link") is None
    assert "link" not in list(folders)


def test_a_file_is_no_folder(runs: Path) -> None:
    with pytest.raises(JournalError, match="is not a folder; give a run directory"):
        build_app(runs / "a" / "journal.jsonl")
