"""A file seen through windows: exact reads, nothing beyond the end, nothing but regular files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stepguard.check.scan import BUFFER, Damaged, open_file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(bytes(range(256)) * 4096 + b"line\nrest")
    return tmp_path / "file"


def test_reads_are_exact_across_the_buffer(path: Path) -> None:
    content = path.read_bytes()
    with open_file(path) as window:
        reader = window.part(3, window.size - 3).reader()
        taken = b"".join(reader.read(size) for size in (1, 5, BUFFER - 3, 1, BUFFER + 7))
        assert taken == content[3 : 3 + len(taken)] and reader.tell() == len(taken)
        reader.seek(-9, os.SEEK_END)
        assert reader.readline() == b"line\n" and reader.read(40) == b"rest"
        assert window.exactly(len(content) - 9, 4) == b"line"


def test_more_than_there_is_is_torn_and_not_allocated(path: Path) -> None:
    with open_file(path) as window:
        with pytest.raises(Damaged, match="ends at byte") as caught:
            window.exactly(0, 1 << 50)
        assert caught.value.kind == "torn"
        with pytest.raises(Damaged):
            window.part(10, window.size)


def test_file_that_shrinks_while_it_is_read_is_torn(path: Path) -> None:
    with open_file(path) as window:
        os.truncate(path, 100)
        with pytest.raises(Damaged, match="shorter"):
            window.exactly(0, 1000)


@pytest.mark.parametrize("kind", ["folder", "missing"])
def test_what_is_not_a_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path if kind == "folder" else tmp_path / "missing"
    with pytest.raises(Damaged) as caught, open_file(path):
        pass
    assert caught.value.kind == "unreadable"
