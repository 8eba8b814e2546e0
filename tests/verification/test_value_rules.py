"""What is judged a problem, what a warning, and what is normal in healthy checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import stepguard
from stepguard.records.checks import Problem
from verification import saved


def problems(path: Path, state: object) -> list[Problem]:
    return list(stepguard.verify(saved.save_zip(path / "m.pt", state)).problems)


def judged(path: Path, state: object) -> list[tuple[str, str]]:
    return [(problem.kind, problem.severity) for problem in problems(path, state)]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("w.weight", torch.full((40, 40), 1e30).fill_diagonal_(1), [("magnitude", "error")]),
        ("w.weight", torch.rand(40, 40) * 1e10, [("magnitude", "warning")]),
        ("w.weight", torch.rand(40, 40).half() * 60000, [("magnitude", "warning")]),
        ("w.weight", torch.rand(40, 40) * 1e5, []),
        ("w.weight", torch.zeros(40, 40), [("zero", "warning")]),
        ("w.weight", torch.full((40, 40), 0.25), [("constant", "warning")]),
        ("norm.weight", torch.ones(512), []),
        ("norm.bias", torch.zeros(512), []),
        ("q.lora_B.weight", torch.zeros(40, 40), []),
        ("block.proj_out.weight", torch.zeros(40, 40), []),
        ("bn.running_mean", torch.zeros(512), []),
        ("bn.running_var", torch.rand(512) - 0.5, [("negative", "error")]),
        ("bn.running_mean", torch.tensor([1.0, float("nan")]), [("nan", "error")]),
        ("bn.num_batches_tracked", torch.tensor(0), []),
        ("attn.causal_mask", torch.full((9, 9), float("-inf")).triu(1), []),
        ("attn.causal_mask", torch.full((9, 9), float("nan")).triu(1), [("nan", "warning")]),
        ("attn.strange_name", torch.full((9, 9), float("-inf")).triu(1), [("inf", "warning")]),
        ("attn.mask", torch.full((9, 9), torch.finfo(torch.float32).min), []),
        ("attn.bias_table", torch.full((9, 9), torch.finfo(torch.float32).min).triu(1), []),
        ("w.weight", torch.full((9, 9), float("-inf")), [("inf", "error")]),
        ("observer.min_val", torch.tensor(float("inf")), [("inf", "warning")]),
        ("w.weight", torch.full((9, 9), float("inf")), [("inf", "error")]),
        ("w.weight", torch.full((9, 9), float("-inf")).fill_diagonal_(0.5), [("inf", "error")]),
        ("empty", torch.zeros(0, 7), []),
        ("scalar", torch.tensor(3.0), []),
    ],
)
def test_judgement_of_one_tensor(
    tmp_path: Path, name: str, value: torch.Tensor, expected: list[tuple[str, str]]
) -> None:
    assert judged(tmp_path, {name: value, "other.weight": torch.rand(4, 4)}) == expected


def test_best_score_of_a_callback_may_be_infinite_but_not_nan(tmp_path: Path) -> None:
    state = {"w": torch.rand(4, 4)}
    score = torch.tensor(float("inf"))
    assert (
        judged(tmp_path, {"state_dict": state, "callbacks": {"stop": {"best_score": score}}}) == []
    )
    assert judged(
        tmp_path, {"state_dict": state, "callbacks": {"stop": {"best_score": score * 0}}}
    ) == [("nan", "warning")]


def test_fresh_optimizer_is_normal(tmp_path: Path) -> None:
    state = {
        0: {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros(64, 64),
            "exp_avg_sq": torch.zeros(64, 64),
        }
    }
    groups = [
        {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "params": [0], "growth_rate": float("inf")}
    ]
    assert judged(tmp_path, {"optimizer": {"state": state, "param_groups": groups}}) == []


def test_negative_second_moment_is_an_error(tmp_path: Path) -> None:
    moment = torch.rand(64, 64)
    moment[1, 1] = -0.3
    state = {0: {"step": torch.tensor(3.0), "exp_avg": -torch.rand(64, 64), "exp_avg_sq": moment}}
    (problem,) = problems(tmp_path, {"opt": {"state": state, "param_groups": [{"lr": 1.0}]}})
    assert (problem.kind, problem.tensor, problem.role) == (
        "negative",
        "opt/state/0/exp_avg_sq",
        "optimizer",
    )


def test_plateau_scheduler_may_hold_infinity(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([parameter], lr=0.1))
    assert judged(tmp_path, {"scheduler": scheduler.state_dict()}) == []


def test_many_bad_tensors_are_listed_in_part_and_counted(tmp_path: Path) -> None:
    found = problems(tmp_path, {f"w{n}": torch.tensor([float("nan")]) for n in range(100)})
    assert len(found) == 21 and "80 more" in found[-1].detail
