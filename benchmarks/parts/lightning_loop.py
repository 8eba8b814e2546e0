"""Lightning's Trainer as a loop to be measured: the same Llama, clipping and schedule as in the
other frameworks.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from typing import Any

import torch

from benchmarks.parts.framework_loops import Clock, Size, Spent, llama, rows


class LightningLoop:
    """Automatic optimization: clipping, a linear schedule and a CSV log line every ten steps."""

    def __init__(self, size: Size, *, fused: bool) -> None:
        self.what = f"Lightning Trainer, AdamW {'fused' if fused else 'foreach'}"
        self._folder = tempfile.TemporaryDirectory(prefix="stepguard-bench-")
        self._size, self._fused = size, fused
        self._model, self._rows = llama(size), rows(size, 64)

    def run(self, steps: int, *, guarded: bool) -> list[Spent]:
        from lightning.pytorch import Trainer
        from lightning.pytorch.loggers import CSVLogger
        from torch.utils.data import DataLoader

        from stepguard import GuardConfig
        from stepguard.integrations.lightning import GuardCallback

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        module, clock = _module(self._model, fused=self._fused), Clock()
        callback = GuardCallback(GuardConfig(terminal="quiet"))
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=steps,
            gradient_clip_val=1.0,
            log_every_n_steps=10,
            logger=CSVLogger(self._folder.name),
            default_root_dir=self._folder.name,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[_mark(clock), *([callback] if guarded else [])],
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(module, DataLoader(self._rows, batch_size=self._size.rows, shuffle=False))
        callback.close()
        return clock.take()

    def close(self) -> None:
        self._folder.cleanup()


def _module(model: Any, *, fused: bool) -> Any:
    from lightning.pytorch import LightningModule

    class Language(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.model(**batch).loss
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-5, fused=fused)
            schedule = torch.optim.lr_scheduler.LinearLR(
                optimizer, start_factor=1.0, end_factor=0.1, total_iters=1000
            )
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            }

    return Language()


def _mark(clock: Clock) -> Any:
    from lightning.pytorch import Callback

    class Mark(Callback):
        def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
            clock.mark()

    return Mark()
