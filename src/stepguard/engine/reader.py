"""From tensors on the device to a Reading on the host, through one packet."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stepguard.engine.context import Context
from stepguard.engine.drivers.schedule import takes_found_inf
from stepguard.locate.loss_graph import Expression
from stepguard.locate.origins import summed_in_half_precision
from stepguard.ranks.agreement import REDUCED, RISK
from stepguard.records import Reading
from stepguard.records.incident import reading_of
from stepguard.sentinel.gradients import (
    GradientNorm,
    Packet,
    RotatingScan,
    extremes,
    gradient_norm,
    is_custom,
    largest,
    norm_over_ranks,
    norm_statistics,
    risky_update,
    root_mean_square,
    state_tensors,
)
from stepguard.state.batch import named_tensors, total_loss
from stepguard.state.run_state import extra_tensors
from stepguard.tensors.names import named_buffers
from stepguard.tensors.values import is_finite

GRADIENT = attrgetter("grad")
STORED = ("state", "buffers")
"""Numbers of the packet that are non-finite where a stored tensor is."""

# --- Values that only this rank sees: they must reach the other ranks before any rank waits.


class SeenAlone:
    """Values of this rank for the reduction of a step. Never waits for the device."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._first: dict[tuple[int, str], Tensor] = {}
        """On the device: what every buffer held before the run, by its place."""

    def start(self) -> None:
        """Before the first update: remember what buffers hold, where nobody asks the host."""
        context = self._context
        if context.agreement.mode != "spread" and not takes_found_inf(context.optimizer):
            return
        for root in context.roots.values():
            for module in root.modules():
                for key, buffer in module._buffers.items():
                    first = None
                    if buffer is not None:
                        first = extremes(context.buffers.remembered(buffer))
                    if first is not None:
                        self._first[id(module), key] = first

    def written_buffers(self) -> list[Tensor]:
        """Largest of each buffer that this step's forward wrote, 0 for one infinite on purpose."""
        ignored = self._context.meant.ignored
        found: list[Tensor] = []
        # by place, not by tensor: a forward pass may put another tensor there
        for place, buffer in self._context.buffers.written_at():
            value = largest([buffer]) if id(buffer) not in ignored else None
            if value is None:
                continue
            first = self._first.get(place)
            if first is not None:
                # one that held inf or NaN before the first step is a sentinel, no trouble
                meant = ~torch.isfinite(first).all().to(value.device)
                value = torch.where(meant, torch.zeros_like(value), value)
            found.append(value)
        return found

    def trouble(self) -> Tensor | None:
        """NaN where this rank's learning rate is not finite, or where it has missed an update."""
        if all(map(math.isfinite, self._context.lr)) and not self._context.memory.missed:
            return None
        return torch.tensor(math.nan)

    def risk(self, line: Tensor, least: Tensor | None) -> Tensor:
        """1 where the update of this rank could make NaN of finite gradients, else 0."""
        context = self._context
        if risky_update(context.optimizer, context.lr_ceiling):
            return torch.ones_like(line[0])
        if least is None:
            return torch.zeros_like(line[0])
        # only a custom optimizer has it taken: those divide by the norm of a gradient
        return least.detach().reshape(()).eq(0).to(line)


# --- The numbers of a step that ranks reduce together, and what they mean once they are read.


SQUARES, WITH_LOSS = 1, 2
"""Where the sums of ranks hold the square of the norm and the number of losses."""


