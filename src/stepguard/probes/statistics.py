"""Statistics of tensors as small vectors on their device, read back together at the end.

Nothing here waits for the device: a probe must not add a sync to every operation.
"""

from __future__ import annotations

import hashlib
import math
import operator
import weakref
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stepguard.locate.operands import UNINITIALISED, Operator, numeric, plain
from stepguard.locate.source import backward_caller
from stepguard.records.probes import NextBatch, ParameterLook
from stepguard.tensors.names import (
    named_parameters,
    optimizer_parameter_ids,
    optimizer_parameters,
    parameter_names,
)
from stepguard.tensors.torch_private import current_autograd_node, tree_flatten
from stepguard.tensors.values import is_lazy

# --- Statistics of tensors as small vectors on their device, read back together at the end.


SAMPLE = 65_536
"""Elements of a tensor that shares are counted on; the extremes are taken over all of it."""

Rows = defaultdict[Any, list[dict[str, Any]]]
"""Measurements by their kind, in the order in which they were made: each by name."""


class Numbers:
    """Measurements on their devices, each of a kind, with what is known of it on the host."""

    def __init__(self) -> None:
        self._rows: list[tuple[Any, dict[str, Any], list[tuple[str, int]], Tensor]] = []

    def add(self, kind: Any, known: dict[str, Any], **measured: Tensor) -> None:
        """Keep these numbers as one vector."""
        parts = [part.to(torch.float64).reshape(-1) for part in measured.values()]
        sizes = list(zip(measured, map(len, parts), strict=True))
        self._rows.append((kind, known, sizes, torch.cat(parts)))

    def read(self) -> Rows:
        """All measurements with their numbers, by one copy from each device."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for *_, vector in self._rows:
            by_device.setdefault(vector.device, []).append(vector)
        values = {device: iter(torch.cat(some).tolist()) for device, some in by_device.items()}
        rows: Rows = defaultdict(list)
        for kind, known, sizes, vector in self._rows:
            row = dict(known)
            for name, size in sizes:
                numbers = list(islice(values[vector.device], size))
                row[name] = numbers[0] if size == 1 else numbers
            rows[kind].append(row)
        return rows


def sampled(values: Tensor, most: int = SAMPLE) -> Tensor:
    """Evenly spread elements of a tensor, as one row; a view where that is possible."""
    flat = values.reshape(-1)
    stride = max(1, math.ceil(flat.numel() / most))
    return flat[::stride]


def statistics_of(tensor: Tensor) -> dict[str, Tensor]:
    """The statistics of one tensor, on its device; empty where it holds no numbers."""
    values = plain(tensor)
    if not values.is_floating_point() or values.numel() == 0:
        return {}
    limits = torch.finfo(values.dtype)
    if values.element_size() == 1:
        # torch has no reductions of 8-bit floats
        values = values.float()
    low, high = torch.aminmax(values)
    sizes = sampled(values).abs()
    if sizes.dtype is not torch.float64:
        sizes = sizes.float()
    present = sizes > 0
    finite = torch.isfinite(sizes)
    # finite extremes of the whole tensor count; an infinite one leaves the sample's largest
    whole = torch.maximum(low.abs(), high.abs()).to(sizes.dtype)
    largest = torch.where(finite, sizes, 0.0).amax()
    return {
        "largest": torch.where(torch.isfinite(whole), whole, largest),
        "smallest": torch.where(present, sizes, torch.inf).amin(),
        "zeros": (~present).sum(),
        "subnormal": (present & (sizes < limits.tiny)).sum(),
        "infinities": torch.maximum((~finite).sum(), (~torch.isfinite(whole)).sum()),
    }


def rounded_to_zero(before: Tensor, after: Tensor) -> Tensor:
    """How many elements a conversion turned into 0, on a sample."""
    given, got = sampled(plain(before)), sampled(plain(after))
    return ((given != 0) & (got == 0)).sum()


def bits_between(above: float, below: float) -> float | None:
    """How many times the lower number can be doubled."""
    if min(above, below) <= 0.0 or math.isinf(above):
        return None
    return math.log2(above) - math.log2(below)


def share_of(chosen: Tensor) -> Tensor:
    return chosen.double().mean()


def root_mean_square(values: Tensor) -> Tensor:
    """Root mean square in float64, of a sample of the values."""
    return sampled(values).double().square().mean().sqrt()


# --- Is this the batch of that step? By a digest of its numbers, and by the tensors themselves.


class SeenBatch:
    """What one step was given, in one or several calls. It keeps no tensor alive."""

    def __init__(self) -> None:
        self.digest = ""
        """Empty where nothing was seen that could differ between two batches."""
        self._tensors: list[weakref.ref[Tensor]] = []
        self._rows: Counter[int] = Counter()
        self._computed = False
        """A part of it has a gradient: coordinates of a physical model, which stay."""

    @property
    def samples(self) -> int:
        """The most common first dimension of its tensors; 0: there is none."""
        return self._rows.most_common(1)[0][0] if self._rows else 0

    def add(self, batch: Any) -> None:
        """The step's data, or a part of it."""
        self.digest = digest_of(batch, self.digest)
        for leaf in tree_flatten(batch)[0]:
            if isinstance(leaf, Tensor):
                self._computed |= leaf.requires_grad
                # the memory behind a view, which may be made anew in every step
                owner = leaf if leaf._base is None else leaf._base
                self._tensors.append(weakref.ref(owner))
                if leaf.dim():
                    self._rows[leaf.shape[0]] += 1

    def compared(self, later: SeenBatch) -> NextBatch:
        """What the step after this one was given."""
        if not self.digest or not later.digest or self._computed:
            return "unknown"
        if self.digest != later.digest:
            return "other"
        mine = [reference() for reference in self._tensors]
        theirs = [reference() for reference in later._tensors]
        alive = all(one is not None for one in mine)
        if alive and len(mine) == len(theirs) and all(map(operator.is_, mine, theirs)):
            return "same"
        return "equal"


