"""Loss and pre-clip gradient norm, observed from a watched loop."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import repeat
from operator import is_, sub
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stepguard._errors import ConfigError
from stepguard.engine.context import Context
from stepguard.engine.drivers.schedule import evaluates_again, needs_closure
from stepguard.engine.reader import GRADIENT, MicroLoss, gradients_of, summed_in_half
from stepguard.locate.loss_graph import READ, READERS, SELF_UNREAD, Expression, Saved
from stepguard.sentinel.gradients import DTYPE, GradientNorm, gradient_norm, is_custom
from stepguard.sentinel.torch_patches import unscaled
from stepguard.state.buffers import UndoCopy
from stepguard.tensors.names import parameter_names
from stepguard.tensors.values import HALVES, VERSION, dense_values, versions, written_since

HALF_KINDS = frozenset(HALVES)
NO_PARTS: dict[str, Tensor] = {}
"""A watched loop adds up its loss by itself."""

# --- Clip the gradients of a loop that stays as it is, as if it called torch's clipping itself.


def clip_before_update(
    model: nn.Module, optimizer: Optimizer, scaler: GradScaler | None, max_norm: float
) -> RemovableHandle:
    """Clip at the beginning of every `optimizer.step()`, before any hook that comes later."""
    name = type(optimizer).__name__
    if needs_closure(optimizer) or evaluates_again(optimizer):
        raise ConfigError(
            f"GuardConfig.clip_norm={max_norm!r} cannot clip for {name}, which computes gradients "
            "inside its step; call torch.nn.utils.clip_grad_norm_ in its closure."
        )
    scales = scaler is not None and scaler.is_enabled()
    if scales and getattr(optimizer, "_step_supports_amp_scaling", False):
        raise ConfigError(
            f"GuardConfig.clip_norm={max_norm!r} cannot clip for a fused {name} with a GradScaler, "
            "whose gradients are still scaled then; call scaler.unscale_(optimizer) and "
            "torch.nn.utils.clip_grad_norm_ in the loop, or make it without fused=True."
        )

    def clip(optimizer: Optimizer, *_: Any) -> None:
        if isinstance(model, FullyShardedDataParallel):
            model.clip_grad_norm_(max_norm)
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, max_norm)

    # where `optimizer.step` is compiled, hooks must stay out of the graph
    outside: Any = torch.compiler.disable
    return optimizer.register_step_pre_hook(outside(clip))


# --- Veto an update by hiding every gradient until optimizer.step() has returned.


MOST_NAMED = 3


class GradientVeto:
    """The hidden gradients of one update, and how what it moved is undone."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._forget()
        self._why_no_copy = ""

    def _forget(self) -> None:
        self._parameters: list[Tensor] = []
        self._gradients: list[Tensor | None] = []
        self._versions: list[int] = []
        self._undo: UndoCopy | None = None
        self.hidden = False
        """Is an update being vetoed?"""

    def hide(self, copy: UndoCopy | None = None) -> None:
        """Hide the gradients. `copy`: taken before, of an optimizer that has already begun."""
        context = self._context
        self._parameters = list(context.parameters)
        self.hidden = bool(self._parameters)
        self._gradients = [parameter.grad for parameter in self._parameters]
        self._undo = copy
        self._why_no_copy = ""
        if copy is None and is_custom(context.optimizer):
            self._undo = self._copy()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = None
            if self._undo is not None and gradient is not None:
                parameter.grad = torch.zeros_like(gradient)
        self._versions = versions(self._parameters)

    def give_back(self) -> None:
        """Give back the gradients, which the loop may still want to read."""
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient

    def put_back(self) -> str:
        """Undo what the update moved all the same; in words what cannot be undone."""
        parameters = self._parameters
        marks = self._versions
        undo = self._undo
        self._forget()
        if undo is None:
            moved = set()
            for parameter, mark in zip(parameters, marks, strict=True):
                if written_since([parameter], [mark]):
                    moved.add(id(parameter))
            if not moved:
                return ""
            optimizer = self._context.optimizer
            names = []
            for parameter, name in parameter_names(self._context.roots, optimizer):
                if id(parameter) in moved:
                    names.append(name)
            told = ", ".join(names[:MOST_NAMED])
            return f"{type(optimizer).__name__} moved {told} without a gradient{self._why_no_copy}"
        unknown = undo.restore()
        if not unknown:
            return ""
        return f"{', '.join(unknown)} cannot be compared, and may have moved"

    def release(self) -> None:
        """Let the update happen after all."""
        self.give_back()
        self._forget()

    def _copy(self) -> UndoCopy | None:
        try:
            return UndoCopy(self._context.optimizer)
        except Exception as fault:
            # of the user's objects, or no memory: hiding is all that is left
            self._why_no_copy = f", and no copy could be taken ({type(fault).__name__}: {fault})"
            return None


# --- Loss and pre-clip gradient norm, observed from a watched loop.