class RankNumbers:
    """Four numbers of every rank, always the same ones, in one reduction."""

    def __init__(self, context: Context, alone: SeenAlone) -> None:
        self._context = context
        self._alone = alone

    def reduced(
        self, loss: Tensor | None, named: dict[str, Tensor], norm: GradientNorm | None
    ) -> list[Tensor]:
        """What all ranks saw, where that takes a reduction."""
        agreement = self._context.agreement
        state = self._alone.trouble()
        if state is None:
            state = named.get("state")
        local = [loss, named.get("norm"), named.get("buffers"), state]
        device = torch.device("cpu")
        for value in local:
            if value is not None:
                device = value.device
                break
        zero = torch.zeros((), device=device)
        line = [zero if v is None else v.detach().reshape(()).to(zero) for v in local]
        values = torch.stack(line)
        risk = self._alone.risk(values, named.get("least"))
        sums = _sums(values, norm, has_loss=loss is not None) if agreement.adds else None
        shared = agreement.reduce(values, self._context.step, risk, sums)
        if shared is None:
            return []
        return list(shared.unbind())

    def loss(self, shared: list[float]) -> float | None:
        """The largest loss of all ranks; of a sharded model their mean."""
        if not shared:
            return None
        if not self._context.agreement.adds:
            return shared[0]
        return shared[0] / shared[WITH_LOSS] if shared[WITH_LOSS] else None

    def norm(
        self, measured: GradientNorm | None, own: float | None, shared: list[float]
    ) -> float | None:
        """The norm of gradients of which each rank has measured its part, once all are finite."""
        parts = measured is not None and measured.squares is not None
        if not parts or not shared or shared[REDUCED + SQUARES]:
            return own
        return math.sqrt(shared[SQUARES])


def _sums(values: Tensor, norm: GradientNorm | None, *, has_loss: bool) -> Tensor:
    """What ranks of a sharded model add: losses, squares of their parts, and how many losses."""
    sums = values.to(torch.float64, copy=True)
    sums[SQUARES] = 0.0
    if norm is not None and norm.squares is not None:
        sums[SQUARES] = norm.squares
    sums[WITH_LOSS] = torch.isfinite(values[0]).to(sums) if has_loss else 0.0
    return sums


# --- From tensors on the device to a Reading on the host, through one packet.


@dataclass(slots=True)
class MicroLoss:
    """The loss of one micro-batch as it was before backward."""

    total: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)
    labels: Tensor | None = None
    summed_in_half: bool = False
    """It was added up in float16, which overflows early."""
    scaled: bool = False
    """It carries the factor of a scaler that the guard does not know yet, if there is one."""
    expression: Expression = field(default_factory=list)
    """What a watched loop computed between the model's outputs and it."""


