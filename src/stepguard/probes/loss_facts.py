"""What the look notes of loss functions: are they given what they take, and does all of it count?

The operations are told apart by their autograd nodes, which say what made an operand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from stepguard.locate.operands import Operator, aten, storage_key
from stepguard.probes.statistics import Numbers, sampled
from stepguard.records.probes import StepFacts
from stepguard.tensors.torch_private import next_sequence_number

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
