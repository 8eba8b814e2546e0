"""One deep look: begin before the forward pass, end after the update, and get a record."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stepguard.locate.live_trace import leave
from stepguard.locate.operands import (
    TAKES_INFINITY,
    TESTS,
    UNINITIALISED,
    Operator,
    aten,
    describe,
    numeric,
    plain,
    storage_key,
)
from stepguard.locate.source import ModuleSpans
from stepguard.probes.statistics import (
    FIELDS,
    Numbers,
    SeenBatch,
    Updates,
    bits_above_floor,
    bits_of_headroom,
    root_mean_square,
    rounded_to_zero,
    sampled,
    vector_of,
)
from stepguard.records.probes import (
    AttentionLook,
    Look,
    NormLook,
    ParameterLook,
    Stage,
    StepFacts,
    TensorLook,
    UnitLook,
)
from stepguard.state import sharded
from stepguard.tensors.names import (
    named_buffers,
    named_modules,
    named_parameters,
    optimizer_parameter_ids,
)
from stepguard.tensors.torch_private import (
    TorchDispatchMode,
    current_autograd_node,
    next_sequence_number,
    transforming,
)
from stepguard.tensors.values import is_lazy

# --- What the look notes of loss functions: are they given what they take, and does all of it
# count?


PROBABILITIES = ("SoftmaxBackward0", "SigmoidBackward0", "HardsigmoidBackward0")
RANGES = {
    "SigmoidBackward0": ("sigmoid", 0.0, 1.0),
    "HardsigmoidBackward0": ("hardsigmoid", 0.0, 1.0),
    "SoftmaxBackward0": ("softmax", 0.0, 1.0),
    "TanhBackward0": ("tanh", -1.0, 1.0),
    "ReluBackward0": ("relu", 0.0, float("inf")),
}
"""Activations that bound the output of a model."""
SHAPES_ONLY = aten(
    "View UnsafeView ReshapeAlias Squeeze Unsqueeze Select Slice Transpose T Permute Expand Clone "
    "ToCopy Alias Split Unbind Index Flatten"
)
"""Operations that leave values as they are."""
LOG_SOFTMAX = aten("_log_softmax")
NLL = aten("nll_loss_forward nll_loss2d_forward")
LOGITS = "aten.binary_cross_entropy_with_logits"
REGRESSION = aten("mse_loss smooth_l1_loss huber_loss")
COMBINES = aten("sub mul add")
SUMS = ("AddBackward0", "SubBackward0")
PASSES = ("NegBackward0", "ToCopyBackward0", "MulBackward0", "DivBackward0", "SumBackward0")
MARGIN = 0.05
"""How far beyond the range of an activation a target must be, beside the spread of all targets."""
MOST_CLASSES = 1024
SMALL = 16
"""Elements of a tensor that a loss may learn beside a model: weights of tasks, a temperature."""
LEAST_ROWS = 8
OFF_BY = 0.1
"""Logarithm of a sum of probabilities that is not 0 by rounding."""


@dataclass(slots=True)
class LossFacts:
    """Numbers on the device, and what each stands for."""

    numbers: Numbers
    trained: set[int]
    """Identities of the parameters that this guard's optimizer updates."""
    known: set[int]
    """Identities of all tensors that a model or an optimizer of the process has."""
    mixed_up: dict[str, str] = field(default_factory=dict)
    broadcast: tuple[str, ...] = ()
    outsiders: list[Tensor] = field(default_factory=list)
    """Each once, in the order of their use."""
    single_class: bool = False
    _bounds: list[tuple[str, int]] = field(default_factory=list)
    _logs: list[tuple[str, int]] = field(default_factory=list)
    _classes: list[int] = field(default_factory=list)
    _entropies: list[int] = field(default_factory=list)
    _spread: int | None = None
    _cut: set[int] = field(default_factory=set)
    """Memory of results that trained parameters have a part in."""
    _constant_terms: set[int] = field(default_factory=set)
    """Numbers of the autograd nodes that add such a result without a gradient."""
    _parts: int = 0
    _product: tuple[int, Tensor] | None = None
    """Memory of the first factor of the last product, and its second factor: kl_div's target and
    input."""

    def before(self, operator: Operator, args: Any, kwargs: Any, module: str | None) -> None:
        """Note what goes in."""
        name = operator.name
        given = [value for value in args if isinstance(value, Tensor)]
        self._note_leaves(given, module)
        if name in LOG_SOFTMAX:
            self._note_logits("cross_entropy", args[0])
            self.single_class |= not module and args[0].shape[args[1]] == 1
            self._note_spread(args[0])
        elif name in NLL:
            self._note_logs(args)
        elif name == LOGITS:
            self._note_logits("binary_cross_entropy_with_logits", args[0])
            self._note_reach(args[0], args[1], logits=True)
            self._note_spread(args[0])
        elif name in REGRESSION:
            self._note_shapes(name, args[0], args[1])
            self._note_reach(args[0], args[1])
            self._note_spread(args[0])
        elif name in COMBINES and not module and len(given) > 1:
            self._note_combined(name, given[0], given[1])
        elif name in ("aten.xlogy", "aten.exp") and self._product is not None and given:
            if storage_key(given[0]) == self._product[0]:
                self._note_divergence(self._product[1])
            self._product = None

    def after(
        self, operator: Operator, args: Any, kwargs: Any, results: list[Tensor], module: str | None
    ) -> None:
        """Follow what trained parameters have a part in, and keep the loss of classes."""
        own = any(
            isinstance(value, Tensor)
            and (
                (value.requires_grad and (not value.is_leaf or id(value) in self.trained))
                or storage_key(value) in self._cut
            )
            for value in args
        )
        for result in results:
            if own:
                self._cut.add(storage_key(result))
            else:
                self._cut.discard(storage_key(result))
        if operator.name in NLL and self._classes and args[3] == 1:
            self._entropies.append(self.numbers.add(results[0].detach()))

    def backward_begins(self, root: Tensor) -> None:
        """Count the terms of this loss that are constants to the backward pass."""
        for node in _sum_of(root.grad_fn):
            if node._sequence_nr() in self._constant_terms:
                self._parts += 1

    # --- one operation --------------------------------------------------------------------------

    def _note_leaves(self, given: list[Tensor], module: str | None) -> None:
        for one in given:
            if not one.requires_grad or not one.is_leaf or id(one) in self.known:
                continue
            learns = isinstance(one, nn.Parameter) or (module is None and one.numel() <= SMALL)
            if module is not None and not isinstance(one, nn.Parameter):
                self.known.add(id(one))  # an input whose gradient is wanted
            elif learns and not any(one is other for other in self.outsiders):
                self.outsiders.append(one)

    def _note_logits(self, loss: str, given: Tensor) -> None:
        if _maker(given) in PROBABILITIES:
            self.mixed_up[loss] = "probabilities"

    def _note_logs(self, args: Any) -> None:
        """Probabilities of one sample sum to 1, so their logarithms do not exceed 0."""
        values, target = args[0].detach(), args[1]
        if values.dim() < 2 or values.shape[1] < 2:
            return
        if _maker(args[0]) in PROBABILITIES:
            self.mixed_up["nll_loss"] = "probabilities"
        elif _axis_of_softmax(args[0]) not in (None, 1):
            self.mixed_up["nll_loss"] = "a log_softmax over another axis"
        else:
            self._logs.append(("nll_loss", self.numbers.add(*_log_sums(values, 1))))
        classes = values.shape[1]
        if values.dim() == 2 and classes <= MOST_CLASSES and args[2] is None:
            counted = torch.where(target == args[4], classes, target).reshape(-1)
            counts = torch.bincount(counted, minlength=classes + 1)[:classes]
            self._classes.append(self.numbers.add(counts))

    def _note_divergence(self, given: Tensor) -> None:
        maker = _maker(given)
        if maker in PROBABILITIES:
            self.mixed_up["kl_div"] = "probabilities"
        elif maker != "LogSoftmaxBackward0" and given.dim() > 1 and given.shape[-1] > 1:
            self._logs.append(("kl_div", self.numbers.add(*_log_sums(given.detach(), -1))))

    def _note_shapes(self, name: str, output: Tensor, target: Tensor) -> None:
        """Two shapes that were spread over each other: (n, 1) beside (n,) makes (n, n)."""
        shapes = []
        for one in (output, target):
            sizes = zip(one.shape, one.stride(), strict=True)
            shapes.append([1 if stride == 0 else size for size, stride in sizes])
        spread = [
            (mine < size, theirs < size)
            for mine, theirs, size in zip(*shapes, output.shape, strict=True)
        ]
        crossed = any(mine for mine, _ in spread) and any(theirs for _, theirs in spread)
        if crossed and output.requires_grad != target.requires_grad:
            self.broadcast = (name.removeprefix("aten."), str(shapes[0]), str(shapes[1]))

    def _note_combined(self, name: str, one: Tensor, other: Tensor) -> None:
        learned, fixed = (one, other) if one.requires_grad else (other, one)
        if not learned.requires_grad or learned.is_leaf or fixed.requires_grad:
            return
        if name != "aten.add" and fixed is one:
            self._product = (storage_key(fixed), learned)
        if one.numel() == 1 and other.numel() == 1:
            if self._is_cut_off(fixed, learned):
                # the node was made, and numbered, before its operation runs
                self._constant_terms.add(next_sequence_number() - 1)
        elif one.shape == other.shape:
            if any(0 in tensor.stride() for tensor in (one, other)):
                self._note_shapes(name, learned, fixed)
        elif _spreads_by_chance(learned, fixed):
            shapes = (str(list(learned.shape)), str(list(fixed.shape)))
            self.broadcast = (name.removeprefix("aten."), *shapes)

    def _is_cut_off(self, fixed: Tensor, learned: Tensor) -> bool:
        """Computed from what is trained, and a constant to the backward pass."""
        memory = storage_key(fixed)
        return memory in self._cut and memory != storage_key(learned) and fixed.is_floating_point()

    def _note_reach(self, output: Tensor, target: Tensor, *, logits: bool = False) -> None:
        known = RANGES.get(_maker(output))
        if known is None or output.shape != target.shape or target.requires_grad:
            return
        name, low, high = known
        values = sampled(target.detach()).float()
        if logits:
            if name != "relu":
                return
            low = 0.5  # the sigmoid of 0
        margin = MARGIN * values.std(correction=0)
        beyond = (values < low - margin) | (values > high + margin)
        self._bounds.append((name, self.numbers.add(beyond.double().mean())))

    def _note_spread(self, output: Tensor) -> None:
        values = output.detach()
        if self._spread is not None or values.dim() < 2 or values.shape[0] < LEAST_ROWS:
            return
        some = values.float()
        deviation = some.std(0, correction=0).square().mean().sqrt()
        size = some.square().mean().sqrt().clamp_min(1e-30)
        self._spread = self.numbers.add(deviation / size)

    # --- on the host ----------------------------------------------------------------------------

    def facts(self, facts: StepFacts, values: list[list[float]]) -> StepFacts:
        """These facts, and what was noted of the loss."""
        mixed = dict(self.mixed_up)
        for loss, number in self._logs:
            least, most, lowest, sums = values[number]
            if lowest >= 0.0 and sums < OFF_BY:
                mixed[loss] = "probabilities"
            elif min(abs(least), abs(most)) > OFF_BY and most > OFF_BY:
                mixed[loss] = "logits"
        bound, beyond = "", 0.0
        for name, number in self._bounds:
            if values[number][0] > beyond:
                bound, beyond = name, values[number][0]
        classes: tuple[int, ...] = ()
        if len(self._classes) == 1 and len(self._entropies) == 1:
            classes = tuple(int(count) for count in values[self._classes[0]])
        return replace(
            facts,
            mixed_up=mixed,
            broadcast=self.broadcast,
            bound=bound,
            beyond=beyond,
            parts_without_gradient=self._parts,
            single_class=self.single_class,
            classes=classes,
            cross_entropy=values[self._entropies[0]][0] if classes else None,
            spread=values[self._spread][0] if self._spread is not None else None,
        )


