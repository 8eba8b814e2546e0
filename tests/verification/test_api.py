"""`stepguard.verify`: paths that hold nothing, and learning rates that contradict."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import stepguard
from verification import saved


def test_path_that_does_not_exist_is_an_error_of_usage(tmp_path: Path) -> None:
    with pytest.raises(stepguard.ConfigError, match="does not exist"):
        stepguard.verify(tmp_path / "nothing.pt")


class TestLearningRate:
    def test_one_cycle_compares_the_peak(self, tmp_path: Path) -> None:
        path = saved.save_zip(tmp_path / "m.pt", saved.trained())
        assert stepguard.verify(path, lr=5e-4).ok
        (error,) = stepguard.verify(path, lr=1e-4).errors
        assert error.kind == "lr" and "OneCycleLR" in error.detail and "0.0005" in error.detail
        assert not stepguard.verify(path, lr=1e-4).corrupt

    def test_plain_optimizer_compares_its_rate(self, tmp_path: Path) -> None:
        parameter = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        path = saved.save_zip(tmp_path / "m.pt", {"optimizer": optimizer.state_dict()})
        assert stepguard.verify(path, lr=0.1).ok
        assert [error.kind for error in stepguard.verify(path, lr=0.2).errors] == ["lr"]

    def test_schedule_compares_its_base(self, tmp_path: Path) -> None:
        parameter = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
        optimizer.step()
        scheduler.step()
        path = saved.save_zip(
            tmp_path / "m.pt",
            {"optimizer": optimizer.state_dict(), "sched": scheduler.state_dict()},
        )
        assert stepguard.verify(path, lr=0.1).ok
        (error,) = stepguard.verify(path, lr=0.3).errors
        assert "initial_lr" in error.detail and "running at" in error.detail

    def test_file_without_a_rate_is_not_compared(self, tmp_path: Path) -> None:
        assert stepguard.verify(saved.save_zip(tmp_path / "m.pt", {"w": torch.ones(3)}), lr=0.1).ok

    @pytest.mark.parametrize("lr", [0.0, -1.0, float("nan"), float("inf")])
    def test_rate_that_is_none_is_refused(self, tmp_path: Path, lr: float) -> None:
        with pytest.raises(stepguard.ConfigError, match="learning rate"):
            stepguard.verify(tmp_path, lr=lr)