def digest_of(batch: Any, before: str = "") -> str:
    """A short digest of a sample of every tensor in the batch; a constant one shows nothing."""
    digest = hashlib.blake2b(before.encode(), digest_size=8)
    found = bool(before)
    for leaf in tree_flatten(batch)[0]:
        if isinstance(leaf, Tensor) and leaf.numel() and leaf.layout is torch.strided:
            # at most this many elements of each tensor are compared
            part = sampled(plain(leaf), 4096).cpu().contiguous()
            values = part.view(torch.uint8).numpy().tobytes()
            if values == values[: part.element_size()] * part.numel():
                continue
            found = True
            digest.update(values)
    if found:
        return digest.hexdigest()
    return ""


# --- What an update does to each parameter, on a sample of its elements.


MOST_ROWS, MOST_COLUMNS = 64, 256
"""Units of a weight that are compared, and inputs of each."""
MOMENTS = ("exp_avg_sq", "square_avg", "sum", "v")
"""Names that optimizers give to their second moments."""


class Updates:
    """Sample all parameters before an update, and see what became of them."""

    def __init__(
        self,
        numbers: Numbers,
        roots: Mapping[str, nn.Module],
        optimizer: Optimizer,
        owned: set[int],
    ) -> None:
        """`owned`: identities of the parameters that any optimizer of the process updates."""
        self._numbers = numbers
        self._optimizer = optimizer
        self._sampled: list[tuple[Tensor, Tensor, Tensor | None]] = []
        """Parameter, and samples of its values and of its gradient before the update."""
        self._without: set[str] = set()
        self.rule = declared_rule(optimizer)
        self._tell: dict[int, Tensor] = {}
        """Whether an update of this parameter would show another rule, by its identity."""
        epsilons = _epsilons(optimizer)
        # Parameters with a gradient that only the optimizer knows are copies in float32 that the
        # weights are written back from.
        inside = {id(parameter) for _, parameter in named_parameters(roots)}
        copies = set()
        for parameter in optimizer_parameters(optimizer):
            if id(parameter) not in inside and parameter.grad is not None:
                copies.add(parameter.shape)
        for parameter, name in parameter_names(roots, optimizer):
            if is_lazy(parameter) or not parameter.is_floating_point() or not parameter.numel():
                continue
            before = sampled(plain(parameter)).clone()
            measured = {"weight": root_mean_square(before)}
            gradient: Tensor | None = None
            if parameter.grad is None:
                self._without.add(name)
            elif parameter.grad.layout is torch.strided:
                gradient = sampled(plain(parameter.grad)).clone()
                scale = getattr(optimizer, "grad_scale", None)
                if scale is not None:
                    # a scaler leaves it to the fused kernel to divide by its factor
                    gradient = gradient.float() / scale
                measured["gradient"] = root_mean_square(gradient)
                measured["gradient_zeros"] = share_of(gradient == 0)
                measured["copies"] = _rows_are_copies(parameter)
                if self.rule:
                    self._note_rule(parameter, gradient, epsilons.get(id(parameter)))
            known = {
                "name": name,
                "dtype": str(parameter.dtype).removeprefix("torch."),
                "elements": parameter.numel(),
                "trainable": parameter.requires_grad,
                "owned": id(parameter) in owned or parameter.shape in copies,
                "epsilon": epsilons.get(id(parameter)),
            }
            numbers.add("before", known, **measured)
            self._sampled.append((parameter, before, gradient))

    def _note_rule(self, parameter: Tensor, gradient: Tensor, epsilon: float | None) -> None:
        """Note whether the update of this parameter would show another rule than the declared."""
        # Elements from which the shape of an update says something
        if parameter.numel() >= 64:
            tells = _tells(self.rule, parameter, gradient, epsilon or 0.0)
            if tells is not None:
                self._tell[id(parameter)] = tells

    def committed(self) -> None:
        """The update is over."""
        updated = optimizer_parameter_ids(self._optimizer)
        for index, (parameter, before, gradient) in enumerate(self._sampled):
            now = sampled(plain(parameter))
            # else its own optimizer has not stepped yet, or it was replaced
            if id(parameter) in updated and gradient is not None and now.shape == before.shape:
                asked = gradient != 0
                count = asked.sum().clamp_min(1).double()
                measured = {
                    "update": root_mean_square(now.double() - before.double()),
                    "lost": (asked & (now == before)).sum() / count,
                }
                state = self._optimizer.state.get(parameter, {})
                # what keeps something of earlier gradients is believed to use it
                kept = self.rule == "memory" and state
                if id(parameter) in self._tell and not kept:
                    apart = _apart(now, before, gradient, state, parameter)
                    told = self._tell[id(parameter)]
                    measured["apart"] = torch.where(told, apart, 1.0)
                for value in map(state.get, MOMENTS):
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        moment = sampled(plain(value))
                        measured["variance_zeros"] = (asked & (moment == 0)).sum() / count
                        measured["variance"] = torch.where(moment > 0, moment, torch.inf).amin()
                        break
                self._numbers.add("after", {"index": index}, **measured)

    def rows(self, values: Rows) -> tuple[list[ParameterLook], list[str]]:
        """What was measured; and the trainable parameters of the optimizer without a gradient."""
        updated = optimizer_parameter_ids(self._optimizer)
        rows = values["before"]
        for after in values["after"]:
            rows[after.pop("index")] |= after
        found = []
        without = []
        for row, (parameter, _, gradient) in zip(rows, self._sampled, strict=True):
            row["copies"] = row.get("copies", 0.0) > 0.0
            one = ParameterLook(**row)
            found.append(one)
            missing = one.name in self._without
            if gradient is not None:
                # nothing but zeros in one that was seen whole; those of a bias may cancel out
                whole = parameter.dim() > 1 and len(gradient) == parameter.numel()
                missing = whole and one.gradient_zeros >= 1.0
            if missing and one.trainable and id(parameter) in updated:
                without.append(one.name)
        return found, without


