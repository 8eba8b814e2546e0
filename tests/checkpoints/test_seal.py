"""The seal: every byte of it is proven, and its size is bounded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.disk.states import GOOD

from checkpoints.kit import saved
from stepguard._errors import StoreError
from stepguard.checkpoints import Store, read_seal, seal


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    saved(Store(tmp_path), 1)
    return tmp_path / "step-1"


def test_seal_larger_than_any_is_not_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seal, "LARGEST", 100)
    with pytest.raises(StoreError, match="more than 100 are not read"):
        read_seal(checkpoint)


@pytest.mark.slow
def test_seal_of_many_tensors_is_written_and_read(tmp_path: Path) -> None:
    tensors = {f"model/{i}": torch.tensor([float(i)]) for i in range(4000)}
    store = Store(tmp_path)
    store.save(1, tensors, {}, GOOD)
    assert store.open().tensors["model/3999"].item() == 3999.0


def test_every_flipped_byte_of_a_seal_is_noticed(checkpoint: Path) -> None:
    content = (checkpoint / "seal.json").read_bytes()
    for place in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[place] ^= 1
        with pytest.raises(StoreError, match="seal"):
            seal.parse_seal(bytes(damaged), checkpoint)


def test_seal_of_a_later_version_asks_for_an_upgrade(checkpoint: Path) -> None:
    later = replace(read_seal(checkpoint), schema=seal.SCHEMA + 1)
    with pytest.raises(StoreError, match="upgrade"):
        seal.parse_seal(seal.seal_bytes(later), checkpoint)
