"""Statistics of tensors as small vectors on their device, read back together at the end.

Nothing here waits for the device: a look must not add a sync to every operation.
"""

from __future__ import annotations

import hashlib
import math
import operator
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stepguard.locate.operands import plain
from stepguard.records.probes import NextBatch, ParameterLook
from stepguard.tensors.names import (
    named_parameters,
    optimizer_parameter_ids,
    optimizer_parameters,
    parameter_names,
)
from stepguard.tensors.torch_private import tree_flatten
from stepguard.tensors.values import is_lazy

# --- Statistics of tensors as small vectors on their device, read back together at the end.


SAMPLE = 65_536
"""Elements of a tensor that shares are counted on; the extremes are taken over all of it."""
FIELDS = ("largest", "smallest", "zeros", "subnormal", "infinities", "lowest", "elements")
"""What the numbers of one vector are."""


@dataclass(slots=True)
class Numbers:
    """Vectors on their devices, and what each becomes on the host."""

    _vectors: list[Tensor] = field(default_factory=list)

    def add(self, *parts: Tensor) -> int:
        """Keep these numbers as one vector; returns its number for `read`."""
        wide = [part.to(torch.float64).reshape(-1) for part in parts]
        self._vectors.append(torch.cat(wide) if len(wide) > 1 else wide[0])
        return len(self._vectors) - 1

    def read(self) -> list[list[float]]:
        """All vectors as numbers, with one copy from each device."""
        values: list[list[float]] = [[] for _ in self._vectors]
        by_device: dict[torch.device, list[int]] = {}
        for index, vector in enumerate(self._vectors):
            by_device.setdefault(vector.device, []).append(index)
        for indices in by_device.values():
            flat = torch.cat([self._vectors[index] for index in indices]).tolist()
            for index in indices:
                length = self._vectors[index].numel()
                values[index] = flat[:length]
                flat = flat[length:]
        return values


def sampled(values: Tensor, most: int = SAMPLE) -> Tensor:
    """Evenly spread elements of a tensor, as one row; a view where that is possible."""
    flat = values.reshape(-1)
    stride = max(1, math.ceil(flat.numel() / most))
    return flat[::stride]


def vector_of(tensor: Tensor) -> Tensor | None:
    """The statistics of one tensor, in the order of FIELDS; None where it holds no numbers."""
    values = plain(tensor)
    if not values.is_floating_point() or values.numel() == 0:
        return None
    limits = torch.finfo(values.dtype)
    if values.element_size() == 1:
        # torch has no reductions of 8-bit floats
        values = values.float()
    low, high = torch.aminmax(values)
    sample = sampled(values)
    sizes = sample.abs()
    if sizes.dtype is not torch.float64:
        sizes = sizes.float()
    present = sizes > 0
    finite = torch.isfinite(sizes)
    smallest = torch.where(present, sizes, torch.inf).amin()
    largest = torch.where(finite, sizes, 0.0).amax()
    # finite extremes of the whole tensor count; an infinite one leaves the sample's largest
    whole = torch.maximum(low.abs(), high.abs()).to(sizes.dtype)
    largest = torch.where(torch.isfinite(whole), whole, largest)
    parts = (
        largest,
        smallest,
        (~present).sum(),
        (present & (sizes < limits.tiny)).sum(),
        torch.maximum((~finite).sum(), (~torch.isfinite(whole)).sum()),
        low,
    )
    numbers = [part.to(torch.float64) for part in parts]
    return torch.stack([*numbers, numbers[0].new_tensor(float(sample.numel()))])


def rounded_to_zero(before: Tensor, after: Tensor) -> Tensor:
    """How many elements a conversion turned into 0, and of how many, on a sample."""
    given = sampled(plain(before))
    got = sampled(plain(after))
    lost = ((given != 0) & (got == 0)).sum().to(torch.float64)
    return torch.stack([lost, lost.new_tensor(float(given.numel()))])


def bits_of_headroom(largest: float, dtype: torch.dtype) -> float | None:
    """Bits up to the largest number of the dtype."""
    if largest <= 0.0 or not math.isfinite(largest):
        return None
    return math.log2(torch.finfo(dtype).max) - math.log2(largest)


def bits_above_floor(smallest: float, dtype: torch.dtype) -> float | None:
    """Bits down to the smallest normal number of the dtype."""
    if smallest <= 0.0 or not math.isfinite(smallest):
        return None
    return math.log2(smallest) - math.log2(torch.finfo(dtype).tiny)


def root_mean_square(values: Tensor) -> Tensor:
    """As one number in float64, on a sample."""
    return sampled(values).to(torch.float64).square().mean().sqrt()


# --- Is this the batch of that step? By a digest of its numbers, and by the tensors themselves.


