"""What lies in a folder of checkpoints, and what `last-good` names."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoints.kit import saved
from stepguard._errors import StoreError
from stepguard.checkpoints import Store, seal


def test_every_flipped_bit_of_the_pointer_is_noticed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    saved(store, 1, 2, 3)
    whole = (tmp_path / "last-good").read_bytes()
    for bit in range(8 * len(whole)):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        (tmp_path / "last-good").write_bytes(content)
        opened = store.open()
        assert (opened.step, len(opened.passed_over)) == (3, 1), bit


def test_entries_are_listed_newest_first_and_damaged_ones_apart(tmp_path: Path) -> None:
    saved(Store(tmp_path), 1, 10, 9)
    (tmp_path / "step-1" / "seal.json").unlink()
    listed, damaged = seal.list_entries(tmp_path)
    assert [entry.path.name for entry in listed] == ["step-9", "step-10"]
    assert [each.path.name for each in damaged] == ["step-1"]


def test_only_temporary_files_of_writers_are_leftovers(tmp_path: Path) -> None:
    for name in (".step-2.17-0.tmp", ".last-good.17-1.tmp", ".step-7.tmp", "step-3", "notes.tmp"):
        (tmp_path / name).mkdir()
    found = [path.name for path in seal.leftovers(tmp_path)]
    assert found == [".last-good.17-1.tmp", ".step-2.17-0.tmp"]


def test_pointer_to_a_checkpoint_that_was_sealed_again_is_refused(tmp_path: Path) -> None:
    saved(Store(tmp_path), 1)
    assert seal.read_pointer(tmp_path) == tmp_path / "step-1"
    (tmp_path / "last-good").write_bytes(f"step-1 {'0' * 32}\n".encode())
    with pytest.raises(StoreError, match="another seal"):
        seal.read_pointer(tmp_path)
