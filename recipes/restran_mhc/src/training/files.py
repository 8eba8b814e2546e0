"""What a run leaves in its folder, and what a resumed one reads."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

if TYPE_CHECKING:
    from src.training.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Files:
    """`<experiment>_best.pth` (a bare state dict), `<experiment>_last.pth` (everything),
    `history_<experiment>.csv`.
    """

    folder: Path
    experiment: str

    def write(self, name: str, state: Any) -> str:
        """Whole or not at all; returns the file's name."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{self.experiment}_{name}.pth"
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)
        return path.name

    def history(self, epochs: Sequence[dict[str, float]]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"history_{self.experiment}.csv").open(
            "w", newline="", encoding="utf-8"
        ) as file:
            writer = csv.DictWriter(file, list(epochs[0]))
            writer.writeheader()
            writer.writerows(epochs)


def states(trainer: Trainer) -> dict[str, Any]:
    """Everything a resumed run needs, as the original's kind of resume has it."""
    return {
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.scheduler.state_dict(),
        "scaler": trainer.scaler.state_dict(),
        "plates": trainer.plates.generator.get_state(),
        "step": trainer.step,
        "best": trainer.best,
        "config": asdict(trainer.config),
    }


class OneCycle(OneCycleLR):
    """Stays at its end; torch's takes one step more than it has rates, and the rate rises again."""

    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch + 1 < self.total_steps:
            super().step(epoch)


def use_rate(optimizer: Optimizer, rate: float) -> None:
    """Another peak for OneCycleLR, which keeps its rates in the optimizer's groups."""
    for group in optimizer.param_groups:
        factor = rate / group["max_lr"]
        for key in ("lr", "initial_lr", "max_lr", "min_lr"):
            group[key] *= factor


def not_finite(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Names of parameters, buffers and optimizer state that hold NaN or Inf."""
    named = dict(model.state_dict())
    for index, state in enumerate(optimizer.state.values()):
        named.update(
            {
                f"optimizer.{index}.{key}": value
                for key, value in state.items()
                if isinstance(value, Tensor)
            }
        )
    return [name for name, tensor in named.items() if not bool(torch.isfinite(tensor).all())]
