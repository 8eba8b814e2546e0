"""A file seen through windows: exact reads, nothing beyond the end, nothing but regular files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stepguard.verification.bounded_file import BUFFER, ZipSource, open_file
from stepguard.verification.damage import Damaged


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(bytes(range(256)) * 4096 + b"line\nrest")
    return tmp_path / "file"


def test_reads_are_exact_across_the_buffer(path: Path) -> None:
    content = path.read_bytes()
    with open_file(path) as window:
        taken = b"".join(window.read(size) for size in (1, 5, BUFFER - 3, 1, BUFFER + 7))
        assert taken == content[: len(taken)] and window.tell() == len(taken)
        assert window.byte() == content[len(taken)]
        window.seek(len(content) - 9)
        assert window.line(100) == b"line" and window.read(4) == b"rest" and window.left == 0


def test_more_than_there_is_is_torn_and_not_allocated(path: Path) -> None:
    with open_file(path) as window:
        for read in (window.read, window.skip):
            with pytest.raises(Damaged, match="ends at byte") as caught:
                read(1 << 50)
            assert caught.value.kind == "torn"
        with pytest.raises(Damaged):
            window.part(10, window.size)


def test_line_without_an_end_is_malformed(path: Path) -> None:
    with open_file(path) as window:
        window.seek(window.size - 4)
        with pytest.raises(Damaged, match="no end"):
            window.line(100)


def test_zip_reader_gets_no_more_than_the_limit(path: Path) -> None:
    with open_file(path) as window:
        file = ZipSource(window, 1000)
        assert len(file.read(999)) == 999
        with pytest.raises(Damaged, match="zip directory") as caught:
            file.read(5000)
        assert caught.value.kind == "limit"
        file.seek(0, os.SEEK_END)
        assert file.read(50) == b""


def test_file_that_shrinks_while_it_is_read_is_torn(path: Path) -> None:
    with open_file(path) as window:
        os.truncate(path, 100)
        with pytest.raises(Damaged, match="shorter"):
            window.read(1000)


@pytest.mark.parametrize("kind", ["folder", "missing"])
def test_what_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path if kind == "folder" else tmp_path / "missing"
    with pytest.raises(Damaged) as caught, open_file(path):
        pass
    assert caught.value.kind == "unreadable"
