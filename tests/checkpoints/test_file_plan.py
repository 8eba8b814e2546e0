"""How tensors lie in safetensors files, and which cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.disk.states import GOOD
from torch import Tensor

from stepguard._errors import StoreError
from stepguard.checkpoints import Store, files


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


def test_header_is_aligned_and_wide_elements_come_first() -> None:
    forms = {
        "a": files.TensorForm(torch.float16, (3,)),
        "b": files.TensorForm(torch.float64, (2,)),
        "c": files.TensorForm(torch.complex64, (5,)),
    }
    (plan,) = files.plan_files(forms)
    assert list(plan.starts) == ["b", "c", "a"] and len(plan.header) % 8 == 0
    assert plan.size == len(plan.header) + 16 + 40 + 6
    assert files.plan_file(plan.name, plan.starts, forms) == plan


def test_files_are_split_by_size_and_none_is_empty_but_the_only_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(files, "FILE_BYTES", 100)
    forms = {name: files.TensorForm(torch.float32, (20,)) for name in "abc"}
    assert [list(plan.starts) for plan in files.plan_files(forms)] == [["a"], ["b"], ["c"]]
    assert [list(plan.starts) for plan in files.plan_files({})] == [[]]
