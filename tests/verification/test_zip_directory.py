"""The directory of a zip: limits, and entries that lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepguard.verification.bounded_file import open_file
from stepguard.verification.damage import Damaged
from stepguard.verification.zip_directory import records


def test_zip_directory_beyond_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "many.zip", "w") as archive:
        for number in range(100):
            archive.writestr(f"a/{number}", b"")
    monkeypatch.setattr("stepguard.verification.limits.LARGEST_DIRECTORY", 2000)
    with open_file(tmp_path / "many.zip") as window, pytest.raises(Damaged, match="zip directory"):
        records(window)