DIGEST_SAMPLE = 4096


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
    """A short digest of a sample of every tensor in the batch; a constant one tells nothing."""
    digest = hashlib.blake2b(before.encode(), digest_size=8)
    found = bool(before)
    for leaf in tree_flatten(batch)[0]:
        if isinstance(leaf, Tensor) and leaf.numel() and leaf.layout is torch.strided:
            part = sampled(plain(leaf), DIGEST_SAMPLE).cpu().contiguous()
            if bool((part == part[0]).all()):
                continue
            found = True
            digest.update(part.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest() if found else ""


# --- What an update does to each parameter, on a sample of its elements.


MOST_ROWS, MOST_COLUMNS = 64, 256
"""Units of a weight that are compared, and inputs of each."""
MOMENTS = ("exp_avg_sq", "square_avg", "sum", "v")
"""Names that optimizers give to their second moments."""


@dataclass(slots=True)
class Sampled:
    """One parameter before its update."""

    name: str
    parameter: Tensor
    owned: bool
    before: Tensor
    gradient: Tensor | None
    numbers: int
    """Size of the weight; of the gradient: size, share of zeros, whether its rows are equal."""
    epsilon: float | None


class Updates:
    """Sample all parameters before an update, and see what became of them."""

    def __init__(
        self,
        roots: Mapping[str, nn.Module],
        optimizer: Optimizer,
        owned: set[int],
    ) -> None:
        """`owned`: identities of the parameters that any optimizer of the process updates."""
        self._numbers = Numbers()
        self._optimizer = optimizer
        self._epsilons = epsilons(optimizer)
        self._updated = optimizer_parameter_ids(optimizer)
        self._sampled = []
        self.without_gradient: tuple[str, ...] = ()
        """Trainable parameters of this optimizer that have none, known once the update is over."""
        copies = _shapes_outside(roots, optimizer)
        for parameter, name in parameter_names(roots, optimizer):
            if not is_lazy(parameter) and parameter.is_floating_point() and parameter.numel():
                updated = id(parameter) in owned or parameter.shape in copies
                before = sampled(plain(parameter)).clone()
                numbers = [root_mean_square(before)]
                gradient: Tensor | None = None
                if parameter.grad is not None and parameter.grad.layout is torch.strided:
                    gradient = sampled(plain(parameter.grad)).clone()
                    scale = getattr(self._optimizer, "grad_scale", None)
                    if scale is not None:
                        # a scaler leaves it to the fused kernel to divide by its factor
                        gradient = gradient.float() / scale
                    zeros = (gradient == 0).to(torch.float64).mean()
                    numbers += [root_mean_square(gradient), zeros, _rows_are_copies(parameter)]
                number = self._numbers.add(*numbers)
                epsilon = self._epsilons.get(id(parameter))
                sample = Sampled(name, parameter, updated, before, gradient, number, epsilon)
                self._sampled.append(sample)

    def finish(self, *, committed: bool) -> tuple[ParameterLook, ...]:
        """The update is over, or did not happen."""
        after = []
        for one in self._sampled:
            after.append(self._after(one) if committed else None)
        values = self._numbers.read()
        found = []
        without = []
        for one, number in zip(self._sampled, after, strict=True):
            record = _record(one, values[one.numbers], values[number] if number else [])
            found.append(record)
            missing = one.parameter.grad is None
            if one.gradient is not None:
                # nothing but zeros in one that was seen whole; those of a bias may cancel out
                whole = one.parameter.dim() > 1 and len(one.gradient) == one.parameter.numel()
                missing = whole and record.gradient_zeros >= 1.0
            if missing and record.trainable and id(one.parameter) in self._updated:
                without.append(one.name)
        self.without_gradient = tuple(without)
        return tuple(found)

    def _after(self, one: Sampled) -> int | None:
        """Numbers of the update; None where the parameter has no gradient or was replaced."""
        if id(one.parameter) not in self._updated:
            return None  # its own optimizer has not stepped yet, or has before
        now = sampled(plain(one.parameter))
        if one.gradient is None or now.shape != one.before.shape:
            return None
        change = now.to(torch.float64) - one.before.to(torch.float64)
        asked = one.gradient != 0
        count = asked.sum().clamp_min(1).to(torch.float64)
        parts = [root_mean_square(change), (asked & (now == one.before)).sum() / count]
        state = self._optimizer.state.get(one.parameter, {})
        for name in MOMENTS:
            value = state.get(name)
            if isinstance(value, Tensor) and value.shape == one.parameter.shape:
                moment = sampled(plain(value))
                smallest = torch.where(moment > 0, moment, torch.inf).amin()
                parts += [(asked & (moment == 0)).sum() / count, smallest]
                break
        return self._numbers.add(*parts)


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


def epsilons(optimizer: Optimizer) -> dict[int, float]:
    """By identity of a parameter: the group's epsilon, 0 where it is nothing in its dtype."""
    found = {}
    for group in optimizer.param_groups:
        epsilon = group.get("eps")
        if not isinstance(epsilon, float | int):
            continue
        for parameter in group["params"]:
            value = float(epsilon)
            if parameter.is_floating_point():
                limits = torch.finfo(parameter.dtype)
                # below half of the smallest number above 0 it rounds to 0
                if value < limits.smallest_normal * limits.eps / 2.0:
                    value = 0.0
            found[id(parameter)] = value
    return found


def _shapes_outside(roots: Mapping[str, nn.Module], optimizer: Optimizer) -> set[torch.Size]:
    """Shapes of parameters with a gradient that only the optimizer knows.

    They are copies in float32 that the weights are written back from.
    """
    inside = {id(parameter) for _, parameter in named_parameters(roots)}
    shapes = set()
    for parameter in optimizer_parameters(optimizer):
        if id(parameter) not in inside and parameter.grad is not None:
            shapes.add(parameter.shape)
    return shapes


def _record(one: Sampled, before: list[float], after: list[float]) -> ParameterLook:
    known = dict(zip(("weight", "gradient", "gradient_zeros"), before, strict=False))
    copies = len(before) > 3 and before[3] > 0.0
    moved = dict(zip(("update", "lost", "variance_zeros", "variance"), after, strict=False))
    return ParameterLook(
        name=one.name,
        dtype=str(one.parameter.dtype).removeprefix("torch."),
        elements=one.parameter.numel(),
        trainable=one.parameter.requires_grad,
        owned=one.owned,
        epsilon=one.epsilon,
        copies=copies,
        **known,
        **moved,
    )
