"""Whole pickle files: the old format of torch.save, and pickles inside pickles."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stepguard.verification.bounded_file import open_file
from stepguard.verification.damage import Damaged
from stepguard.verification.pickle_stream import is_legacy, read_legacy, read_value
from stepguard.verification.pickle_values import Global, TensorRecord
from verification import hostile, saved


def test_storages_of_the_old_format_are_found_in_the_file(tmp_path: Path) -> None:
    tensor = torch.arange(6, dtype=torch.float32)
    path = saved.save_legacy(tmp_path / "m.pt", {"w": tensor})
    with open_file(path) as source:
        assert is_legacy(source)
        stream = read_legacy(source)
    (where,) = stream.storages.values()
    assert path.read_bytes()[where.start : where.start + where.size] == tensor.numpy().tobytes()
    record = stream.value["w"]
    assert isinstance(record, TensorRecord) and record.shape == (6,)


def test_old_format_that_was_cut_off_is_torn(tmp_path: Path) -> None:
    path = saved.save_legacy(tmp_path / "m.pt", {"w": torch.ones(6)})
    path.write_bytes(path.read_bytes()[:-1])
    with open_file(path) as source, pytest.raises(Damaged) as caught:
        read_legacy(source)
    assert caught.value.kind == "torn"


def test_names_of_a_pickle_in_a_pickle_are_those_of_the_stream(tmp_path: Path) -> None:
    path = tmp_path / "m.pkl"
    path.write_bytes(hostile.RUNS_CODE["pickle in a storage"](tmp_path / "canary"))
    with open_file(path) as source:
        globals_seen = read_value(source)[1]
    outside = Global("torch.storage", "_load_from_bytes")
    assert outside in globals_seen
    assert any(called for name, called in globals_seen.items() if name != outside)
    assert not (tmp_path / "canary").exists()
