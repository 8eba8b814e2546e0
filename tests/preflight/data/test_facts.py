"""Facts of one pass over the data: bad values, repetitions, leaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from preflight.asking import said
from stepguard.check.preflight import Subject, check


def test_same_content_under_two_names_is_a_duplicate_and_a_leak(tmp_path: Path) -> None:
    for split in ("train", "validation"):
        (tmp_path / split).mkdir()
    np.save(tmp_path / "train" / "a.npy", np.arange(20.0))
    np.save(tmp_path / "train" / "b.npy", np.arange(20.0))
    np.save(tmp_path / "validation" / "c.npy", np.arange(20.0))
    result = check(
        Subject(data=tmp_path / "train", validation=tmp_path / "validation"), only=["data"]
    )
    assert "b.npy = a.npy" in said(result, "data.duplicates")
    assert "c.npy = a.npy" in said(result, "data.leak")


def test_input_beyond_the_dtype_of_the_step_fails() -> None:
    model = torch.nn.Linear(2, 1).half()
    rows = [{"x": torch.tensor([1.0, 7e4])}]
    result = check(Subject(model=model, dataset=rows), only=["data.range"])
    assert result.outcome("data.range").status == "fail"
    assert "7e+04 in 0 is infinite in float16" in said(result, "data.range")


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
    assert said(result, "data.missing") == "empty values in x: 1 of 2 (2)"