Marks = tuple[list[int], list[int]]
"""Identity and version of gradients; torch counts the writes to a tensor."""
NO_MARKS: Marks = ([], [])
SAMPLED = 32
"""Parameters that stand for all of a larger model where a loop adds, drops or keeps gradients."""


class ObservedLoss:
    """The losses and the norm of one guard's next update. Never waits for the device."""

    def __init__(self, context: Context, announce: Callable[..., None]) -> None:
        self._context = context
        self._announce = announce
        self.losses: list[MicroLoss] = []
        self._norm: GradientNorm | None = None
        self._at_norm = NO_MARKS
        self._sample: list[Tensor] = []
        self._sampled: list[Tensor] = []
        """The list of parameters that `_sample` was taken of."""
        self._at_start = NO_MARKS
        """Version marks of all gradients before the backward pass."""
        self._sample_at_start = NO_MARKS
        self._at_end = NO_MARKS
        """Version marks of the sampled gradients after the backward pass."""
        self._heard = False
        self._taken: tuple[GradientNorm, Marks] | None = None
        self.labels: Tensor | None = None
        """Targets that count in the micro-batch at hand, where a framework tells."""

    @property
    def clipped(self) -> bool:
        """Were the gradients clipped? Where the norm is NaN, that makes all of them NaN."""
        return self._at_norm is not NO_MARKS

    def before_backward(self, root: Tensor, outputs: Collection[int]) -> None:
        """A scalar that backward starts from is the loss; a scaler's factor is divided out.

        `outputs`: sequence numbers of the autograd nodes of the model's outputs.
        """
        self._heard = False
        if root.numel() != 1 or not root.requires_grad or torch.compiler.is_compiling():
            return
        self._heard = True
        context = self._context
        value, scaled = _without_scale(root, context)
        parameters = context.parameters
        if parameters is not self._sampled:
            self._sampled = parameters
            self._sample = _sample(parameters)
        self._at_start = _marks(parameters)
        self._sample_at_start = self._at_start
        if self._sample is not parameters:
            self._sample_at_start = _marks(self._sample)
        dropped = self._sample_at_start != self._at_end
        context.memory.habits.backward_begins(
            root, parameters, first=not self.losses, dropped=dropped
        )
        if self.losses and dropped:
            # their gradients have been dropped since, so they are part of no update
            self.losses = []
        summed = summed_in_half(root, context)
        observed = MicroLoss(value, NO_PARTS, self.labels, summed, scaled)
        if outputs:
            observed.expression = expression(root, outputs)
        self.losses.append(observed)
        if context.agreement.size > 1:
            self._announce(value, summed_in_half=summed)

    def after_backward(self, *, failed: bool) -> bool:
        """Was it this guard's loss? Another one's backward leaves its gradients alone."""
        if not self._heard:
            return False
        self._heard = False
        self._at_end = _marks(self._sample)
        ours = not failed and self._at_end != self._sample_at_start
        if not ours and not failed and self._sample is not self._sampled:
            ours = _marks(self._sampled) != self._at_start
        if self.losses and not ours:
            self.losses.pop()
        if ours:
            self._context.memory.habits.backward_over(self._sampled)
        return ours

    def update_made(self) -> None:
        """The optimizer has made an update of what was observed."""
        if self.losses:
            self._context.memory.habits.update_made(self._sample, self._at_end[0])

    def divide(self, scale: Tensor | None) -> None:
        """The losses heard so far carry this factor, which was not known then."""
        if scale is not None:
            for loss in self.losses:
                if loss.scaled:
                    loss.total = loss.total / scale
                    loss.scaled = False

    def after_norm(self, tensors: list[Tensor], norm: Tensor) -> None:
        """Clipping took the norm of all gradients: no need to take it again."""
        # the first and the last stand for all: `norm` compares every one before it is used
        parameters = self._context.memory.ordered
        if not tensors or len(tensors) > len(parameters):
            return
        first: Tensor | None = None
        for parameter in parameters:
            first = parameter.grad
            if first is not None:
                break
        if first is not tensors[0]:
            return
        last: Tensor | None = None
        for parameter in reversed(parameters):
            last = parameter.grad
            if last is not None:
                break
        if last is not tensors[-1]:
            return
        # Of sharded gradients each rank keeps its part: the whole would take a collective, which a
        # rank without a guard does not join. What ranks exchange for the step adds the parts up.
        shares = self._context.memory.shares
        if shares is not None:
            self._norm = shares.heard(norm)
        else:
            own = norm if type(norm) is Tensor else dense_values(norm)
            self._norm = GradientNorm(own, own)
        if not HALF_KINDS.isdisjoint(map(DTYPE, tensors)):
            # torch takes it in half precision, where it overflows early
            self._norm = None
        self._at_norm = _marks_of(tensors)

    def norm(self, gradients: list[Tensor]) -> GradientNorm | None:
        """The norm before clipping, unless anything but clipping has written gradients since."""
        if self._norm is None:
            if self._taken is not None and self._taken[1] == _marks_of(gradients):
                return self._taken[0]
            return None
        identities, writes = _marks_of(gradients)
        # clipping itself writes each gradient once
        if identities != self._at_norm[0] or max(map(sub, writes, self._at_norm[1]), default=0) > 1:
            return None
        return self._norm

    def take_norm(self) -> Tensor | None:
        """The norm now, for another optimizer of the same step; kept for this one's own step."""
        gradients = gradients_of(self._context)
        found = self.norm(gradients)
        if found is None:
            each = is_custom(self._context.optimizer)
            shares = self._context.memory.shares
            if shares is not None:
                found = shares.norm(self._context.parameters, each=each)
            else:
                found = gradient_norm(gradients, each=each)
            if found is not None:
                self._taken = (found, _marks_of(gradients))
        if found is None:
            return None
        return found.total

    def clear(self) -> None:
        """An update has used what was observed."""
        self.losses = []
        self._norm = None
        self._at_norm = NO_MARKS
        self.labels = None
        self._taken = None


