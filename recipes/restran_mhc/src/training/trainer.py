"""The training loop of the reader, as it was (`original`) and under stepguard (`stable`)."""

from __future__ import annotations

import csv
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR
from tqdm import tqdm

from configs.config import Config
from src.data.plates import Plates, spelled
from src.models.restran import ResTran, read
from stepguard import Guard, GuardConfig, Policy
from stepguard.numerics import ctc_loss

Batch = tuple[Tensor, Tensor]


@dataclass(slots=True)
class History:
    """What a run leaves behind in memory."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    alphas: list[float] = field(default_factory=list)
    epochs: list[dict[str, float]] = field(default_factory=list)


class Trainer:
    """One run. `guard` is None in the original loop."""

    def __init__(self, config: Config, *, save: bool = True) -> None:
        torch.manual_seed(config.SEED)
        torch.backends.cudnn.benchmark = config.USE_CUDNN_BENCHMARK
        self.config, self._save = config, save
        self.model = ResTran(config)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.LEARNING_RATE, weight_decay=config.WEIGHT_DECAY
        )
        self.scheduler = OneCycleLR(self.optimizer, config.LEARNING_RATE, total_steps=self.total_steps)
        self.plates = Plates(config, config.SEED)
        self.history = History()
        self.step = 0
        self.best = -1.0
        self.guard = self._guard() if config.GUARD == "stable" else None

    @property
    def total_steps(self) -> int:
        return self.config.EPOCHS * self.config.STEPS_PER_EPOCH

    def _guard(self) -> Guard:
        policy = Policy(actions=("stop",)) if self.config.ON_NAN == "stop" else Policy()
        run_dir = Path(self.config.OUTPUT_DIR) / "run" if self._save else None
        settings = GuardConfig(
            clip_norm=self.config.GRAD_CLIP, run_dir=run_dir, policy=policy, lr=self.config.LEARNING_RATE
        )
        return Guard(self.model, self.optimizer, scheduler=self.scheduler, config=settings)

    def train(self, *, bar: bool = True) -> History:
        """All epochs; ends early when the validation accuracy has stopped improving."""
        stale = 0
        try:
            for epoch in range(self.config.EPOCHS):
                self.check_parameters(epoch + 1, say=bar)
                facts = self.one_epoch(epoch + 1, bar=bar)
                stale = 0 if facts["val_acc"] > self.best else stale + 1
                self._keep_best(facts["val_acc"])
                if stale >= self.config.EARLY_STOPPING:
                    break
        except KeyboardInterrupt:
            tqdm.write(f"stopped by Ctrl+C; {self.save('interrupted')}")
            raise
        finally:
            if self.guard is not None:
                self.guard.close()
        return self.history

    def check_parameters(self, epoch: int, *, say: bool = True) -> list[str]:
        """Parameters, buffers and optimizer state before an epoch; the names of those that are not finite."""
        if say:
            tqdm.write(f"🔍 Checking model parameters before epoch {epoch}...")
        named = dict(self.model.state_dict())
        for index, state in enumerate(self.optimizer.state.values()):
            named.update({f"optimizer.{index}.{k}": v for k, v in state.items() if isinstance(v, Tensor)})
        bad = [name for name, tensor in named.items() if not bool(torch.isfinite(tensor).all())]
        if say:
            tqdm.write(f"🔴 {len(bad)} tensors are not finite, first {bad[0]}" if bad else "✅ Model parameters OK")
        return bad

    def one_epoch(self, epoch: int, *, bar: bool) -> dict[str, float]:
        """Its steps, then the validation."""
        config, begin = self.config, len(self.history.losses)
        shown = tqdm(range(config.STEPS_PER_EPOCH), desc=f"Ep {epoch}/{config.EPOCHS}", disable=not bar)
        for _ in shown:
            loss = self.one_step(self.plates.draw(config.BATCH_SIZE))
            rate = self.optimizer.param_groups[0]["lr"]
            shown.set_postfix(loss=f"{loss:.3f}", lr=f"{rate:.2e}")
        losses = self.history.losses[begin:]
        accuracy, value = self.validate()
        facts = {
            "epoch": float(epoch),
            "train_loss": sum(losses) / len(losses),
            "val_loss": value,
            "val_acc": accuracy,
            "lr": float(self.optimizer.param_groups[0]["lr"]),
        }
        self.history.epochs.append(facts)
        self._write_history()
        return facts

    def one_step(self, batch: Batch) -> float:
        """Guarded, or as the original has it."""
        if self.guard is not None:
            result = self.guard.step(self.loss, batch)
            if result.incident is not None:
                self._tell()
            loss, norm = float(result.loss), float(result.grad_norm)
        else:
            loss, norm = self._original_step(batch)
        self.step += 1
        self.history.losses.append(loss)
        self.history.norms.append(norm)
        self.history.alphas.append(self.largest_alpha())
        return loss

    def _original_step(self, batch: Batch) -> tuple[float, float]:
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.GRAD_CLIP)
        self.optimizer.step()
        if self.step < self.total_steps:
            self.scheduler.step()
        return float(loss.detach()), float(norm)

    def loss(self, batch: Batch) -> Tensor:
        """CTC over the plates of a batch."""
        frames, texts = batch
        log_probabilities = self.model(frames)
        number, times = log_probabilities.shape[:2]
        lengths = torch.full((number,), times), torch.full((number,), texts.shape[1])
        return ctc_loss(log_probabilities.transpose(0, 1), texts + 1, *lengths)

    def _tell(self) -> None:
        """What the probes saw in the last forward pass, first the origin."""
        for sighting in self.model.probes.sightings:
            tqdm.write(str(sighting))

    def largest_alpha(self) -> float:
        """The largest gate of all hyper-connections; above 1 the routing is unstable."""
        gates = [p.detach().abs().max() for name, p in self.model.named_parameters() if ".alpha_" in name]
        return float(torch.stack(gates).max()) if gates else 0.0

    @torch.no_grad()
    def validate(self) -> tuple[float, float]:
        """Share of plates read right, and the loss, on plates never trained on."""
        plates = Plates(self.config, seed=99)
        frames, texts = plates.draw(self.config.VALIDATION_PLATES)
        self.model.eval()
        found, loss = read(self.model(frames)), float(self.loss((frames, texts)))
        self.model.train()
        right = sum(a == b for a, b in zip(found, spelled(texts), strict=True))
        return right / len(found), loss

    def _keep_best(self, accuracy: float) -> None:
        if accuracy > self.best:
            self.best = accuracy
            self.save("best")

    def save(self, name: str) -> str:
        """`<experiment>_<name>.pth`, whole or not at all; guarded, only if the state is good. Returns what to say."""
        if not self._save:
            return ""
        if self.guard is not None and self.check_parameters(0, say=False):
            return f"{name} NOT saved: the state is not finite; the one before it stays"
        folder = Path(self.config.OUTPUT_DIR)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.config.EXPERIMENT}_{name}.pth"
        torch.save(self.model.state_dict(), path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)
        return f"saved {path.name}"

    def _write_history(self) -> None:
        if not self._save:
            return
        folder = Path(self.config.OUTPUT_DIR)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"history_{self.config.EXPERIMENT}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(self.history.epochs[0]))
            writer.writeheader()
            writer.writerows(self.history.epochs)

    def healthy(self) -> bool:
        return all(math.isfinite(x) for x in self.history.losses)


def state_of(trainer: Trainer) -> dict[str, Any]:
    """Everything a resumed run loads, as the original's resume does: optimizer and schedule included."""
    return {
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.scheduler.state_dict(),
        "step": trainer.step,
    }