PER_ELEMENT = ("adam", "adamw", "nadam", "adamax", "rmsprop", "lion", "adagrad")
ORTHOGONAL = ("muon",)
WITH_AUX = ("muonwithauxadam", "singledevicemuon", "singledevicemuonwithauxadam")
"""Names of Muon in its author's package."""
DIRECTIONS = ("exp_avg", "momentum_buffer", "momentum")
"""Names of an optimizer's running mean of the gradient."""


def declared_rule(optimizer: Optimizer) -> str:
    """What its name and settings say of the update: `element`, `orthogonal`, `memory` of earlier
    gradients; empty where that is not known.
    """
    name = type(optimizer).__name__.lower()
    if name in ORTHOGONAL or name in WITH_AUX:
        return "orthogonal"
    if name in PER_ELEMENT:
        return "element"
    momentum = [group.get("momentum", group.get("betas", 0)) for group in optimizer.param_groups]
    remembers = all(isinstance(one, tuple | list | float) and one for one in momentum)
    return "memory" if remembers else ""


def _tells(rule: str, parameter: Tensor, gradient: Tensor, epsilon: float) -> Tensor | None:
    """True where the declared rule and plain descent give clearly different updates."""
    if parameter.element_size() < 4 or parameter.layout is not torch.strided:
        # rounding is larger than what is to be seen
        return None
    if rule == "memory":
        return gradient.any()
    if rule == "element":
        size = root_mean_square(gradient)
        # Mean over root mean square: gradients of one size give the same update by any rule
        uneven: Tensor = gradient.abs().double().mean() < 0.9 * size
        # an epsilon above the gradient makes plain descent of it, by design
        return uneven & (size > 100.0 * epsilon)
    # Elements of a matrix whose singular values are computed
    if parameter.dim() != 2 or min(parameter.shape) < 4 or parameter.numel() > (1 << 18):
        return None
    assert parameter.grad is not None
    values: Tensor = torch.linalg.svdvals(plain(parameter.grad).float())
    middle = values[len(values) // 2]
    # a matrix of low rank has nothing to be made even
    # Largest singular value over the median: an orthogonal update differs clearly from there on
    return (values[0] > 2.0 * middle) & (middle > 1e-4 * values[0])


def _apart(
    now: Tensor, before: Tensor, gradient: Tensor, state: Mapping[str, Any], parameter: Tensor
) -> Tensor:
    """Share of the update that is no multiple of gradient, running mean and weight: 0 for SGD."""
    basis = [gradient, before]
    for name in DIRECTIONS:
        value = state.get(name)
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            basis.append(sampled(plain(value)))
    columns = torch.stack([one.double() for one in basis], 1)
    # of one length each, so that none is taken for rounding of another
    columns = columns / columns.norm(dim=0).clamp_min(1e-300)
    change = now.double() - before.double()
    directions, _ = torch.linalg.qr(columns)
    rest = change - directions @ (directions.T @ change)
    size = change.norm()
    return torch.where(size > 0, rest.norm() / size.clamp_min(1e-300), 1.0)


def _rows_are_copies(parameter: Tensor) -> Tensor:
    """1.0 where all units have equal weights and equal gradients, so that they stay equal."""
    equal = [torch.zeros((), dtype=torch.bool, device=parameter.device)]
    if parameter.dim() > 1 and parameter.shape[0] > 1 and parameter.grad is not None:
        equal = []
        for values in (plain(parameter), plain(parameter.grad)):
            rows = values.reshape(values.shape[0], -1)[:MOST_ROWS, :MOST_COLUMNS]
            equal.append((rows == rows[:1]).all())
        equal.append((rows != 0).any())
    return torch.stack(equal).all()


def _epsilons(optimizer: Optimizer) -> dict[int, float]:
    """By identity of a parameter: the group's epsilon, 0 where it is nothing in its dtype."""
    found = {}
    for group in optimizer.param_groups:
        epsilon = group.get("eps")
        if not isinstance(epsilon, float | int):
            continue
        for parameter in group["params"]:
            found[id(parameter)] = float(epsilon)
            if parameter.is_floating_point():
                limits = torch.finfo(parameter.dtype)
                # below half of the smallest number above 0 it rounds to 0
                if epsilon < limits.smallest_normal * limits.eps / 2.0:
                    found[id(parameter)] = 0.0
    return found


# --- Checkpointed blocks: does the second forward compute what the first one did?
#
# Activation checkpointing throws results away and computes them anew. Where the second run differs
# (dropout with other random numbers, a counter, a function that is not deterministic), the gradient
# belongs to another forward than the loss. Every operation of the first forward is remembered by a
# few elements of what went in and came out; one that is given the same in the second forward must
# give the same.

ROUNDING = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
DIFFERENT = 0.01
"""Share of elements that differ by more than rounding."""


Seen = tuple[str, list[Tensor], Tensor]
"""The module of one operation, and a few elements of what it was given and gave."""


class Recomputed:
    """Compares the second forward of checkpointed blocks with the first, on the device."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers
        self._first: dict[Any, list[Seen]] = defaultdict(list)
        self._count = 0
        self._given: list[Tensor] = []
        self._second = False
        """The operation that runs belongs to a second forward."""

    def before(self, operator: Operator, args: Any, kwargs: Any) -> None:
        """Keep elements of what goes in, before an operation in place overwrites it."""
        self._given = []
        in_backward = current_autograd_node() is not None
        self._second = in_backward and backward_caller()[1]
        if in_backward and not self._second:
            return
        for name, value in operator.entries(args, kwargs):
            if isinstance(value, Tensor) and numeric(value) and operator.reads(name):
                self._given.append(_elements(value))

    def after(self, operator: Operator, results: list[Tensor], module: str) -> None:
        """Remember a call of the first forward, or compare one of the second."""
        numbers = [one for one in results if numeric(one) and one.numel()]
        if not numbers or operator.name in UNINITIALISED:
            return
        first = numbers[0]
        if not self._second and current_autograd_node() is not None:
            return
        seen = (module, self._given, _elements(first))
        sizes = tuple((len(one), one.dtype) for one in self._given)
        key = (operator.name, tuple(first.shape), first.dtype, first.device, sizes)
        if self._second:
            self._compare(key, seen)
            return
        self._count += 1
        if self._count <= 20_000:
            self._first[key].append(seen)

    def _compare(self, key: Any, seen: Seen) -> None:
        """Compare with all calls that look alike: one must have given the same for the same."""
        earlier = self._first.get(key, ())
        # Calls of one operation with the same shapes; of more nothing is said
        if not 0 < len(earlier) <= 128:
            return
        modules, inputs_before, results = zip(*earlier, strict=True)
        outputs = _shares(results, seen[2])
        inputs = torch.zeros_like(outputs)
        for before, part in zip(zip(*inputs_before, strict=True), seen[1], strict=True):
            share = _shares(before, part)
            inputs = torch.maximum(inputs, share.to(inputs.device))
        known = {"op": key[0], "modules": list(modules)}
        self._numbers.add("recomputed", known, inputs=inputs, outputs=outputs)

    @staticmethod
    def facts(values: Rows) -> dict[str, Any]:
        """The first operation that differs, and how many were compared."""
        rows = values["recomputed"]
        for row in rows:
            parts = [row[name] for name in ("inputs", "outputs")]
            inputs, outputs = (one if isinstance(one, list) else [one] for one in parts)
            alike = []
            for before, after, module in zip(inputs, outputs, row["modules"], strict=True):
                if before <= DIFFERENT:
                    alike.append((after, module))
            share = min((after for after, _ in alike), default=0.0)
            if share > DIFFERENT:
                modules = {module for _, module in alike}
                return {
                    "recomputed": len(rows),
                    "recomputed_otherwise": (modules.pop() if len(modules) == 1 else "", row["op"]),
                    "recomputed_share": share,
                }
        return {"recomputed": len(rows)}


def _elements(tensor: Tensor) -> Tensor:
    # Elements of each tensor that are compared
    return sampled(plain(tensor), 256).clone()


def _shares(earlier: Sequence[Tensor], now: Tensor) -> Tensor:
    """For each, the share of elements that differ from those of now by more than rounding."""
    one, other = torch.stack(list(earlier)).float(), now.float()
    # of other dtypes
    allowed = ROUNDING.get(now.dtype, 1e-3)
    # what is not finite in both is no difference: a mask is infinite both times
    apart = (one - other).abs() > allowed * (other.abs() + other.abs().nan_to_num(0, 0, 0).mean())
    return apart.float().mean(1) if now.numel() else apart.float().sum(1)
