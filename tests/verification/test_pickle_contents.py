"""Walking the value of a pickle: names, roles, steps and learning rates."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from stepguard.check import torch_file
from stepguard.check.inert_pickle import PickledObject, StorageRecord, TensorRecord
from stepguard.check.scan import SIZES, FileLayout
from stepguard.check.torch_file import walk


def tensor(dtype: str = "float32", *, parameter: bool = False) -> TensorRecord:
    storage = StorageRecord("0", dtype, 1, start=0, held=SIZES[dtype])
    return TensorRecord(storage, "", 0, (1,), (1,), parameter)


def walked(root: Any) -> tuple[FileLayout, list[str]]:
    layout = FileLayout(Path("m.pt"))
    walk(layout, root)
    return layout, [problem.kind for problem in layout.problems()]


def roles(root: Any) -> dict[str, str]:
    return {found.name: found.role for found in walked(root)[0].tensors}


def test_state_dict_is_a_model() -> None:
    state = {"w": tensor(), "bn.running_mean": tensor(), "mask": tensor("bool")}
    assert roles(state) == {"w": "parameter", "bn.running_mean": "buffer", "mask": "buffer"}


def test_parts_of_a_checkpoint_are_told_apart() -> None:
    root = {
        "model": {"w": tensor()},
        "optimizer": {"state": {0: {"exp_avg": tensor()}}, "param_groups": [{"lr": 0.1}]},
        "ema": {"w": tensor()},
        "loose": tensor(),
    }
    assert roles(root) == {
        "model/w": "parameter",
        "optimizer/state/0/exp_avg": "optimizer",
        "ema/w": "ema",
        "loose": "other",
    }


def test_step_rates_and_odd_numbers_are_taken() -> None:
    schedule = {"last_epoch": 3, "_step_count": 4, "base_lrs": [0.5], "factor": math.nan}
    found, _ = walked({"global_step": 7, "lr_scheduler": schedule, "note": "x"})
    assert found.step == 7
    (rate,) = found.rates
    assert (rate.file, rate.name, rate.kind) == ("m.pt", "lr_scheduler/base_lrs/0", "base_lr")
    assert [(name, role) for name, role, _ in found.numbers] == [
        ("lr_scheduler/factor", "scheduler")
    ]


def test_module_that_was_pickled_whole_has_short_names() -> None:
    inner = PickledObject("Linear", (), {"_parameters": {"weight": tensor(parameter=True)}})
    outer = PickledObject("Net", (), {"_modules": {"fc": inner}, "_buffers": {"b": tensor()}})
    assert roles(outer) == {"fc/weight": "parameter", "_buffers/b": "buffer"}


def test_list_that_holds_itself_ends() -> None:
    endless: list[Any] = [tensor()]
    endless.append(endless)
    assert len(walked(endless)[0].tensors) == 1


def test_walk_is_limited_in_depth_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    deep: Any = tensor()
    for _ in range(torch_file.MOST_DEPTH + 2):
        deep = [deep]
    assert walked(deep)[1] == ["limit"]
    monkeypatch.setattr(torch_file, "MOST_VALUES", 10)
    assert walked([tensor()] * 20)[1] == ["limit"]


def test_first_step_of_several_pickles_stays() -> None:
    layout = FileLayout(Path("m.pt"))
    for root in ({}, {"step": 0}, {"step": 9}):
        walk(layout, root)
    assert layout.step == 0
