"""What the Lightning tests share: a tiny module with natural failures, fixed data, a Trainer in its
folder.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import stepguard
from stepguard import GuardConfig, Incident

FEATURES, CLASSES, ROWS = 6, 3, 4
STEPS, BAD = 8, 4
IGNORED = -100
QUIET = GuardConfig(terminal="quiet")
Batch = dict[str, Tensor]
OWN_WARNINGS = [
    pytest.mark.filterwarnings(f"ignore:.*{said}")
    for said in (
        "LeafSpec",
        "does not have many workers",
        "is not empty",
        "is not resumable",
        "no-op metric",
        "dataloader_iter",
    )
]
"""What Lightning itself warns of here, whether guarded or not."""


def batches(count: int = STEPS) -> list[Batch]:
    source = torch.Generator().manual_seed(7)
    return [
        {
            "x": torch.randn(ROWS, FEATURES, generator=source),
            "y": torch.randint(CLASSES, (ROWS,), generator=source),
        }
        for _ in range(count)
    ]


def with_nan(data: list[Batch], at: int = BAD, row: int = 2) -> list[Batch]:
    bad = copy.deepcopy(data)
    bad[at]["x"][row, 1] = torch.nan
    return bad


def all_masked(data: list[Batch], at: int = BAD) -> list[Batch]:
    bad = copy.deepcopy(data)
    bad[at]["y"][:] = IGNORED
    return bad


def waking(data: list[Batch], at: int = BAD) -> list[Batch]:
    """A part of the model takes part for the first time, and gets a gradient of exactly zero."""
    bad = copy.deepcopy(data)
    bad[at]["extra"] = torch.zeros(ROWS, FEATURES)
    return bad


class Batches(Dataset[Batch]):
    """Batches as they are, one an item."""

    def __init__(self, data: list[Batch]) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Batch:
        return self._data[index]


class Net(LightningModule):
    """BatchNorm and Dropout, a learning rate for each step; a plain loop calls `loss` too."""

    def __init__(
        self,
        *,
        eps: float = 1e-8,
        fused: bool = False,
        optimizer: str = "adamw",
        noisy: bool = True,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        middle: list[nn.Module] = [nn.BatchNorm1d(8), nn.Dropout(0.1)] if noisy else []
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), *middle, nn.Linear(8, CLASSES))
        self.extra = nn.Linear(FEATURES, CLASSES, bias=False)
        self._eps, self._fused, self._kind = eps, fused, optimizer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def loss(self, batch: Batch) -> Tensor:
        scores = self(batch["x"])
        if "extra" in batch:
            scores = scores + self.extra(batch["extra"])
        kept = batch["y"] != IGNORED
        chances = F.log_softmax(scores.float(), dim=-1).gather(1, batch["y"].clamp(min=0)[:, None])[
            :, 0
        ]
        return -(chances * kept).sum() / kept.sum()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer: torch.optim.Optimizer
        if self._kind == "sgd":
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        else:
            # an epsilon that float16 can hold, but for the part that wakes up late
            late = {"params": list(self.extra.parameters()), "eps": self._eps}
            groups = [{"params": list(self.net.parameters())}, *([late] if late["params"] else [])]
            optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4, fused=self._fused)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=100)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def trainer(folder: Path, *callbacks: Callback, **settings: Any) -> Trainer:
    """One epoch on one CPU, everything logged and checkpointed at every step, nothing printed."""
    saves = ModelCheckpoint(folder / "saves", save_last=True, save_top_k=1, every_n_train_steps=1)
    return Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "default_root_dir": folder,
            "logger": CSVLogger(folder, name="", version=""),
            "log_every_n_steps": 1,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": [saves, *callbacks],
            **settings,
        }
    )


def fit(trainer: Trainer, module: LightningModule, data: Iterable[Batch], **settings: Any) -> None:
    trainer.fit(module, DataLoader(Batches(list(data)), batch_size=None), **settings)


def run(
    folder: Path, module: LightningModule, data: list[Batch], *callbacks: Callback, **settings: Any
) -> Trainer:
    torch.manual_seed(1)
    made = trainer(folder, *callbacks, **settings)
    fit(made, module, data)
    return made


def last(folder: Path) -> dict[str, Any]:
    """`last.ckpt` as written."""
    loaded: dict[str, Any] = torch.load(folder / "saves" / "last.ckpt", weights_only=False)
    return loaded


def learned(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What must be finite in a checkpoint; ModelCheckpoint's own bookkeeping holds an infinity from
    the start.
    """
    return {
        key: checkpoint.get(key, {}) for key in ("state_dict", "optimizer_states", "lr_schedulers")
    }


def bad_tensors(state: Any, name: str = "") -> list[str]:
    """Names of every non-finite tensor in something nested."""
    if isinstance(state, Tensor):
        return [] if bool(torch.isfinite(state).all()) else [name]
    pairs = (
        state.items()
        if isinstance(state, dict)
        else enumerate(state)
        if isinstance(state, list | tuple)
        else ()
    )
    return [bad for key, value in pairs for bad in bad_tensors(value, f"{name}.{key}")]


def everything(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """All a step may change, copied."""
    return copy.deepcopy(
        {
            "module": dict(module.state_dict()),
            "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
            "schedules": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "precision": trainer.precision_plugin.state_dict(),
            "random": torch.get_rng_state(),
        }
    )


def logged(folder: Path) -> list[dict[str, str]]:
    """Rows of the CSV log."""
    import csv

    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def plain_loop(module: Net, data: Iterable[Batch], *, half: bool = False) -> tuple[Incident, ...]:
    """The same module, optimizer and batches without Lightning: what `guard.step` finds."""
    module = module.half() if half else module
    setup = module.configure_optimizers()
    with stepguard.Guard(
        module, setup["optimizer"], scheduler=setup["lr_scheduler"]["scheduler"], config=QUIET
    ) as g:
        for batch in data:
            g.step(
                module.loss,
                {k: v.half() if half and v.is_floating_point() else v for k, v in batch.items()},
            )
        return g.incidents
