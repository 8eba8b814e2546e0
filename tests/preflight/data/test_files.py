"""Data files: what is wrong by file name, and nothing in them is run."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from preflight.asking import said
from stepguard.check.data import as_tensors
from stepguard.check.preflight import Subject, check
from stepguard.records.checks import Preflight


def scan(path: Path) -> Preflight:
    return check(Subject(data=path), only=["data"])


def test_unreadable_files_are_named_and_nothing_in_them_runs(tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (marker,))

    np.save(tmp_path / "pickled.npy", np.array([Evil()], dtype=object), allow_pickle=True)
    (tmp_path / "plain.npy").write_bytes(pickle.dumps(Evil()))
    np.save(tmp_path / "cut.npy", np.ones(100))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "cut.npy").read_bytes()[:200])
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 64)
    (tmp_path / "ragged.csv").write_text("a,b\n1\n")
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n{"a": \n')
    result = scan(tmp_path)
    outcome = result.outcome("data.unreadable")
    assert outcome.status == "fail"
    assert "6 examples of 7" in outcome.evidence[0]
    assert "bad.jsonl (ValueError: line 2" in outcome.evidence[0]
    assert not marker.exists()


def test_images_are_read_where_pillow_is(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(tmp_path / "black.png")
    image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(tmp_path / "fine.png")
    whole = (tmp_path / "fine.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    result = scan(tmp_path)
    assert "black.png [image] = 0 in all 192 places" in said(result, "data.constant")
    assert "cut.png" in said(result, "data.unreadable")


def test_image_of_floats_may_hold_nan(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.arange(64, dtype=np.float32).reshape(8, 8)
    image.fromarray(pixels).save(tmp_path / "fine.tiff")
    pixels[2, 3] = np.nan
    image.fromarray(pixels).save(tmp_path / "bad.tif")
    told = said(scan(tmp_path), "data.finite")
    assert "bad.tif [image]: NaN at [2, 3], 1 of 64 values" in told
    assert "fine.tiff" not in told


def test_parquet_is_read_or_its_library_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    np.save(tmp_path / "fine.npy", np.arange(20.0))
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    result = scan(tmp_path)
    assert ".parquet files need pyarrow: pip install pyarrow" in said(result, "data.unreadable")


def test_rows_of_a_parquet_file_are_named(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(
        arrow.table({"x": [1.0, float("nan"), 3.0], "y": [1, None, 2]}), tmp_path / "t.parquet"
    )
    result = scan(tmp_path)
    assert "t.parquet:1 [x] is NaN" in said(result, "data.finite")
    assert "y: 1 of 3 (t.parquet:1)" in said(result, "data.missing")


def test_hidden_files_are_left_out_and_other_kinds_counted(tmp_path: Path) -> None:
    for name in ("b.csv", "a.npy", "notes.txt", ".hidden.npy"):
        (tmp_path / name).touch()
    np.save(tmp_path / "a.npy", np.arange(20.0))
    (tmp_path / "b.csv").write_text("x\n1\n")
    first, second = scan(tmp_path).outcome("data.unreadable").evidence
    assert first.startswith("2 examples of the folder")
    assert second == "1 files of other kinds were not read"


def test_everything_numeric_of_an_example_is_a_tensor_by_its_dotted_key() -> None:
    values = {"a": [1, 2], "b": {"c": 2**70, "text": "x"}, "d": [torch.ones(2), None], "e": True}
    found = dict(as_tensors(values))
    assert list(found) == ["a", "b.c", "d.0", "e"]
    assert found["b.c"].dtype is torch.float64