@dataclass(slots=True, kw_only=True)
class Pending:
    """A step whose numbers are on their way to the host.

    The packet holds, in this order: the micro-batch losses, the named parts of the loss, the named
    values, what ranks have reduced, the values the user follows, the norm of each gradient.
    """

    index: int
    packet: Packet
    micro: int
    """Micro-batch losses."""
    parts: tuple[str, ...]
    names: tuple[str, ...]
    norm: GradientNorm | None
    lr: tuple[float, ...]
    clip_norm: float | None
    schedule: str = ""
    followed: tuple[str, ...] = ()
    """What the user follows makes no step bad."""
    tensors: int = 0
    """Norms of single gradients, where outliers are looked for."""
    at_risk: bool = False
    """Once read: the update could make NaN by itself on some rank, and all ranks know."""
    others_bad: bool = False
    """Once read: another optimizer of the same backward has non-finite gradients."""
    fused: bool = False
    """The optimizer's kernel changes nothing when `found_inf` is set."""
    overflow_passes: bool = False
    """An infinite loss alone makes no step bad, because it was added up in float16.

    Set where nothing can be found out by running the step again before its update: with a fused
    optimizer, and under DDP.
    """

    def suspect(self) -> Tensor:
        """On the device: 1 when anything the guard reads is non-finite on any rank, else 0."""
        watched = self.packet.values
        unwatched = len(self.followed) + self.tensors
        if unwatched:
            watched = watched[:-unwatched]
        losses = self.micro + len(self.parts)
        if self.overflow_passes:
            bad = watched[:losses].isnan().any() | ~torch.isfinite(watched[losses:]).all()
        else:
            # a finite number minus itself is 0, any other NaN: fewer kernels than `isfinite`
            bad = (watched - watched).any()
        reduced = watched.numel() - losses - len(self.names)
        if reduced > 1:
            # its first half are sums of what ranks saw, its second half counts of what was bad
            bad = bad | watched[-(reduced - reduced // 2) :].gt(0).any()
        return bad.to(torch.float32)


def micro_loss(output: Any, batch: Any, context: Context) -> tuple[Tensor, MicroLoss]:
    """Return the scalar to call backward on, and what is remembered of it."""
    loss = output if type(output) is Tensor and output.numel() == 1 else total_loss(output)
    parts = {}
    if isinstance(output, Mapping):
        parts = {str(name): part.detach() for name, part in output.items()}
    labels = None if context.config.labels_key is None else count_labels(batch, context)
    return loss, MicroLoss(loss.detach(), parts, labels, summed_in_half(loss, context))


def summed_in_half(root: Tensor, context: Context) -> bool:
    """Was this loss added up in float16? Asked of models or losses in float16 only."""
    half = root.dtype is torch.float16
    for parameter in context.memory.ordered[:1]:
        half = half or parameter.dtype is torch.float16
    return half and summed_in_half_precision(root)


def only_loss_infinite(reading: Reading) -> bool:
    """Is an infinite loss all that is wrong with a step, as far as its numbers tell?"""
    if reading.alarm or reading.bad_state or reading.bad_inputs or not reading.grads_finite:
        return False
    bad = reading.bad_micro_batches
    infinite = bool(bad) and all(math.isinf(reading.micro_losses[index]) for index in bad)
    return infinite and math.isfinite(reading.grad_norm or 0.0)


IGNORED = -100
"""A target that does not count, as in torch's cross entropy."""


def count_labels(batch: Any, context: Context) -> Tensor | None:
    """Count the targets that are not ignored; None where `labels_key` does not name them."""
    key = context.config.labels_key
    if key is None:
        return None
    for name, tensor in named_tensors(batch):
        if name == key:
            return (tensor != IGNORED).sum()
    return None


class Reader:
    """Issues one packet a step and turns it into a Reading."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._state: Tensor | None = None
        """On the device: non-finite when a stored tensor is; travels with the next packet."""
        self._started = False
        self._checked = False
        self._left_out = 0
        self.missing: int | None = None
        """Parameters that had no gradient in the last packet."""
        self._scan = RotatingScan()
        self._alone = SeenAlone(context)
        self._ranks = RankNumbers(context, self._alone)
        self._loading = context.optimizer.register_load_state_dict_post_hook(self._loaded)
        context.resources.callback(lambda: self._loading.remove())
        context.hooks.adopted.append(self._adopted)

    def start(self) -> None:
        """Before the first update: parameters and optimizer state join the first packet."""
        context = self._context
        if not self._checked:
            self._checked = True
            self.rewound()
        if self._started:
            return
        self._started = True
        statistics = {id(buffer) for buffer in norm_statistics(context.roots)}
        context.meant.first_buffers = []
        if context.memory.first_size is None:
            with suppress(Exception):  # a judgement of divergence is not worth the guard
                context.memory.first_size = root_mean_square(context.parameters)
        self._alone.start()
        first = {}
        for name, buffer in named_buffers(context.roots):
            if id(buffer) not in statistics:
                first[f"buffer:{name}"] = context.buffers.remembered(buffer)
        first.update(extra_tensors(context.extra, parameters=False))
        for name, tensor in first.items():
            found = extremes(tensor)
            if found is not None:
                context.meant.first_buffers.append((name, found))

    def _loaded(self, optimizer: Optimizer) -> None:
        """State was loaded in mid-run: check all of it before the next update."""
        self._checked = False

    def _adopted(self, optimizer: Optimizer) -> None:
        """Another optimizer takes over: check its parameters and state before its first update."""
        self._loading.remove()
        self._loading = optimizer.register_load_state_dict_post_hook(self._loaded)
        self._checked = False

    def after_update(self) -> None:
        """Check the new parameters, of a large model some in turn; read with the next packet."""
        context = self._context
        share = self._scan.share(context.memory.ordered, context.meant.ignored)
        self._state = largest(share, small=self._scan.small)

    def rewound(self) -> None:
        """Parameters were replaced; scan all of them in the next packet."""
        context = self._context
        self._state = self._largest([*context.parameters, *state_tensors(context.optimizer)])

    def announce(self, loss: Tensor, *, summed_in_half: bool = False) -> None:
        """Before backward: what only this rank can see travels to others with the gradients.

        A sum in float16 that overflows is nothing to tell: its gradients are finite, or tell it.
        """
        agreement = self._context.agreement
        if agreement.size > 1:
            self._context.mark()
        if agreement.mode != "spread":
            return
        if summed_in_half:
            loss = torch.nan_to_num(loss.detach(), nan=math.nan, posinf=0.0, neginf=0.0)
        statistics = self._largest(self._context.buffers.statistics())
        seen = (
            loss,
            self._state,
            statistics,
            *self._alone.written_buffers(),
            self._alone.trouble(),
        )
        agreement.announce([value for value in seen if value is not None])

    def _largest(self, tensors: list[Tensor]) -> Tensor | None:
        ignored = self._context.meant.ignored
        if ignored:
            tensors = [tensor for tensor in tensors if id(tensor) not in ignored]
        return largest(tensors)

    def last_update_finite(self) -> bool:
        """Check all parameters after the last update, which no step will read. Waits."""
        state = self._largest(self._context.parameters)
        return state is None or math.isfinite(Packet([state]).fetch()[0])

    # --- issue ----------------------------------------------------------------------------------

    def issue(
        self,
        losses: list[MicroLoss],
        norm: GradientNorm | None = None,
        others: Tensor | None = None,
        gradients: list[Tensor] | None = None,
    ) -> Pending:
        """Gather everything of this step into one packet. Waits for nothing.

        `gradients`: those of all parameters that have one, where the caller has listed them.
        `others`: the norm of the gradients of other optimizers that step from the same backward.
        """
        context = self._context
        self._backward_over()
        if gradients is None:
            gradients = gradients_of(context)
        self.missing = len(context.memory.ordered) - len(gradients)
        if norm is None:
            norm = own_norm(context, gradients)
        if norm is not None and norm.single is not None:
            context.memory.gradient_norms.keep(context.step, norm.single)
        optimizer = context.optimizer
        # torch gives the mark to an optimizer that was made fused
        fused = hasattr(optimizer, "_step_supports_amp_scaling") and takes_found_inf(optimizer)
        values = []
        parts: dict[str, Tensor] = {}
        for micro in losses:
            values.append(micro.total)
            if micro.parts:
                parts = _parts(losses)
        values += parts.values()
        named = self._named_values(losses, norm, others, fused=fused)
        values += named.values()
        if not values:
            values = [torch.zeros(())]
        if context.agreement.mode == "collective":
            loss = _added(values[: len(losses)]) if losses else None
            values += self._ranks.reduced(loss, named, norm)
        followed: dict[str, Tensor] = {}
        if context.memory.followed:
            followed = self._followed()
            values += followed.values()
        single_norms: list[Tensor] = []
        if context.memory.outliers is not None:
            single_norms = context.memory.outliers.measure(context.parameters)
            values += single_norms
        pending = Pending(
            index=context.step,
            packet=Packet(values),
            micro=len(losses),
            parts=tuple(parts),
            names=tuple(named),
            norm=norm,
            lr=context.lr,
            schedule=context.schedule,
            clip_norm=context.config.clip_norm,
            followed=tuple(followed),
            tensors=len(single_norms),
            fused=fused,
        )
        if losses and losses[0].summed_in_half:
            pending.overflow_passes = self._overflow_passes(losses, fused=fused)
        return pending

    def _overflow_passes(self, losses: list[MicroLoss], *, fused: bool) -> bool:
        decided = fused or self._context.agreement.mode == "spread"
        return decided and all(micro.summed_in_half for micro in losses)

    def _backward_over(self) -> None:
        context = self._context
        if context.agreement.size > 1:
            context.mark()
            context.agreement.announced()
        for tell in context.hooks.gradients:
            tell()
        # check again without tensors that were accepted since: the last check still saw them
        if len(context.meant.ignored) != self._left_out:
            self._left_out = len(context.meant.ignored)
            self.after_update()

    def _followed(self) -> dict[str, Tensor]:
        """What the user has asked to follow in this step."""
        followed = {}
        for name, (step, value) in self._context.memory.followed.items():
            if step == self._context.step:
                followed[name] = value
        return followed

    def _named_values(
        self,
        losses: list[MicroLoss],
        norm: GradientNorm | None,
        others: Tensor | None,
        *,
        fused: bool,
    ) -> dict[str, Tensor]:
        """Everything of this step that has one number, where there is one."""
        context = self._context
        named: dict[str, Tensor] = {}
        if norm is not None:
            named["norm"] = norm.total
            if norm.least is not None:
                named["least"] = norm.least
        if context.buffers.any:
            # a fused kernel judges by itself, and must know what is infinite on purpose
            written = self._alone.written_buffers() if fused else context.buffers.written()
            buffers = self._largest([*context.buffers.statistics(), *written])
            if buffers is not None:
                named["buffers"] = buffers
        if self._state is not None:
            named["state"] = self._state
        if context.scaler is not None and context.scaling():
            # `get_scale` would wait for the device
            scale = context.scaler._get_scale_async()
            if scale is not None:
                named["scale"] = scale
        if context.config.labels_key is not None:
            counted = [micro.labels for micro in losses if micro.labels is not None]
            if counted:
                named["labels"] = _added(counted)
        if others is not None:
            named["others"] = others
        return named

    # --- complete -------------------------------------------------------------------------------

    def complete(self, pending: Pending, *, grads_gone: bool = False) -> Reading:
        """Wait for the numbers and name them. `grads_gone`: the loop has dropped the gradients."""
        context = self._context
        numbers = pending.packet.fetch()
        if pending.tensors:
            numbers = self._without_single_norms(pending, numbers)
        memory = context.memory
        now = time.perf_counter()
        seconds = now - memory.last_read
        memory.last_read = now
        if memory.effort.tracing:
            memory.effort.took_traced(seconds)
        else:
            memory.effort.recent.append(seconds)
        end_of_micro = pending.micro
        end_of_parts = end_of_micro + len(pending.parts)
        end_of_named = end_of_parts + len(pending.names)
        end_of_shared = len(numbers) - len(pending.followed)
        micro = tuple(numbers[:end_of_micro])
        components = dict(zip(pending.parts, numbers[end_of_micro:end_of_parts], strict=True))
        followed = dict(zip(pending.followed, numbers[end_of_shared:], strict=True))
        named = dict(zip(pending.names, numbers[end_of_parts:end_of_named], strict=True))
        shared = numbers[end_of_named:end_of_shared]
        norm = named.get("norm")
        shared_loss: float | None = None
        if len(shared) > RISK:  # a packet of nothing at all holds one number too
            norm = self._ranks.norm(pending.norm, norm, shared)
            shared_loss = self._ranks.loss(shared) if micro else None
            pending.at_risk = shared[RISK] > 0
        scale = named.get("scale")
        if scale is None and context.config.loss_scale:
            scale = context.scales.static
        pending.others_bad = not math.isfinite(named.get("others", 0.0))
        norm_finite = norm is None or math.isfinite(norm)
        reading = reading_of(
            step=pending.index,
            loss=sum(micro) if micro else None,
            micro_losses=micro,
            components=components,
            followed=followed,
            grad_norm=norm,
            least_norm=named.get("least"),
            grads_finite=norm_finite or (not grads_gone and self._gradients_finite()),
            clip_factor=_clip_factor(norm, pending.clip_norm),
            scale=scale,
            lr=pending.lr,
            schedule=pending.schedule,
            climbs=context.maximizes,
            labels=int(named["labels"]) if "labels" in named else None,
            seconds=seconds,
            shared_loss=shared_loss,
            alarm=bool(shared) and any(shared[len(shared) // 2 :]),
            bad_state=_bad_stored(named),
        )
        if pending.overflow_passes and only_loss_infinite(reading):
            return replace(reading, loss_overflow=True)
        return reading

    def _without_single_norms(self, pending: Pending, numbers: list[float]) -> list[float]:
        assert self._context.memory.outliers is not None
        # a scaler that leaves dividing to the fused kernel: the gradients still carry its factor
        carried = getattr(self._context.optimizer, "grad_scale", None)
        scale = float(carried) if carried is not None else 1.0
        self._context.memory.outliers.read(pending.index, numbers[-pending.tensors :], scale)
        return numbers[: -pending.tensors]

    def _gradients_finite(self) -> bool:
        """A finite norm proves it; of an infinite one every element must be checked."""
        return all(is_finite(gradient) for gradient in gradients_of(self._context))


def own_norm(context: Context, gradients: list[Tensor] | None = None) -> GradientNorm | None:
    """Return the norm of the gradients; where sharded ones are clipped, that of all ranks."""
    if gradients is None:
        gradients = gradients_of(context)
    scale = getattr(context.optimizer, "grad_scale", None)
    if scale is not None:
        # the fused kernel is to divide by it: the gradients still carry the factor of a scaler
        scaled = gradient_norm(gradients, wide=True)
        return scaled and GradientNorm(scaled.total / scale, scaled.clip)
    each = is_custom(context.optimizer)
    max_norm = context.config.clip_norm
    if context.memory.shares is not None and max_norm is None:
        # only to be read: the squares of all ranks are added by the reduction of the step
        return context.memory.shares.norm(context.parameters, each=each)
    if not context.sharded or max_norm is None:
        return gradient_norm(gradients, each=each)
    norm = norm_over_ranks(context.roots[""], context.parameters, max_norm, each=each)
    context.memory.norm_of_ranks = (context.step, norm)
    return norm


def gradients_of(context: Context) -> list[Tensor]:
    """The gradients of all parameters that have one, in the order of the parameters."""
    gradients = list(map(GRADIENT, context.parameters))
    if any(map(is_, gradients, repeat(None))):
        return [gradient for gradient in gradients if gradient is not None]
    return gradients


def _parts(losses: list[MicroLoss]) -> dict[str, Tensor]:
    """Named parts of the loss, added over the micro-batches."""
    found: dict[str, list[Tensor]] = {}
    for micro in losses:
        for name, part in micro.parts.items():
            found.setdefault(name, []).append(part)
    return {name: _added(values) for name, values in found.items()}


def _bad_stored(named: dict[str, float]) -> tuple[str, ...]:
    """Kinds of stored tensors, of those that were scanned in this step, that hold a bad value."""
    found: tuple[str, ...] = ()
    for kind in STORED:
        if kind in named and not math.isfinite(named[kind]):
            found += (kind,)
    return found


def _clip_factor(norm: float | None, clip_norm: float | None) -> float | None:
    if norm is None or clip_norm is None or not math.isfinite(norm):
        return None
    # as torch's clip_grad_norm_ computes it
    return min(1.0, clip_norm / (norm + 1e-6))


def _added(values: list[Tensor]) -> Tensor:
    if len(values) == 1:
        return values[0]
    return torch.stack([value.reshape(()) for value in values]).sum()
