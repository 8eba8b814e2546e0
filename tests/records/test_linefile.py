"""Lines are in the file wholly or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stepguard.records.codec import LineFile


def test_half_a_line_of_a_crash_is_ended_by_the_next_line(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntw")
    file = LineFile(path)
    file.append(b"three\n", durable=True)
    file.close()
    assert path.read_bytes() == b"one\ntw\nthree\n"


def test_line_that_does_not_fit_the_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = LineFile(tmp_path / "lines")
    file.append(b"one\n")
    write = os.write
    room = [2]

    def full(fd: int, data: bytes) -> int:
        if not room:
            raise OSError(28, "No space left on device")
        return write(fd, data[: room.pop()])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        file.append(b"two\n")
    monkeypatch.undo()
    file.append(b"three\n")
    file.close()
    assert (tmp_path / "lines").read_bytes() == b"one\nthree\n"


def test_deleted_file_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "lines"
    path.parent.mkdir()
    file = LineFile(path)
    file.append(b"one\n")
    path.unlink()
    path.parent.rmdir()
    file.append(b"two\n")
    file.close()
    assert path.read_bytes() == b"two\n"
