"""The seam to the disk: what is replaced is replaced in one step, and every change is one numbered
operation.
"""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from benchmarks.disk.faults import Failing, Recorder

from stepguard.state.files import DISK, new_folder, write_file


def test_file_is_replaced_and_no_sibling_stays(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "file.json"
    write_file(path, b"old")
    write_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert [p.name for p in path.parent.iterdir()] == ["file.json"]


@pytest.mark.parametrize("kind", ["create", "write", "sync", "rename"])
def test_failing_replacement_leaves_the_old_file_and_nothing_else(
    kind: str, tmp_path: Path
) -> None:
    write_file(tmp_path / "file", b"old")
    with pytest.raises(OSError, match="No space left on device"):
        write_file(tmp_path / "file", b"new", Failing(kind, code=errno.ENOSPC))
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("file", b"old")]


def test_content_is_synced_before_the_rename_and_the_folder_after_it(tmp_path: Path) -> None:
    disk = Recorder()
    write_file(tmp_path / "file", b"content", disk)
    assert [op.kind for op in disk.operations] == [
        "create",
        "write",
        "sync",
        "rename",
        "sync_folder",
    ]


def test_new_folders_are_made_durable_from_above(tmp_path: Path) -> None:
    disk = Recorder()
    disk.make_folders(tmp_path / "a" / "b")
    assert [(op.kind, op.path.name) for op in disk.operations] == [
        ("mkdir", "a"),
        ("sync_folder", tmp_path.name),
        ("mkdir", "b"),
        ("sync_folder", "a"),
    ]


def test_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with new_folder(tmp_path / "made") as inside:
        (inside / "file").write_text("x")
        assert not (tmp_path / "made").exists()
    with pytest.raises(KeyError), new_folder(tmp_path / "broken") as inside:
        (inside / "file").write_text("x")
        raise KeyError
    assert [p.name for p in tmp_path.iterdir()] == ["made"]


def test_new_file_never_goes_through_a_link_or_over_a_file(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("there", "link"):
        with pytest.raises(FileExistsError):
            DISK.new_file(tmp_path / name)
    assert (tmp_path / "there").read_text() == "mine" and not (tmp_path / "elsewhere").exists()


def test_tree_is_removed_without_following_links(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("x")
    (tmp_path / "tree" / "deep").mkdir(parents=True)
    (tmp_path / "tree" / "deep" / "link").symlink_to(tmp_path / "mine")
    disk = Recorder()
    disk.rmtree(tmp_path / "tree")
    assert [op.kind for op in disk.operations] == ["unlink", "rmdir", "rmdir"]
    assert (tmp_path / "mine" / "file").exists()
