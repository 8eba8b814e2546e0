"""How tensors lie in safetensors files, and which cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.disk.states import GOOD
from torch import Tensor

from stepguard._errors import StoreError
from stepguard.checkpoints import Store, files, read_seal


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (
            torch.eye(3).to_sparse(),
            r"m cannot be kept in a checkpoint: it has the layout torch.sparse_coo; hand over",
        ),
        (torch.empty(3, device="meta"), "m cannot be kept in a checkpoint: it has no plain memory"),
        (3.0, "m is a float, not a tensor; plain values belong into the facts"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_way_out(
    tensor: Tensor, words: str, tmp_path: Path
) -> None:
    with pytest.raises(StoreError, match=words):
        Store(tmp_path).save(1, {"m": tensor}, {}, GOOD)


def test_name_reserved_by_the_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        StoreError, match="__metadata__ cannot be kept in a checkpoint: it has the one name"
    ):
        Store(tmp_path).save(1, {"__metadata__": torch.ones(1)}, {}, GOOD)


def test_header_is_aligned_and_wide_elements_come_first(tmp_path: Path) -> None:
    tensors = {
        "a": torch.ones(3, dtype=torch.float16),
        "b": torch.ones(2, dtype=torch.float64),
        "c": torch.ones(5, dtype=torch.complex64),
    }
    path = Store(tmp_path).save(1, tensors, {}, GOOD)
    sealed = read_seal(path).tensors
    start = sealed["b"].start
    assert start % 8 == 0
    assert (sealed["c"].start, sealed["a"].start) == (start + 16, start + 56)
    assert (path / sealed["a"].file).stat().st_size == start + 62


def test_files_are_split_by_size_and_none_is_empty_but_the_only_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(files, "FILE_BYTES", 100)
    store = Store(tmp_path)
    path = store.save(1, {name: torch.ones(20) for name in "abc"}, {}, GOOD)
    assert len({sealed.file for sealed in read_seal(path).tensors.values()}) == 3
    assert len(list(path.glob("*.safetensors"))) == 3
    path = store.save(2, {}, {}, GOOD)
    assert len(list(path.glob("*.safetensors"))) == 1
    assert store.open(path).tensors == {}
