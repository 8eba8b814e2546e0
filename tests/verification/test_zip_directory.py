"""The directory of a zip: limits, and entries that lie."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import pytest

from stepguard.check import torch_file
from stepguard.check.scan import Damaged, open_file


def test_zip_directory_beyond_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "many.zip", "w") as archive:
        for number in range(100):
            archive.writestr(f"a/{number}", b"")
    monkeypatch.setattr("stepguard.check.torch_file.LARGEST_INDEX", 2000)
    with open_file(tmp_path / "many.zip") as window, pytest.raises(Damaged, match="zip directory"):
        torch_file.zip_records(window)


def zip_of(path: Path, **entries: bytes) -> dict[str, torch_file.ZipRecord]:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(f"archive/{name}", content)
    with open_file(path) as source:
        return torch_file.zip_records(source)


def test_entries_are_named_without_their_folder_and_found_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.zip"
    found = zip_of(path, first=b"abc", second=b"defgh")
    assert sorted(found) == ["first", "second"]
    for name, content in (("first", b"abc"), ("second", b"defgh")):
        record = found[name].stored()
        assert path.read_bytes()[record.start : record.start + record.size] == content
        assert record.crc == zlib.crc32(content)


def test_compressed_entry_is_listed_but_never_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/a", bytes(1000))
    with open_file(tmp_path / "m.zip") as source:
        record = torch_file.zip_records(source)["a"]
    assert record.size == 1000 and not record.is_stored
    with pytest.raises(Damaged, match="not unpacked"):
        record.stored()


def test_directory_that_was_cut_off_is_torn(tmp_path: Path) -> None:
    zip_of(tmp_path / "m.zip", a=b"abc")
    content = (tmp_path / "m.zip").read_bytes()
    (tmp_path / "m.zip").write_bytes(content[:-10])
    with open_file(tmp_path / "m.zip") as source, pytest.raises(Damaged) as caught:
        torch_file.zip_records(source)
    assert caught.value.kind == "torn"
