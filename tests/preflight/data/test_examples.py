"""Examples of files, datasets, streams and loaders, named by file, key and index."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader, IterableDataset

from preflight.asking import said
from stepguard import ConfigError
from stepguard.check.preflight import Subject, check
from stepguard.records.checks import Preflight


def scan(path: Path) -> Preflight:
    return check(Subject(data=path), only=["data"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One bad file of each kind among good ones."""
    rng = np.random.default_rng(0)
    np.save(tmp_path / "good.npy", rng.normal(size=(4, 8)))
    bad = rng.normal(size=(4, 8))
    bad[2, 5] = np.inf
    np.savez(tmp_path / "bad.npz", image=bad, name=np.array("text"))
    save_file({"latent": torch.zeros(4, 8), "other": torch.randn(3)}, tmp_path / "flat.safetensors")
    (tmp_path / "table.csv").write_text("a,b,c\n1,2,x\n2,nan,y\n3,,z\n")
    (tmp_path / "lines.jsonl").write_text('{"a": 1, "v": [1.5, 2.5]}\n{"a": 2, "v": [1e999]}\n')
    (tmp_path / "notes.txt").write_text("not data")
    (tmp_path / ".hidden.npy").write_bytes(b"rubbish")
    return tmp_path


def test_bad_values_are_named_by_file_key_and_place(folder: Path) -> None:
    result = scan(folder)
    assert result.outcome("data.finite").status == "fail"
    text = said(result, "data.finite")
    assert "bad.npz [image]: Inf at [2, 5], 1 of 32 values" in text
    assert "table.csv:3 [b] is NaN" in text
    assert "lines.jsonl:2 [v] is Inf" in text
    assert "flat.safetensors [latent] = 0 in all 32 places" in said(result, "data.constant")
    assert said(result, "data.missing") == "empty values in b: 1 of 3 (table.csv:4)"
    assert result.outcome("data.unreadable").status == "pass"
    assert "1 files of other kinds" in said(result, "data.unreadable")


@pytest.mark.parametrize(
    ("name", "message"),
    [("nothing", "data nothing does not exist"), ("empty", "holds no file that can be read")],
)
def test_data_that_is_not_there_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        scan(Path(name))


class Stream(IterableDataset[Any]):
    """Endless."""

    def __iter__(self) -> Iterator[Any]:
        index = 0
        while True:
            yield {"x": torch.tensor([float(index), torch.nan if index == 5 else 0.0])}
            index += 1


def test_stream_is_read_up_to_the_given_number() -> None:
    result = check(Subject(dataset=Stream(), examples=10), only=["data.finite"])
    assert "10 examples" in said(result, "data.finite") and "5 [x]: NaN at [1]" in said(
        result, "data.finite"
    )


def test_loader_of_a_stream_is_read_row_by_row() -> None:
    loader = DataLoader(Stream(), batch_size=4)
    result = check(Subject(loader=loader, examples=8), only=["data.finite"])
    assert "batch 1, row 1 [x]: NaN at [1]" in said(result, "data.finite")
