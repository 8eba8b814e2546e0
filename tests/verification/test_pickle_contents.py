"""Walking the value of a pickle: names, roles, steps and learning rates."""

from __future__ import annotations

import math
from typing import Any

import pytest

from stepguard.verification import bounded_file
from stepguard.verification.bounded_file import ProblemList
from stepguard.verification.pickle_globals import PickledObject, StorageRecord, TensorRecord
from stepguard.verification.pickle_machine import PickleContents, walk


def tensor(dtype: str = "float32", *, parameter: bool = False) -> TensorRecord:
    return TensorRecord(StorageRecord("0", dtype, 1), dtype, 0, (1,), (1,), parameter)


def walked(root: Any) -> tuple[PickleContents, list[str]]:
    problems = ProblemList("m.pt")
    return walk(root, problems), [problem.kind for problem in problems.all()]


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
    assert found.rates == [("lr_scheduler/base_lrs/0", "base_lr", 0.5)]
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
    for _ in range(bounded_file.MOST_DEPTH + 2):
        deep = [deep]
    assert walked(deep)[1] == ["limit"]
    monkeypatch.setattr(bounded_file, "MOST_NODES", 10)
    assert walked([tensor()] * 20)[1] == ["limit"]
