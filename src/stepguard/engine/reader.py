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

from stepguard.engine.context import Context
from stepguard.records import Reading
from stepguard.sentinel.gradients import GradientNorm, gradient_norm
from stepguard.sentinel.packet import Packet
from stepguard.sentinel.risky_update import is_custom
from stepguard.sentinel.stored_tensors import (
    RotatingScan,
    extremes,
    largest,
    norm_statistics,
    state_tensors,
)
from stepguard.state.batch import named_tensors
from stepguard.state.step import total_loss
from stepguard.tensors.names import named_buffers
from stepguard.tensors.values import is_finite


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
    followed: tuple[str, ...] = ()
    """Names of the last numbers of the packet: what the user follows, which makes no step bad."""
    tensors: int = 0
    """Numbers after those: the norm of each gradient, where outliers are looked for."""
    others_bad: bool = False
    """Once read: another optimizer that steps from the same backward has gradients that are not
    finite.
    """

    def suspect(self) -> Tensor:
        """On the device: 1 when anything watched is non-finite on any rank, else 0."""
        values = self.packet.values[
            : self.packet.values.numel() - len(self.followed) - self.tensors
        ]
        own = ~torch.isfinite(values).all()
        flags = values[self.micro + len(self.parts) + len(self.names) :]
        others = flags[flags.numel() // 2 :].gt(0).any()
        return (own | others).to(torch.float32)


def micro_loss(output: Any, batch: Any, context: Context) -> tuple[Tensor, MicroLoss]:
    """The scalar to call backward on, and what is remembered of it."""
    loss = total_loss(output)
    parts = {str(k): v.detach() for k, v in output.items()} if isinstance(output, Mapping) else {}
    return loss, MicroLoss(loss.detach(), parts, count_labels(batch, context))


def count_labels(batch: Any, context: Context) -> Tensor | None:
    """How many targets of the batch are not ignored; None where nobody said which of its tensors
    they are.
    """
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
        self._started = self._checked = False
        self._left_out = 0
        self._turn = RotatingScan()
        loading = context.optimizer.register_load_state_dict_post_hook(self._loaded)
        context.resources.callback(loading.remove)

    def start(self) -> None:
        """Before the first update: parameters and optimizer state join the first packet."""
        context = self._context
        if not self._checked:
            self._checked = True
            self._state = self._largest([*context.parameters, *state_tensors(context.optimizer)])
        if self._started:
            return
        self._started = True
        statistics = {id(buffer) for buffer in norm_statistics(context.roots)}
        others = [(n, b) for n, b in named_buffers(context.roots) if id(b) not in statistics]
        seen = [(name, extremes(context.buffers.remembered(buffer))) for name, buffer in others]
        context.first_buffers = [(name, found) for name, found in seen if found is not None]

    def _loaded(self, optimizer: Optimizer) -> None:
        """State was loaded in mid-run: all of it is looked at again before the next update."""
        self._checked = False

    def after_update(self) -> None:
        """A cheap look at the new parameters, of a large model some in turn; read with the next
        step's packet.
        """
        self._state = largest(self._turn.share(self._context.parameters, self._context.ignored))

    def rewound(self) -> None:
        """The parameters are others now: all of them are looked at with the next packet."""
        context = self._context
        self._state = self._largest([*context.parameters, *state_tensors(context.optimizer)])

    def announce(self, loss: Tensor) -> None:
        """Before backward: what only this rank can see travels to the others with the gradients."""
        agreement = self._context.agreement
        if agreement.mode == "spread":
            own = (loss, self._state, self._largest(self._context.buffers.statistics()))
            agreement.announce([value for value in own if value is not None])

    def _largest(self, tensors: list[Tensor]) -> Tensor | None:
        ignored = self._context.ignored
        return largest([t for t in tensors if id(t) not in ignored] if ignored else tensors)

    def last_update_finite(self) -> bool:
        """A look at everything after the last update, which no further step will read. Waits for
        the device.
        """
        state = self._largest(self._context.parameters)
        return state is None or math.isfinite(Packet([state]).fetch()[0])

    def issue(
        self,
        losses: list[MicroLoss],
        norm: GradientNorm | None = None,
        others: Tensor | None = None,
    ) -> Pending:
        """Gather everything of this step into one packet. Waits for nothing.

        `others`: the norm of the gradients of other optimizers that step from the same backward.
        """
        context = self._context
        context.agreement.announced()
        if len(context.ignored) != self._left_out:
            self._left_out = len(context.ignored)
            self.after_update()  # the last look still saw what has been accepted since
        if norm is None:
            grads = [p.grad for p in context.parameters if p.grad is not None]
            norm = gradient_norm(grads, each=is_custom(context.optimizer))
        parts = tuple(dict.fromkeys(part for m in losses for part in m.parts))
        values = [m.total for m in losses] + [
            _added([m.parts[p] for m in losses if p in m.parts]) for p in parts
        ]
        named = {
            "norm": norm.total if norm is not None else None,
            "least": norm.least if norm is not None else None,
            "buffers": self._largest([*context.buffers.statistics(), *context.buffers.written()]),
            "state": self._state,
            "scale": _scale(context),
            "labels": _added([m.labels for m in losses if m.labels is not None])
            if _labelled(losses)
            else None,
            "others": others,
        }
        names = [name for name, value in named.items() if value is not None]
        values += [value for value in named.values() if value is not None]
        if not values:
            values = [torch.zeros(())]
        followed = {
            name: value for name, (step, value) in context.followed.items() if step == context.step
        }
        each = context.outliers.measure(context.parameters) if context.outliers is not None else []
        packet = Packet(values + self._reduced(losses, named) + list(followed.values()) + each)
        clip, last = context.config.clip_norm, tuple(followed)
        return Pending(
            context.step, packet, names, norm, context.lr, len(losses), parts, clip, last, len(each)
        )

    def _reduced(self, losses: list[MicroLoss], named: dict[str, Tensor | None]) -> list[Tensor]:
        """What all ranks saw, where that takes a reduction: the same few numbers on each, whatever
        each one reads.
        """
        if self._context.agreement.mode != "collective":
            return []
        loss = _added([m.total for m in losses]) if losses else None
        local = [loss, named["norm"], named["buffers"], named["state"]]
        device = next(v.device for v in [*local, torch.zeros(())] if v is not None)
        zero = torch.zeros((), device=device)
        line = torch.stack([zero if v is None else v.detach().reshape(()).to(zero) for v in local])
        shared = self._context.agreement.reduce(line, self._context.step)
        return [] if shared is None else list(shared.unbind())

    def complete(self, pending: Pending, *, grads_gone: bool = False) -> Reading:
        """Wait for the numbers and name them. Gradients that are gone cannot be looked at element
        by element.
        """
        context = self._context
        numbers = self._without_tensors(pending, pending.packet.fetch())
        micro = tuple(numbers[: pending.micro])
        parts = dict(zip(pending.parts, numbers[pending.micro :], strict=False))
        rest = dict(zip(pending.names, numbers[pending.micro + len(parts) :], strict=False))
        end = len(numbers) - len(pending.followed)
        shared = numbers[pending.micro + len(parts) + len(rest) : end]
        now = time.perf_counter()
        seconds, context.last_read = now - context.last_read, now
        context.effort.took(seconds)
        norm = rest.get("norm")
        pending.others_bad = not math.isfinite(rest.get("others", 0.0))
        return Reading(
            step=pending.index,
            loss=sum(micro) if micro else None,
            micro_losses=micro,
            components=parts,
            followed=dict(zip(pending.followed, numbers[end:], strict=True)),
            grad_norm=norm,
            least_norm=rest.get("least"),
            grads_finite=norm is None
            or math.isfinite(norm)
            or (not grads_gone and self._exactly_finite()),
            clip_factor=_clip_factor(norm, pending.clip_norm),
            scale=rest.get("scale", context.loss_scale if context.config.loss_scale else None),
            lr=pending.lr,
            climbs=context.maximizes,
            labels=int(rest["labels"]) if "labels" in rest else None,
            seconds=seconds,
            shared_loss=shared[0] if shared and micro else None,
            alarm=any(shared[len(shared) // 2 :]),
            bad_state=tuple(k for k in ("state", "buffers") if not math.isfinite(rest.get(k, 0.0))),
        )

    def _without_tensors(self, pending: Pending, numbers: list[float]) -> list[float]:
        if self._context.outliers is None or not pending.tensors:
            return numbers
        carried = getattr(self._context.optimizer, "grad_scale", None)
        scale = float(carried) if carried is not None else 1.0
        self._context.outliers.read(pending.index, numbers[-pending.tensors :], scale)
        return numbers[: -pending.tensors]

    def _exactly_finite(self) -> bool:
        return all(p.grad is None or is_finite(p.grad) for p in self._context.parameters)


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