def _maker(tensor: Tensor) -> str:
    """Name of the autograd node that computed these values, behind views and casts."""
    node: Any = tensor.grad_fn
    while node is not None:
        name: str = node.name()
        if f"aten.{name.partition('Backward')[0]}" not in SHAPES_ONLY:
            return name
        node = node.next_functions[0][0] if node.next_functions else None
    return ""


def _axis_of_softmax(tensor: Tensor) -> int | None:
    """The axis that a log_softmax has just summed over; None where it is not known."""
    node: Any = tensor.grad_fn
    if node is None or node.name() != "LogSoftmaxBackward0":
        return None
    # autograd keeps it as an unsigned number
    axis: int = node._saved_dim
    return (axis - 2**64 if axis >= 2**63 else axis) % tensor.dim()


def _sum_of(node: Any) -> Iterator[Any]:
    """Nodes that add up the terms of a loss, from its root down."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        behind = [one for one, _ in node.next_functions if one is not None]
        if node.name() in SUMS:
            yield node
            waiting += behind
        elif node.name() in PASSES and len(behind) == 1:
            waiting += behind


def _spreads_by_chance(learned: Tensor, fixed: Tensor) -> bool:
    """(n, 1) beside (n,): who wants all pairs writes the axis out."""
    for column, row in ((learned, fixed), (fixed, learned)):
        if column.dim() == 2 and row.dim() == 1 and column.shape[1] == 1 and len(row) > 1:
            made = column.grad_fn.name() if column.grad_fn is not None else ""
            return column.shape[0] == row.shape[0] and not made.startswith("Unsqueeze")
    return False


def _log_sums(values: Tensor, dim: int) -> tuple[Tensor, ...]:
    """Least and largest logarithm of a row's sum of exponentials; the smallest value; how far the
    sum of a row is from 1 at most.
    """
    wide = values.float()
    sums = torch.logsumexp(wide, dim)
    off = (wide.sum(dim) - 1.0).abs().amax()
    return sums.amin(), sums.amax(), wide.amin(), off


# --- What the look notes of attention, normalisation, activations and classification losses.


SOFTMAX = aten("_softmax _safe_softmax")
FUSED_ATTENTION = aten(
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math"
)
NORMS = aten(
    "native_layer_norm native_batch_norm _native_batch_norm_legit native_group_norm "
    "_native_batch_norm_legit_functional cudnn_batch_norm miopen_batch_norm _fused_rms_norm"
)
RECTIFIERS = aten("relu relu_ threshold clamp_min hardtanh hardtanh_")
SATURATING = {"aten.sigmoid": (0.01, 0.99), "aten.tanh": (-0.99, 0.99)}
TARGETS = aten("nll_loss_forward nll_loss2d_forward")
MOST_ROWS = 2048
"""Rows of an attention that are looked at."""
MOST_QUERIES = 64
MOST_KEYS = 4096
MASKED_BELOW = -1e4
"""Logits below are taken for masked positions."""
SURE_OF_A_SUM = 4e-3
"""Probabilities that were rounded to bfloat16 sum to 1 within half of this."""


@dataclass(slots=True)
class LayerFacts:
    """Numbers on the device, and the row of the record that each becomes."""

    numbers: Numbers
    _rows: list[tuple[Any, dict[str, Any], tuple[str, ...], int]] = field(default_factory=list)
    """Kind of row, what is known of it, the names of its numbers, and where these are."""
    _targets: list[tuple[int, int]] = field(default_factory=list)
    _probabilities: list[int] = field(default_factory=list)

    def before(self, operator: Operator, args: Any, kwargs: Any, module: str | None) -> None:
        """Note what goes in, where the operation may overwrite it."""
        if operator.name in LOG_SOFTMAX:
            # rows that are between 0 and 1 and sum to 1 have been through a softmax
            values, dim = args[0].detach(), args[1]
            if values.dim() > 1 and values.shape[dim] > 1:
                wide = values.float()
                off = torch.maximum((wide.sum(dim) - 1.0).abs().amax(), (-wide).amax())
                self._probabilities.append(self.numbers.add(off))
        elif operator.name in TARGETS:
            ignored = self.numbers.add((args[1] == args[4]).sum())
            self._targets.append((ignored, args[1].numel()))

    def after(
        self, operator: Operator, args: Any, kwargs: Any, results: list[Tensor], module: str | None
    ) -> None:
        """Note what came out of a forward operation."""
        name = operator.name
        place = module or ""
        if name in SOFTMAX and place:
            logits, dim = args[0].detach(), args[1]
            if logits.dim() > 2 and dim in (-1, logits.dim() - 1):
                self._add_rows(place, logits.reshape(-1, logits.shape[-1]))
        elif name in FUSED_ATTENTION:
            self._note_fused(place, args, kwargs)
        elif name in NORMS:
            zeros = (sampled(results[0].detach()) == 0).double().mean()
            dtype = str(args[0].dtype).removeprefix("torch.")
            self._add(
                NormLook,
                {"scale": root_mean_square(args[0].detach()), "output_zeros": zeros},
                module=place,
                dtype=dtype,
            )
        elif name in RECTIFIERS or name in SATURATING:
            values = results[0].detach()
            if not (values.dim() < 2):
                axis = 1 if values.dim() == 4 else values.dim() - 1
                units = values.shape[axis]
                if name in SATURATING:
                    low, high = SATURATING[name]
                    sample = sampled(values)
                    measured = {"saturated": ((sample < low) | (sample > high)).double().mean()}
                else:
                    others = [dim for dim in range(values.dim()) if dim != axis]
                    measured = {"dead": (values.amax(others) <= 0).double().mean()}
                positions = values.numel() // max(units, 1)
                self._add(
                    UnitLook, measured, module=place, op=name, units=units, positions=positions
                )

    def _add(self, kind: Any, measured: dict[str, Tensor], **known: Any) -> None:
        number = self.numbers.add(*measured.values())
        self._rows.append((kind, known, tuple(measured), number))

    # --- attention ------------------------------------------------------------------------------

    def _note_fused(self, module: str, args: Any, kwargs: Any) -> None:
        """A fused attention keeps its logits to itself: compute some of them again."""
        query, key = args[0].detach()[:1], args[1].detach()[:1]
        if query.shape[1] != key.shape[1] or key.shape[-2] > MOST_KEYS:
            return  # grouped heads; too many keys to be cheap
        stride = max(1, query.shape[-2] // MOST_QUERIES)
        positions = torch.arange(0, query.shape[-2], stride, device=query.device)
        scale = kwargs.get("scale") or 1.0 / math.sqrt(query.shape[-1])
        rows = query[:, :, positions].float() @ key.float().transpose(-2, -1) * scale
        mask = kwargs.get("attn_mask")
        if isinstance(mask, Tensor) and mask.is_floating_point():
            # a mask may have one row for all queries, and one for all heads or samples
            shown = mask.detach()[:1] if mask.dim() == 4 else mask.detach()
            rows = rows + shown.expand(*rows.shape[:2], query.shape[-2], -1)[:, :, positions]
        # `is_causal` stands behind the dropout in every fused attention, or is a keyword
        if kwargs.get("is_causal", any(argument is True for argument in args[3:])):
            keys = torch.arange(key.shape[-2], device=query.device)
            rows = rows.masked_fill(keys[None, :] > positions[:, None], -torch.inf)
        self._add_rows(module, rows.reshape(-1, rows.shape[-1]))

    def _add_rows(self, module: str, logits: Tensor) -> None:
        stride = max(1, math.ceil(logits.shape[0] / MOST_ROWS))
        wide = logits[::stride].float()
        seen = wide > MASKED_BELOW
        keys = seen.sum(-1)
        several = keys > 1
        weights = torch.softmax(wide, -1)
        entropy = -(weights * torch.log(weights.clamp_min(1e-30))).sum(-1)
        relative = entropy / torch.log(keys.clamp_min(2).float())
        count = several.sum().clamp_min(1)
        measured = {
            "largest_logit": torch.where(seen, wide, -torch.inf).amax(),
            "entropy": torch.where(several, relative, 0.0).sum() / count,
            "collapsed": (several & (weights.amax(-1) > 0.99)).sum() / count,
            "uniform": (several & (relative > 0.999)).sum() / count,
        }
        self._add(AttentionLook, measured, module=module, keys=logits.shape[-1])

    # --- on the host ----------------------------------------------------------------------------

    def rows(self, kind: Any, values: list[list[float]]) -> tuple[Any, ...]:
        """The rows of this kind, in the order of their operations."""
        found: list[Any] = []
        for one, known, names, number in self._rows:
            if one is kind and len(found) < MOST_ROWS_KEPT:
                found.append(kind(**known, **dict(zip(names, values[number], strict=True))))
        return tuple(found)

    def facts(self, values: list[list[float]]) -> StepFacts:
        ignored = sum(values[number][0] for number, _ in self._targets)
        labels = sum(count for _, count in self._targets)
        twice = any(values[number][0] < SURE_OF_A_SUM for number in self._probabilities)
        return StepFacts(labels=labels, ignored=int(ignored), softmax_twice=twice)


# --- A dispatch mode that watches a healthy step: every operation runs once, as it would have.


MOST_RESULTS = 20_000
"""Results that are measured; a validation between two updates must not fill the memory."""
CONVERSIONS = aten("_to_copy copy_")
DISPATCH_SECONDS = 5e-6
"""What passing one operation through a mode costs, besides the statistics: measured on a CPU."""


@dataclass(slots=True)
class ObservedResult:
    """One result of one operation."""

    op: str
    module: str
    stage: Stage
    dtype: torch.dtype
    vector: int
    """Number of its statistics."""
    parents: tuple[int, ...]
    """Numbers of the results it was made of."""
    may_hold_infinity: bool = False
    """An infinity is an ordinary argument of this operation."""
    conversion: int | None = None
    """Number of the vector that counts what became 0 in a conversion."""


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches the operations between `start` and `stop`. A fault of its own ends the look only."""

    def __init__(
        self,
        roots: Mapping[str, nn.Module],
        trained: Iterable[int] = (),
        owned: Iterable[int] = (),
    ) -> None:
        """`trained`: identities of what this guard's optimizer updates, `owned`: of what any
        optimizer of the process does.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules = ModuleSpans(dict(roots))
        self.numbers = Numbers()
        self.seen: list[ObservedResult] = []
        self.layers = LayerFacts(self.numbers)
        known = {id(one) for root in roots.values() for one in root.parameters()}
        self.loss = LossFacts(self.numbers, set(trained), known | {*trained, *owned})
        self.fault: Exception | None = None
        self.layer_fault: Exception | None = None
        """Why nothing more is noted of layers; everything else is measured on."""
        self.paused = False
        """The guard does work of its own, which is not part of the step."""
        self.backward_begins: Callable[[], None] | None = None
        """Called at the first operation of every backward pass."""
        self.seconds = 0.0
        self._in_backward = False
        self._last: dict[int, int] = {}
        """Who wrote the memory at this address last."""
        self._process = os.getpid()
        self._running = False

    @property
    def on_the_stack(self) -> bool:
        """True while torch hands it every operation."""
        return self._running

    def start(self) -> None:
        """Begin to watch, or go on after `stop`."""
        self.paused = False
        self._running = True
        self.modules.__enter__()
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Watch no more; what was seen stays. Call it again if it was called inside a backward."""
        self.paused = True
        # The engine puts the modes of its beginning back when a backward pass ends.
        if self._running and current_autograd_node() is None:
            self._running = False
            leave(self)
            self.modules.__exit__()

    def store(self, name: str, tensor: Tensor) -> None:
        """Make a tensor known that no operation of the step made."""
        self._add(name, "", "stored", tensor, (), may_hold_infinity=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # a worker process of a data loader inherits the mode
        elsewhere = os.getpid() != self._process or func.namespace in sharded.NAMESPACES
        full = self.fault is not None or len(self.seen) >= MOST_RESULTS
        if self.paused or full or elsewhere:
            return func(*args, **kwargs)
        operator = describe(func)
        before = self._before(operator, args, kwargs)
        result = func(*args, **kwargs)
        if before is not None:
            self._after(operator, before, args, kwargs, result)
        return result

    def _before(self, operator: Operator, args: Any, kwargs: Any) -> list[Tensor] | None:
        """The tensors that go in; None where the operation makes no values."""
        began = time.thread_time()
        try:
            if operator.views or operator.name in TESTS or operator.name in UNINITIALISED:
                return None
            backward = self._stage() == "backward"
            if backward and not self._in_backward and self.backward_begins is not None:
                self.backward_begins()
            self._in_backward = backward
            entries = operator.entries(args, kwargs)
            tensors = [entry.value for entry in entries if isinstance(entry.value, Tensor)]
            # before it runs: an operation in place overwrites what it reads
            self._note(self.layers.before, operator, args, kwargs)
            if self._stage() == "forward":
                self._note(self.loss.before, operator, args, kwargs)
            return tensors
        except Exception as fault:
            self.fault = fault
            return None
        finally:
            self.seconds += time.thread_time() - began

    def _after(
        self, operator: Operator, given: list[Tensor], args: Any, kwargs: Any, result: Any
    ) -> None:
        began = time.thread_time()
        try:
            parents = self._parents(given)
            module = self._module()
            stage = self._stage()
            results = [one for one in _as_list(result) if isinstance(one, Tensor)]
            if not results and operator.written and args:
                # an operation without a result writes its first argument
                results = [one for one in given if one is args[0]]
            for tensor in results:
                known = operator.name in TAKES_INFINITY
                self._add(operator.name, module, stage, tensor, parents, may_hold_infinity=known)
            if operator.name in CONVERSIONS and results:
                self._note_conversion(given[-1], results[0])
            if stage == "forward":
                self._note(self.layers.after, operator, args, kwargs, results)
                self._note(self.loss.after, operator, args, kwargs, results)
        except Exception as fault:
            self.fault = fault
        finally:
            self.seconds += time.thread_time() - began + DISPATCH_SECONDS

    def _note(self, note: Callable[..., None], *given: Any) -> None:
        if self.layer_fault is None:
            try:
                note(*given, self.modules.current)
            except Exception as fault:
                self.layer_fault = fault

    def _parents(self, given: list[Tensor]) -> tuple[int, ...]:
        parents = []
        for tensor in given:
            if not numeric(tensor):
                continue
            key = storage_key(tensor)
            if key not in self._last:
                self.store("constant", tensor)
            if key in self._last:
                parents.append(self._last[key])
        return tuple(parents)

    def _add(
        self,
        op: str,
        module: str,
        stage: Stage,
        tensor: Tensor,
        parents: tuple[int, ...],
        *,
        may_hold_infinity: bool,
    ) -> None:
        if not numeric(tensor):
            return
        vector = vector_of(tensor)
        if vector is None:
            return
        number = self.numbers.add(vector)
        dtype = plain(tensor).dtype
        self._last[storage_key(tensor)] = len(self.seen)
        self.seen.append(
            ObservedResult(op, module, stage, dtype, number, parents, may_hold_infinity)
        )

    def _note_conversion(self, before: Tensor, after: Tensor) -> None:
        """Count what a narrower dtype rounds to 0."""
        if not self.seen or not numeric(before) or not numeric(after):
            return
        narrower = torch.finfo(after.dtype).tiny > torch.finfo(before.dtype).tiny
        if narrower and before.shape == after.shape:
            self.seen[-1].conversion = self.numbers.add(rounded_to_zero(before, after))

    def _module(self) -> str:
        node = current_autograd_node()
        if node is None or self.modules.current is not None:
            return self.modules.current or ""
        return self.modules.created(node._sequence_nr()) or ""

    def _stage(self) -> Stage:
        if current_autograd_node() is None or self.modules.current is not None:
            return "forward"
        return "backward"


def _as_list(result: Any) -> list[Any]:
    return list(result) if isinstance(result, list | tuple) else [result]


# --- One deep look: begin before the forward pass, end after the update, and get a record.


MOST_ROWS_KEPT = 400
"""Rows of each kind that a record keeps, the worst ones."""
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules whose parts a model calls one by one, or chooses from."""
GRADIENT_SAMPLE = 256
"""Elements of each gradient that say whether it is 0."""


class DeepLook:
    """Watches one step. Nothing it does changes the step."""

    def __init__(
        self, step: int, roots: Mapping[str, nn.Module], optimizer: Optimizer, owned: set[int]
    ) -> None:
        self.step = step
        self.batch = SeenBatch()
        self._roots = roots
        self._optimizer = optimizer
        self._owned = owned
        self.observer = Observer(roots, optimizer_parameter_ids(optimizer), owned)
        self.observer.backward_begins = self._backward_begins
        self._updates: Updates | None = None
        self._seconds = 0.0
        self._kept_gradients: list[int | None] = []
        """For each backward pass: number of gradients found there that are not 0; None: none."""

    def begin(self) -> None:
        """The step begins."""
        began = time.thread_time()
        # Inside a transform of functorch the modules hold wrappers, whose memory cannot be told.
        if not transforming():
            for name, parameter in named_parameters(self._roots):
                if not is_lazy(parameter):
                    self.observer.store(f"param:{name}", parameter)
            for name, buffer in named_buffers(self._roots):
                if not is_lazy(buffer):
                    self.observer.store(f"buffer:{name}", buffer)
        self._seconds += time.thread_time() - began
        self.observer.start()

    def _backward_begins(self) -> None:
        """Note which gradients are there already."""
        parts = []
        updated = optimizer_parameter_ids(self._optimizer)
        for _, parameter in named_parameters(self._roots):
            gradient = parameter.grad
            if id(parameter) not in updated:
                continue  # another player's: its own loop zeroes it
            if gradient is not None and gradient.layout is torch.strided and gradient.numel():
                part = sampled(plain(gradient), GRADIENT_SAMPLE)
                parts.append((part != 0).any())
        number = None
        if parts:
            number = self.observer.numbers.add(torch.stack(parts).sum())
        self._kept_gradients.append(number)

    def loss_seen(self, root: Tensor) -> None:
        """A backward pass begins at this loss. One that does not call the model before it goes
        unobserved, and counts.
        """
        self._backward_begins()
        self.observer.loss.backward_begins(root)

    @property
    def outsiders(self) -> list[Tensor]:
        """Tensors that got a gradient and belong to no model and no optimizer."""
        return [one for one in self.observer.loss.outsiders if one.grad is not None]

    def before_update(self) -> None:
        """The optimizer is about to step."""
        began = time.thread_time()
        self._updates = Updates(self._roots, self._optimizer, self._owned)
        self._seconds += time.thread_time() - began

    def finish(self, *, committed: bool) -> Look:
        """The update is over."""
        began = time.thread_time()
        self.observer.stop()
        parameters: tuple[ParameterLook, ...] = ()
        if self._updates is not None:
            parameters = self._updates.finish(committed=committed)
        values = self.observer.numbers.read()
        layers = self.observer.layers
        tensors = tensor_rows(self.observer.seen, values)
        look = Look(
            step=self.step,
            tensors=tuple(tensors[:MOST_ROWS_KEPT]),
            parameters=_worst_parameters(parameters),
            attention=layers.rows(AttentionLook, values),
            norms=layers.rows(NormLook, values),
            units=layers.rows(UnitLook, values),
            facts=self._facts(self.observer.loss.facts(layers.facts(values), values), values),
            left_out=max(0, len(tensors) - MOST_ROWS_KEPT)
            + max(0, len(parameters) - MOST_ROWS_KEPT),
        )
        self._seconds += time.thread_time() - began
        return replace(look, seconds=self._seconds + self.observer.seconds)

    def _facts(self, facts: StepFacts, values: list[list[float]]) -> StepFacts:
        dropout = []
        norms = []
        for name, module in named_modules(self._roots):
            if module.training:
                continue
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
                dropout.append(name)
            if isinstance(module, nn.modules.batchnorm._NormBase):
                norms.append(name)
        # Every backward pass of the step found gradients. The first of an accumulated step finds
        # none; nor does the last one where `zero_grad` stands between a gradient inside the loss
        # and its backward pass.
        counts = []
        for number in self._kept_gradients:
            counts.append(0.0 if number is None else values[number][0])
        without: tuple[str, ...] = ()
        if self._updates is not None:
            without = without_unused_parts(self._roots, self._updates.without_gradient)
        return replace(
            facts,
            batch=self.batch.digest,
            samples=self.batch.samples,
            training=next(iter(self._roots.values())).training,
            dropout=tuple(dropout),
            norms_in_eval=tuple(norms),
            kept_gradients=bool(counts) and min(counts) > 0.0,
            without_gradient=without,
        )


def without_unused_parts(roots: Mapping[str, nn.Module], names: tuple[str, ...]) -> tuple[str, ...]:
    """These parameters, less those of a container of which others have a gradient.

    An expert or the head of a task is used when its turn comes.
    """
    owned = [name for name, parameter in named_parameters(roots) if parameter.requires_grad]
    for prefix, module in named_modules(roots):
        if isinstance(module, CONTAINERS):
            inside = {name for name in owned if name.startswith(f"{prefix}.")}
            if not inside <= set(names):
                names = tuple(name for name in names if name not in inside)
    return names


def tensor_rows(seen: Sequence[ObservedResult], values: list[list[float]]) -> list[TensorLook]:
    """One row for each module, direction and dtype, those with the least headroom first."""
    groups: dict[tuple[str, str, torch.dtype], list[int]] = {}
    for index, one in enumerate(seen):
        name = one.op if one.stage == "stored" else one.module
        groups.setdefault((name, one.stage, one.dtype), []).append(index)
    rows = []
    for (name, _, dtype), indices in groups.items():
        rows.append(_row(name, dtype, indices, seen, values))
    return sorted(rows, key=lambda row: math.inf if row.headroom is None else row.headroom)


def _row(
    name: str,
    dtype: torch.dtype,
    indices: list[int],
    seen: Sequence[ObservedResult],
    values: list[list[float]],
) -> TensorLook:
    stats = []
    rounded = 0.0
    converted = 0.0
    for index in indices:
        stats.append(dict(zip(FIELDS, values[seen[index].vector], strict=True)))
        number = seen[index].conversion
        if number is not None:
            rounded += values[number][0]
            converted += values[number][1]
    largest = max(range(len(stats)), key=lambda at: stats[at]["largest"])
    smallest = min(one["smallest"] for one in stats)
    elements = max(sum(one["elements"] for one in stats), 1.0)
    return TensorLook(
        module=name,
        stage=seen[indices[0]].stage,
        dtype=str(dtype).removeprefix("torch."),
        op=seen[indices[largest]].op,
        largest=stats[largest]["largest"],
        smallest=smallest if math.isfinite(smallest) else None,
        headroom=bits_of_headroom(stats[largest]["largest"], dtype),
        floor=bits_above_floor(smallest, dtype),
        zeros=sum(one["zeros"] for one in stats) / elements,
        subnormal=sum(one["subnormal"] for one in stats) / elements,
        rounded_away=rounded / converted if converted else 0.0,
        infinities=sum(_born_infinite(index, seen, values) for index in indices),
        elements=int(elements),
    )


def _born_infinite(index: int, seen: Sequence[ObservedResult], values: list[list[float]]) -> int:
    """Infinities of this result that come from finite operands."""
    one = seen[index]
    infinities = FIELDS.index("infinities")
    count = values[one.vector][infinities]
    if not count or one.may_hold_infinity:
        return 0
    if any(values[seen[parent].vector][infinities] for parent in one.parents):
        return 0
    return int(count)


def _worst_parameters(parameters: tuple[ParameterLook, ...]) -> tuple[ParameterLook, ...]:
    """Keep the order of the model; drop what moves as it should where there are too many."""
    if len(parameters) <= MOST_ROWS_KEPT:
        return parameters
    ranked = sorted(parameters, key=_suspicion, reverse=True)[:MOST_ROWS_KEPT]
    kept = {one.name for one in ranked}
    return tuple(one for one in parameters if one.name in kept)


def _suspicion(one: ParameterLook) -> float:
    return (one.lost or 0.0) + one.gradient_zeros + (one.ratio or 0.0)