MOST_NODES = 64
"""Nodes that are followed from the loss; of a longer expression the part nearest to the loss."""
MOST_BYTES = 1 << 20
"""Size of a tensor that is held: sums, masks and weights of samples, not the scores of a
vocabulary.
"""
PLAIN_NUMBERS = (int, float, tuple)
_KEPT: dict[str, tuple[tuple[str, str], ...]] = {}
"""Kind of autograd node -> names of what it keeps, with the attributes that give it."""


def _without_scale(root: Tensor, context: Context) -> tuple[Tensor, bool]:
    """The loss that backward starts from without a scaler's factor, and whether one may be left."""
    before = unscaled(root)
    if before is not None:
        return before, False
    value, scaler = root.detach(), context.scaler
    if scaler is None:
        return value, True
    if context.scaling():
        scale = scaler._get_scale_async()
        if scale is not None:
            value = value / scale
    return value, False


def expression(root: Tensor, outputs: Collection[int]) -> Expression:
    """The autograd nodes from the loss back to the model's outputs, by their sequence numbers.

    Runs in every step: what no reader asks for is not touched.
    """
    found: Expression = []
    queue: list[Any] = [] if root.grad_fn is None else [root.grad_fn]
    known = set(queue)
    for node in queue:
        sequence = node._sequence_nr()
        if sequence in outputs:
            continue
        sources: list[int | None] = []
        for source, _ in node.next_functions:
            sources.append(None if source is None else source._sequence_nr())
            # one that gathers the gradient of a leaf is no operation
            if source is not None and source not in known and source.next_functions:
                known.add(source)
                queue.append(source)
        name = node.name()
        kept = _KEPT.get(name)
        if kept is None:
            kept = _KEPT[name] = _kept_by(node, name)
        values: dict[str, Any] = {}
        writes: list[int] = []
        if kept:
            skips_self = name in SELF_UNREAD and sources[0] not in outputs
            values, writes = _saved_values(node, kept, "self" if skips_self else "")
        found.append(Saved(name, sequence, values, writes, tuple(sources)))
        if len(found) == MOST_NODES:
            break
    return found


def _saved_values(
    node: Any, kept: tuple[tuple[str, str], ...], unread: str
) -> tuple[dict[str, Any], list[int]]:
    """What a node keeps of its operands, and the versions of the tensors among it."""
    values: dict[str, Any] = {}
    writes = []
    for argument, attribute in kept:
        if argument == unread:
            continue
        value = getattr(node, attribute)
        if isinstance(value, PLAIN_NUMBERS):
            values[argument] = value
        # a tensor behind somebody's hooks would be computed to be read
        elif value is not None and getattr(value, "unpack_hook", True) is None:
            tensor = value.data
            if type(tensor) is Tensor and tensor.nbytes <= MOST_BYTES:
                # its graph must not outlive the backward; a Python number is not detached
                values[argument] = tensor.detach() if tensor.requires_grad else tensor
                writes.append(tensor._version)
    return values, writes


def _kept_by(node: Any, kind: str) -> tuple[tuple[str, str], ...]:
    listed = dir(node) if kind in READERS else ()
    found = []
    for name in listed:
        argument = name.removeprefix("_saved_")
        if argument != name and argument in READ:
            raw = f"_raw{name}"
            found.append((argument, raw if raw in listed else name))
    return tuple(found)


def _marks(parameters: list[Tensor]) -> Marks:
    """Marks of the gradients of these parameters; one that has none is marked by 0."""
    gradients = list(map(GRADIENT, parameters))
    if any(map(is_, gradients, repeat(None))):
        if all(map(is_, gradients, repeat(None))):
            return [0] * len(gradients), []
        identities = [0 if gradient is None else id(gradient) for gradient in gradients]
        writes = [0 if gradient is None else gradient._version for gradient in gradients]
        return identities, writes
    return _marks_of(gradients)


def _marks_of(gradients: list[Tensor]) -> Marks:
    return list(map(id, gradients)), list(map(VERSION, gradients))


def _sample(parameters: list[Tensor]) -> list[Tensor]:
    every = -(-len(parameters) // SAMPLED)
    return parameters[::every] if every > 1 else parameters
