"""The scan of the data: files, datasets, streams and loaders; nothing in them is run."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from check.asking import said
from stepguard import ConfigError
from stepguard.check.data import as_tensors
from stepguard.check.preflight import Subject, check
from stepguard.records.checks import Outcome, Preflight


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
    assert result.outcome("data.unreadable").status == "pass"
    assert "1 file of other kinds not read" in said(result, "data.unreadable")


def test_data_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing does not exist"):
        scan(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="holds no file that can be read"):
        scan(tmp_path)


class Stream(IterableDataset[Any]):
    """Endless."""

    def __iter__(self) -> Iterator[Any]:
        index = 0
        while True:
            yield {"x": torch.tensor([float(index), torch.nan if index == 5 else 0.0])}
            index += 1


def finding(item: str, **parts: Any) -> Outcome:
    return check(Subject(**parts), only=[item]).outcome(item)


def test_stream_and_its_loader_are_read_up_to_the_given_number() -> None:
    (found,) = finding("data.finite", dataset=Stream(), examples=10).evidence
    assert "10 examples" in found and "5 [x]: NaN at [1]" in found
    loader = DataLoader(Stream(), batch_size=4)
    (found,) = finding("data.finite", loader=loader, examples=8).evidence
    assert "batch 1, row 1 [x]: NaN at [1]" in found


def test_same_content_under_another_name_is_a_leak(tmp_path: Path) -> None:
    train, validation = tmp_path / "train", tmp_path / "validation"
    for path in (train / "a.npy", train / "b.npy", validation / "c.npy"):
        path.parent.mkdir(exist_ok=True)
        np.save(path, np.arange(20.0))
    result = check(Subject(data=train, validation=validation), only=["data"])
    assert "c.npy = a.npy" in said(result, "data.leak")


def test_input_beyond_the_dtype_of_the_step_fails() -> None:
    rows = [{"x": torch.tensor([1.0, 7e4])}]
    found = finding("data.range", model=torch.nn.Linear(2, 1).half(), dataset=rows)
    assert found.status == "fail"
    assert "7e+04 in 0 is infinite in float16" in found.evidence[0]


def test_progress_and_scope_follow_the_examples() -> None:
    class Rows(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            if index == 1:
                raise OSError("gone")
            return super().__getitem__(index)

    told: list[tuple[int, int | None]] = []
    rows = Rows([{"x": 1.5}, {}, {"x": None}, *({"x": float(n)} for n in range(5))])
    result = check(
        Subject(dataset=rows, examples=3),
        only=["data"],
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert "the first 3 of 8 examples of the dataset" in said(result, "data.finite")
    assert said(result, "data.unreadable") == "1 example of 3: 1 (OSError: gone)"


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


def test_everything_numeric_of_an_example_is_a_tensor_by_its_dotted_key() -> None:
    values = {"a": [1, 2], "b": {"c": 2**70, "text": "x"}, "d": [torch.ones(2), None], "e": True}
    found = dict(as_tensors(values))
    assert list(found) == ["a", "b.c", "d.0", "e"]
    assert found["b.c"].dtype is torch.float64


def test_labels_of_a_jsonl_file_are_counted(tmp_path: Path) -> None:
    rows = [{"labels": [-100, 3]}, {"labels": [-100, -100]}, {"labels": [4, 5]}]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = finding("labels.empty", data=path).evidence
    assert first == "1 example of 3 without a target other than -100: chats.jsonl:2"
    assert second == "3 of 6 targets count"
    given = finding("labels.empty", data=tmp_path, label_key="labels")
    assert "1 example of 3" in given.evidence[0]


@pytest.mark.parametrize("between", [(), (torch.tensor(7),)])
def test_the_last_part_of_a_tuple_is_the_target(between: tuple[torch.Tensor, ...]) -> None:
    rows = [(torch.rand(4), *between, torch.tensor(n % 3)) for n in range(12)]
    assert "12 of 12 targets count" in finding("labels.empty", dataset=rows).evidence[0]
    real = [(torch.rand(4), torch.rand(1)) for _ in range(12)]
    assert finding("labels.empty", dataset=real).status == "not_applicable"


class Augmented(Dataset[Any]):
    """Other values at every reading."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return 10.0 * index + torch.randn(4), index % 2


def leak_of(training: Any, validation: Any) -> tuple[str, str]:
    result = check(Subject(dataset=training, validation=validation), only=["data.leak"])
    return result.outcome("data.leak").status, said(result, "data.leak")


def test_rows_of_one_data_set_are_known_by_their_index_whatever_augments_them() -> None:
    data = Augmented()
    train = Subset(data, range(30))
    status, text = leak_of(train, DataLoader(Subset(data, range(25, 40))))
    assert status == "fail" and text.startswith("5 rows of 15")
    assert leak_of(data, Subset(data, range(25, 40)))[0] == "fail"
    assert leak_of(train, Subset(data, range(30, 40)))[0] == "pass"


def test_equal_rows_of_few_values_are_a_warning() -> None:
    few = [(torch.tensor([row % 3, row % 2]), 0) for row in range(60)]
    status, text = leak_of(few, few[:10])
    assert status == "warn" and "repeat" in text
    other = [(torch.randn(3), 0) for _ in range(60)]
    assert leak_of([*other, few[0]], few[:1])[0] == "fail"
