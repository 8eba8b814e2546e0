"""From tensors on the device to a Reading on the host, through one packet."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stepguard._errors import ConfigError
from stepguard.engine.context import Context
from stepguard.records import Reading
from stepguard.sentinel.gradients import GradientNorm, finite, gradient_norm
from stepguard.sentinel.packet import Packet
from stepguard.sentinel.stored import FirstLook, largest, norm_statistics, state_tensors
from stepguard.state.batch import named_tensors
from stepguard.state.step import total_loss


@dataclass(slots=True)
class MicroLoss:
    """The loss of one micro-batch as it was before backward."""

    total: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)
    labels: Tensor | None = None


@dataclass(slots=True)
class Pending:
    """A step whose numbers are on their way."""

    index: int
    packet: Packet
    names: list[str]
    norm: GradientNorm | None
    lr: tuple[float, ...]
    micro: int
    parts: tuple[str, ...]
    clip_norm: float | None

    def suspect(self) -> Tensor:
        """On the device: 1 when anything watched is non-finite on any rank, else 0."""
        values = self.packet.values
        own = ~torch.isfinite(values).all()
        flags = values[self.micro + len(self.parts) + len(self.names) :]
        others = flags[flags.numel() // 2 :].gt(0).any()
        return (own | others).to(torch.float32)


def micro_loss(output: Any, batch: Any, context: Context) -> tuple[Tensor, MicroLoss]:
    """The scalar to call backward on, and what is remembered of it."""
    loss = total_loss(output)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(f"loss_fn returned {shape}; return one scalar tensor (or named scalars), e.g. loss.mean().")
    parts = {str(k): v.detach() for k, v in output.items()} if isinstance(output, Mapping) else {}
    return loss, MicroLoss(loss.detach(), parts, _count_labels(batch, context))


def _count_labels(batch: Any, context: Context) -> Tensor | None:
    key = context.config.labels_key
    if key is None:
        return None
    for name, tensor in named_tensors(batch):
        if name == key:
            return (tensor != context.config.ignore_index).sum()
    return None


class Reader:
    """Issues one packet a step and turns it into a Reading."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._state: Tensor | None = None
        self._started = False
        recheck = context.optimizer.register_load_state_dict_post_hook(self._loaded)
        context.resources.callback(recheck.remove)

    def start(self) -> None:
        """Before the first step: everything that is stored, optimizer state included, joins the first packet."""
        if self._started:
            return
        self._started = True
        context = self._context
        stored = [*context.parameters, *norm_statistics(context.roots), *state_tensors(context.optimizer)]
        self._state = largest(stored)
        context.first_look = context.first_look or FirstLook(context.roots)

    def _loaded(self, optimizer: Optimizer) -> None:
        """State was loaded in mid-run: look at all of it again before the next update."""
        self._started = False

    def after_update(self) -> None:
        """A cheap look at the new parameters, read with the next step's packet."""
        self._state = largest(self._context.parameters)

    def last_update_finite(self) -> bool:
        """The look after the last update, which no further step will read. Waits for the device."""
        return self._state is None or math.isfinite(Packet([self._state]).fetch()[0])

    def issue(self, losses: list[MicroLoss], norm: GradientNorm | None = None) -> Pending:
        """Gather everything of this step into one packet. Waits for nothing."""
        context = self._context
        if norm is None:
            norm = gradient_norm([p.grad for p in context.parameters if p.grad is not None])
        parts = tuple(losses[0].parts) if losses else ()
        values = [m.total for m in losses] + [_added([m.parts[p] for m in losses if p in m.parts]) for p in parts]
        named = {
            "norm": norm.total if norm is not None else None,
            "buffers": largest(self._watched_buffers()),
            "state": self._state,
            "scale": _scale(context),
            "labels": _added([m.labels for m in losses if m.labels is not None]) if _labelled(losses) else None,
        }
        names = [name for name, value in named.items() if value is not None]
        values += [value for value in named.values() if value is not None]
        if not values:
            values = [torch.zeros(())]
        packet = Packet(values + self._reduced(losses, named))
        return Pending(context.step, packet, names, norm, context.lr, len(losses), parts, context.config.clip_norm)

    def _watched_buffers(self) -> list[Tensor]:
        """Running statistics of norm layers, and whatever else this step's forward wrote into a buffer."""
        context, look = self._context, self._context.first_look
        written = [b for b in context.buffers.written() if look is None or not look.known(b)]
        watched = {id(b): b for b in [*norm_statistics(context.roots), *written]}
        return list(watched.values())

    def _reduced(self, losses: list[MicroLoss], named: dict[str, Tensor | None]) -> list[Tensor]:
        """What all ranks saw, where that takes a reduction: the same few numbers on each, whatever each one reads."""
        if self._context.agreement.mode != "collective":
            return []
        loss = _added([m.total for m in losses]) if losses else None
        local = [loss, named["norm"], named["buffers"], named["state"]]
        device = next(v.device for v in [*local, torch.zeros(())] if v is not None)
        zero = torch.zeros((), device=device)
        line = torch.stack([zero if v is None else v.detach().reshape(()).to(zero) for v in local])
        shared = self._context.agreement.reduce(line)
        return [] if shared is None else list(shared.unbind())

    def complete(self, pending: Pending) -> Reading:
        """Wait for the numbers and name them."""
        context = self._context
        numbers = pending.packet.fetch()
        micro = tuple(numbers[: pending.micro])
        parts = dict(zip(pending.parts, numbers[pending.micro :], strict=False))
        rest = dict(zip(pending.names, numbers[pending.micro + len(parts) :], strict=False))
        shared = numbers[pending.micro + len(parts) + len(rest) :]
        now = time.perf_counter()
        seconds, context.last_read = now - context.last_read, now
        norm = rest.get("norm")
        return Reading(
            step=pending.index,
            loss=sum(micro) if micro else None,
            micro_losses=micro,
            components=parts,
            grad_norm=norm,
            grads_finite=norm is None or math.isfinite(norm) or self._exactly_finite(),
            clip_factor=_clip_factor(norm, pending.clip_norm),
            scale=rest.get("scale", context.loss_scale if context.config.loss_scale else None),
            lr=pending.lr,
            labels=int(rest["labels"]) if "labels" in rest else None,
            seconds=seconds,
            shared_loss=shared[0] if shared and micro else None,
            alarm=any(shared[len(shared) // 2 :]),
            bad_state=tuple(k for k in ("state", "buffers") if not math.isfinite(rest.get(k, 0.0))),
        )

    def _exactly_finite(self) -> bool:
        return all(p.grad is None or finite(p.grad) for p in self._context.parameters)


def _added(values: list[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.stack([v.reshape(()) for v in values]).sum()


def _labelled(losses: list[MicroLoss]) -> bool:
    return any(m.labels is not None for m in losses)


def _scale(context: Context) -> Tensor | None:
    """GradScaler's scale as a device tensor; `get_scale` would wait for the device."""
    if not context.scaling() or context.scaler is None:
        return None
    return context.scaler._get_scale_async()


def _clip_factor(norm: float | None, clip_norm: float | None) -> float | None:
    if norm is None or clip_norm is None or not math.isfinite(norm):
        return None
    return min(1.0, clip_norm / (norm + 1e-6))
