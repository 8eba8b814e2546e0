"""Whole pickle files: the old format of torch.save, and pickles inside pickles."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stepguard.check.allowed_globals import Global
from stepguard.check.inert_pickle import PickleReader, TensorRecord
from stepguard.check.scan import Damaged, open_file
from verification import hostile, saved


def test_storages_of_the_old_format_are_found_in_the_file(tmp_path: Path) -> None:
    tensor = torch.arange(6, dtype=torch.float32)
    path = saved.save_legacy(tmp_path / "m.pt", {"w": tensor})
    with open_file(path) as source:
        reader = PickleReader(source)
        record = reader.value()["w"]
    assert reader.is_legacy
    (where,) = reader.storages.values()
    assert where.start is not None and where.held == where.size
    assert path.read_bytes()[where.start : where.start + where.size] == tensor.numpy().tobytes()
    assert isinstance(record, TensorRecord) and record.shape == (6,)


def test_old_format_that_was_cut_off_is_torn(tmp_path: Path) -> None:
    path = saved.save_legacy(tmp_path / "m.pt", {"w": torch.ones(6)})
    path.write_bytes(path.read_bytes()[:-1])
    with open_file(path) as source, pytest.raises(Damaged) as caught:
        PickleReader(source).value()
    assert caught.value.kind == "torn"


def test_names_of_a_pickle_in_a_pickle_are_those_of_the_stream(tmp_path: Path) -> None:
    path = tmp_path / "m.pkl"
    path.write_bytes(hostile.RUNS_CODE["pickle in a storage"](tmp_path / "canary"))
    with open_file(path) as source:
        reader = PickleReader(source)
        reader.value()
    outside = Global("torch.storage", "_load_from_bytes")
    assert reader.names == {outside: False, Global("posix", "system"): True}
    assert not (tmp_path / "canary").exists()


def test_bytes_that_many_tensors_share_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.ones(4)
    path = saved.save_pickle(tmp_path / "m.pkl", [tensor, tensor[:2], tensor[1:]])
    again = path.read_bytes().replace(b".", b".")
    path.write_bytes(again)
    read: list[int] = []
    value = PickleReader.value
    monkeypatch.setattr(PickleReader, "value", lambda self: read.append(1) or value(self))
    with open_file(path) as source:
        reader = PickleReader(source)
        reader.value()
    assert len(read) == 1 + len(reader.nested)


@pytest.mark.parametrize("form", ["pickle", "legacy"])
def test_bytes_behind_the_end_are_an_error(tmp_path: Path, form: str) -> None:
    path = saved.ONE_FILE[form](tmp_path / "m.pt", {"w": torch.ones(2)})
    path.write_bytes(path.read_bytes() + hostile.by_reduce(tmp_path / "canary"))
    with open_file(path) as source, pytest.raises(Damaged, match="bytes follow") as caught:
        PickleReader(source).value()
    assert caught.value.kind == "format"
