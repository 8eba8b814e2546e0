"""A minimal guarded loop: just enough of a guard to hand real bad steps to `locate`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from stepguard.locate import locate
from stepguard.records import Origin, Reading
from stepguard.state.batch import Step, total_loss
from stepguard.state.buffers import BufferKeeper, keeps_statistics
from stepguard.state.rng import capture_rng


@dataclass
class Loop:
    """Runs steps until one is bad, then returns what `locate` says about it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: Callable[[Any], Any]
    modules: dict[str, nn.Module] | None = None
    clip: float | None = None
    scaler: torch.amp.GradScaler | None = None
    lr: float | None = None
    last: tuple[Step, Reading] | None = None
    losses: tuple[float, ...] = ()
    sharded: bool = False

    def step(self, index: int, micro_batches: Sequence[Any]) -> Origin | None:
        """None for a healthy step, which is then committed."""
        modules = self.modules or {}
        keeper = BufferKeeper([self.model, *modules.values()])
        keeper.remember()
        scale = float(self.scaler.get_scale()) if self.scaler else 1.0
        record = Step(
            index,
            self.model,
            self.optimizer,
            modules,
            keeper,
            self.loss_fn,
            tuple(micro_batches),
            scale=scale,
            sharded=self.sharded,
        )
        record.clip_norm = self.clip
        bad = bad_state(record)
        self.optimizer.zero_grad()
        losses = []
        for batch in micro_batches:
            record.rng.append(capture_rng())
            loss = total_loss(self.loss_fn(batch))
            (loss * scale).backward()
            losses.append(float(loss.detach()))
        reading = self._read(record, index, losses, bad, scale)
        if self._alarming(reading):
            keeper.restore()
            return self._locate(record, reading)
        return self._commit(record, reading, scale)

    def _read(
        self, step: Step, index: int, losses: list[float], bad: list[str], scale: float
    ) -> Reading:
        grads = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        names = tuple(n for n, g in grads.items() if not bool(torch.isfinite(dense(g)).all()))
        norm = torch.linalg.vector_norm(
            torch.cat([dense(g).float().abs().flatten() for g in grads.values()]) / scale
        )
        return Reading(
            step=index,
            loss=sum(losses),
            micro_losses=tuple(losses),
            grads_finite=not names,
            bad_grads=names,
            grad_norm=float(norm),
            bad_state=tuple(bad),
            scale=scale,
            lr=tuple(g["lr"] for g in self.optimizer.param_groups),
        )

    def _alarming(self, reading: Reading) -> bool:
        if not math.isfinite(reading.loss or 0.0) or reading.bad_state:
            return True
        if not reading.grads_finite:
            return True
        return math.isinf(reading.grad_norm or 0.0)

    def _locate(self, step: Step, reading: Reading) -> Origin:
        self.last = (step, reading)
        return locate(step, reading)

    def _commit(self, step: Step, reading: Reading, scale: float) -> Origin | None:
        weights = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        state = copy.deepcopy(self.optimizer.state_dict())
        for p in self.model.parameters():
            if p.grad is not None and scale != 1.0:
                p.grad /= scale
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        bad = bad_state(step)
        if not bad:
            return None
        with torch.no_grad():
            for n, p in self.model.named_parameters():
                p.copy_(weights[n])
        self.optimizer.load_state_dict(state)
        step.buffers.restore()
        return self._locate(step, replace(reading, bad_state=tuple(bad), state_born=True))


def dense(tensor: Tensor) -> Tensor:
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def bad_state(step: Step) -> list[str]:
    """Names of parameters, norm buffers and optimizer slots that are not finite."""
    model = step.model
    found = [f"param:{n}" for n, p in model.named_parameters() if not bool(torch.isfinite(p).all())]
    for name, module in model.named_modules():
        for key, buffer in module.named_buffers(recurse=False):
            if keeps_statistics(module) and not bool(torch.isfinite(buffer).all()):
                found.append(f"buffer:{name}.{key}".replace(":.", ":"))
    for slots in step.optimizer.state.values():
        for slot, value in slots.items():
            if isinstance(value, Tensor) and not bool(torch.isfinite(value).all()):
                found.append(f"opt:{slot}")
    return list(dict.fromkeys(found))
