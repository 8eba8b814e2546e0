"""Norm of the gradients, and through it an exact finite test, in one foreach pass.

A finite norm proves that every element is finite. Only a non-finite norm needs the slow exact test,
because finite elements can overflow it. The norm is taken in fp32 for half-precision gradients; the
norm that clips is rounded the way `torch.nn.utils.clip_grad_norm_` rounds it, so that a guarded run
clips bit for bit as an unguarded one does.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from operator import attrgetter
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from stepguard.judge.history import LR_JUMP
from stepguard.records.codec import float_kind
from stepguard.tensors.names import (
    Roots,
    fsdp1_parts,
    is_distributed,
    named_buffers,
    named_modules,
    optimizer_parameters,
    parameter_names,
    parts_of,
    wrapped_by_fsdp1,
)
from stepguard.tensors.torch_private import (
    flatten,
    foreach_max,
    foreach_mul_,
    foreach_norm,
    grouped_tensors,
    set_grad_enabled,
)
from stepguard.tensors.values import (
    HALVES,
    ORDINARY,
    PLAIN,
    at_least_float32,
    dense_real,
    dense_values,
    elements,
    is_finite,
    local_part,
)

# --- Norm of the gradients, and through it an exact finite test, in one foreach pass.


TENSORS = {Tensor}
NOT_AT_ONCE = (None, *HALVES)
"""Dtypes of gradients that take more than one pass; None: of several."""
P = ParamSpec("P")
T = TypeVar("T")


def without_graph(function: Callable[P, T]) -> Callable[P, T]:
    """`torch.no_grad()` for functions that run in every step, at a seventh of its cost."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        set_grad_enabled(False)
        try:
            return function(*args, **kwargs)
        finally:
            set_grad_enabled(True)

    return called


class GradientNorm(NamedTuple):
    """0-dim tensors, still on the device."""

    total: Tensor
    """fp32 (fp64 for fp64 gradients): what is read and judged."""
    clip: Tensor
    """What torch's own clipping would have used."""
    least: Tensor | None = None
    """The smallest norm of one parameter's gradient, where it was asked for."""
    single: Tensor | None = None
    """The norm of each gradient, where the total was made of them."""
    clipped: bool = False
    """The gradients were clipped when the norm was taken."""
    shards: bool = False
    """The norm of all ranks, of gradients of which each rank holds a part."""
    squares: Tensor | None = None
    """What this rank's shards add to the square of the
    norm of all ranks."""


@without_graph
def gradient_norm(
    grads: list[Tensor], *, each: bool = False, wide: bool = False
) -> GradientNorm | None:
    """Return the norm of all gradients; None if there are none.

    `each`: the smallest norm of one parameter as well, where all are of one kind. `wide`: in
    float64 where the device has it, for gradients that carry a loss scale.
    """
    if not grads:
        return None
    if set(map(type, grads)) == TENSORS and _one_dtype(grads) not in NOT_AT_ONCE:
        try:
            return _norm_of_one_kind(grads, each=each, wide=wide)
        except NotImplementedError:
            pass  # a sparse gradient
    dense = [dense_values(g) for g in grads]
    if any(g.dtype in HALVES for g in dense):
        return _half_precision_norm(dense)
    # torch measures subclasses one by one
    if (each or set(map(type, dense)) == {Tensor}) and _one_dtype(dense) is not None:
        return _norm_of_one_kind(dense, each=each, wide=wide)
    total = get_total_norm(dense)
    return GradientNorm(total, total)


def _one_dtype(tensors: list[Tensor]) -> torch.dtype | None:
    """The dtype of tensors that all have the same one, and one device; None where they do not."""
    groups = grouped_tensors([tensors], False)
    if len(groups) > 1:
        return None
    ((_, dtype),) = groups
    found: torch.dtype = dtype
    return found


def _norm_of_one_kind(dense: list[Tensor], *, each: bool, wide: bool) -> GradientNorm:
    """Follow get_total_norm step by step, so that the total is the same bit for bit."""
    dtype = torch.float64 if wide and dense[0].device.type != "mps" else None
    every = torch.stack(foreach_norm(dense, 2, dtype=dtype))
    total = torch.linalg.vector_norm(every)
    return GradientNorm(total, total, every.min() if each else None, single=every)


def _half_precision_norm(dense: Sequence[Tensor]) -> GradientNorm:
    device = dense[0].device
    wide: list[Tensor] = []
    rounded: list[Tensor] = []
    for group in _by_device_and_dtype(dense):
        dtype = group[0].dtype
        # CPU and CUDA kernels accumulate half precision in fp32 and round at the end, so this is
        # torch's own number.
        accumulate = torch.float32 if dtype in HALVES else None
        norms = foreach_norm(group, 2, dtype=accumulate)
        wide += [n.to(device) for n in norms]
        rounded += [n.to(device=device, dtype=dtype) for n in norms]
    total = torch.linalg.vector_norm(torch.stack(wide))
    if len({n.dtype for n in rounded}) > 1:
        # torch adds mixed dtypes in an order of its own.
        return GradientNorm(total, get_total_norm(dense))
    return GradientNorm(total, torch.linalg.vector_norm(torch.stack(rounded)))


def clip(
    params: Iterable[Tensor], max_norm: float, norm: GradientNorm, *, known: float | None = None
) -> None:
    """Clip as torch does. With the norm known on the host, a factor of 1 costs nothing."""
    if norm.clipped:
        return
    # torch would multiply by exactly 1, even after half-precision rounding
    if known is not None and max_norm / (known * (1 + 1e-2) + 1e-6) > 1.0:
        return
    if norm.clip is norm.total and not norm.shards:
        clip_grads_with_norm_(params, max_norm, norm.total)
        return
    _clip_rounded(params, max_norm, norm)


@torch.no_grad()
def _clip_rounded(params: Iterable[Tensor], max_norm: float, norm: GradientNorm) -> None:
    wide = _factor(max_norm, norm.total)
    rounded = _factor(max_norm, norm.clip).to(wide.dtype)
    # Where the half-precision norm overflows, the fp32 one does not. Chosen on the device, so that
    # the host does not wait.
    factor = torch.where(torch.isfinite(norm.clip), rounded, wide)
    for group in _by_device_and_dtype(_local_gradients(params)):
        foreach_mul_(group, factor.to(group[0].device))


@torch.no_grad()
def scale_gradients(params: Iterable[Tensor], factor: float) -> None:
    """Multiply every gradient in place."""
    for group in _by_device_and_dtype(_local_gradients(params)):
        foreach_mul_(group, factor)


def _local_gradients(params: Iterable[Tensor]) -> list[Tensor]:
    """The gradients, of a DTensor the part on this rank: no foreach kernel mixes both."""
    found: list[Tensor] = []
    for parameter in params:
        if parameter.grad is not None:
            found.append(local_part(parameter.grad))
    return found


def _factor(max_norm: float, norm: Tensor) -> Tensor:
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


class GradientMark:
    """Tells whether the gradients of a moment are still there. Holds none of them alive."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._parameter: Tensor | None = None
        # One parameter stands for all: loops drop, clip or replace gradients together.
        for parameter in params:
            if parameter.grad is not None:
                self._parameter = parameter
                self._gradient = weakref.ref(parameter.grad)
                self._version = parameter.grad._version
                break

    def gone(self) -> bool:
        """True if the gradients were dropped, replaced or written to since."""
        if self._parameter is None:
            return False
        now = self._parameter.grad
        return now is None or now is not self._gradient() or now._version != self._version


def _by_device_and_dtype(tensors: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups.values()


# --- Norms of single gradients in the last steps: kept on the device for nothing, read at an
# incident.


STEPS = 32
"""Steps that are remembered."""
MOST_MODULES = 40
"""Rows of the table; modules of a larger model are taken together by the first parts of their name.
"""


class GradientNorms:
    """The last steps in which every parameter had a gradient."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, Tensor]] = deque(maxlen=STEPS)

    def keep(self, step: int, norms: Tensor) -> None:
        """Remember the norm of each gradient of this step. Waits for nothing."""
        self._kept.append((step, norms))

    def table(self, names: Sequence[str]) -> dict[str, Any] | None:
        """Norms by module and step, oldest first; None where there are none for these parameters.

        Non-finite norms are words: strict JSON has no such numbers.
        """
        kept = [(step, norms) for step, norms in self._kept if len(norms) == len(names)]
        if not kept:
            return None
        # one transfer for all steps
        every = torch.stack([norms.double() for _, norms in kept]).cpu()
        modules = _modules(names)
        rows = []
        for members in modules.values():
            together = torch.linalg.vector_norm(every[:, members], dim=1)
            rows.append([_plain(value) for value in together.tolist()])
        return {"steps": [step for step, _ in kept], "modules": list(modules), "norms": rows}


def _plain(value: float) -> float | str:
    return float_kind(value) or value


def _modules(names: Iterable[str]) -> dict[str, list[int]]:
    """Places of the parameters of each module; modules share a row where there are too many."""
    owners = [name.rpartition(".")[0] or name for name in names]
    depth = max(owner.count(".") for owner in owners) + 1
    grouped = _grouped(owners, depth)
    while len(grouped) > MOST_MODULES and depth > 1:
        depth -= 1
        grouped = _grouped(owners, depth)
    return dict(list(grouped.items())[:MOST_MODULES])


def _grouped(owners: Sequence[str], depth: int) -> dict[str, list[int]]:
    grouped: dict[str, list[int]] = {}
    for place, owner in enumerate(owners):
        grouped.setdefault(".".join(owner.split(".")[:depth]), []).append(place)
    return grouped


# --- Carry a few numbers from the device to the host: one transfer, awaited as late as possible.


FLOAT = torch.float32
DTYPE = attrgetter("dtype")
FLOATS = {FLOAT}


def _stacked(values: list[Tensor]) -> Tensor:
    """Scalars as one vector, of the device of the first one."""
    if set(map(DTYPE, values)) == FLOATS:
        try:
            line = torch.stack(values)
            if line.requires_grad:
                line = line.detach()
        except RuntimeError:  # of several devices or shapes
            line = None
        if line is not None and line.dim() == 1:
            return line
    device = values[0].device
    # mps has no float64.
    wide = torch.float32 if device.type == "mps" else torch.float64
    return torch.stack([v.detach().reshape(()).to(device, wide, non_blocking=True) for v in values])


class Packet:
    """Scalars of one step. In a healthy step the host waits for the device in `fetch` only."""

    fetched = 0
    """How many packets this process has waited for; tests count syncs with it."""

    def __init__(self, values: list[Tensor]) -> None:
        line = _stacked(values)
        device = line.device
        self.values = line
        self._event: torch.Event | None = None
        self._host = line
        if device.type != "cpu" and not line.is_meta:
            self._host = torch.empty(line.shape, dtype=line.dtype, pin_memory=True)
            self._host.copy_(line, non_blocking=True)
            self._event = torch.Event(device=device)
            self._event.record(torch.accelerator.current_stream(device))

    def fetch(self) -> list[float]:
        """Return the numbers on the host."""
        Packet.fetched += 1
        if self._event is not None:
            self._event.synchronize()
        numbers: list[float] = self._host.tolist()
        return numbers


# --- Tell whether an update could make NaN out of finite gradients; then it is checked at once.


CHEAP_COPY = 2**16
"""Number of parameters up to which a copy in every step costs next to nothing."""


def is_custom(optimizer: Optimizer) -> bool:
    """True if the optimizer is not torch's own, so that its arithmetic is not known."""
    return not type(optimizer).__module__.startswith("torch.optim.")


def risky_update(
    optimizer: Optimizer, lr_ceiling: tuple[float, ...] | None, least_norm: float | None = None
) -> bool:
    """Could this update turn finite gradients into non-finite weights?

    `lr_ceiling` of each group; None where its rate is known not to have jumped.
    """
    if is_custom(optimizer) and (least_norm == 0.0 or _is_small(optimizer)):
        return True
    for index, group in enumerate(optimizer.param_groups):
        if lr_ceiling is not None:
            ceiling = lr_ceiling[index] if index < len(lr_ceiling) else math.inf
            rate = group.get("lr")
            # Written with `not <=` so that a rate of NaN jumps, too.
            if rate is not None and not float(rate) <= LR_JUMP * max(ceiling, 1e-30):
                return True
        eps = group.get("eps")
        if type(eps) is not float:
            eps = _one_epsilon(eps)
        for dtype in set(map(DTYPE, group["params"])):
            if _is_fragile(dtype, eps):
                return True
    return False


def _one_epsilon(eps: Any) -> float | None:
    """Adafactor has two; None stands for the dtype's own."""
    if isinstance(eps, tuple | list):
        eps = next((one for one in eps if isinstance(one, float)), None)
    return eps if isinstance(eps, int | float) else None


def _is_small(optimizer: Optimizer) -> bool:
    count: int = sum(map(elements, optimizer_parameters(optimizer)))
    return count <= CHEAP_COPY


@cache
def _is_fragile(dtype: torch.dtype, eps: float | None) -> bool:
    """fp16 overflows at 65504; an epsilon that rounds to 0 lets an update divide by 0."""
    if dtype is torch.float16:
        return True
    if eps is None or not dtype.is_floating_point:
        return False
    return float(torch.tensor(eps, dtype=dtype)) == 0.0


# --- The norm of gradients that are spread over ranks.


@torch.no_grad()
def norm_over_ranks(
    root: nn.Module, params: Sequence[Tensor], max_norm: float, *, each: bool = False
) -> GradientNorm | None:
    """Return the norm of all gradients of all ranks; None if there are none.

    FSDP1 has no call that only takes the norm: there the gradients are clipped as well.
    `each`: the smallest norm of one parameter's shard as well.
    """
    if wrapped_by_fsdp1(root):
        # A rank may hold no gradient at all, and has to take part.
        total = _clip_fsdp1(root, max_norm)
        return GradientNorm(at_least_float32(total), total, clipped=True)
    grads = [p.grad for p in params if p.grad is not None]
    if not grads:
        return None
    least: Tensor | None = None
    if each:
        local = gradient_norm(grads, each=True)
        least = local.least if local is not None else None
    total = whole(get_total_norm(grads)) if _alike(grads) else _of_several_meshes(grads)
    return GradientNorm(at_least_float32(total), total, least, shards=True)


def whole(norm: Any) -> Tensor:
    """Return a norm as a plain tensor. Of a DTensor every rank has a part: then a collective."""
    full: Tensor = norm.full_tensor() if is_distributed(norm) else norm
    return full


def _clip_fsdp1(root: Any, max_norm: float) -> Tensor:
    total: Tensor = root.clip_grad_norm_(max_norm)
    return total


def _mesh(tensor: Any) -> Any:
    return tensor.device_mesh if is_distributed(tensor) else None


def _alike(grads: Sequence[Tensor]) -> bool:
    first = _mesh(grads[0])
    return all(_mesh(grad) == first for grad in grads)


def _of_several_meshes(grads: Sequence[Tensor]) -> Tensor:
    """torch's own clipping refuses to mix meshes, or plain tensors and DTensors."""
    groups: list[tuple[Any, list[Tensor]]] = []
    for grad in grads:
        mesh = _mesh(grad)
        for known, members in groups:
            if known == mesh:
                members.append(grad)
                break
        else:
            groups.append((mesh, [grad]))
    norms = [at_least_float32(whole(get_total_norm(members))) for _, members in groups]
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0]) for norm in norms]))
    return total


def _least(norms: Sequence[GradientNorm]) -> Tensor | None:
    leasts = [norm.least for norm in norms if norm.least is not None]
    return torch.stack(leasts).min() if leasts else None


class Shares:
    """Which share of the square of its own part of a gradient a rank adds to that of all ranks.

    A part that several ranks hold, as copies, is added by all of them.
    """

    def __init__(self, roots: Iterable[nn.Module], ranks: int) -> None:
        self._ranks = ranks
        self._fsdp1 = fsdp1_parts(roots)
        self._params: Sequence[Tensor] = ()
        self._known: dict[int, float] | None = {}

    @torch.no_grad()
    def norm(self, params: Sequence[Tensor], *, each: bool = False) -> GradientNorm | None:
        """Measure this rank's part of the gradients; None if it has none."""
        shares = self._of(params)
        found: list[tuple[float, GradientNorm]] = []
        for share, gradients in self._grouped(params, shares).items():
            norm = gradient_norm(gradients, each=each)
            if norm is not None:
                found.append((share, norm))
        if not found:
            return None
        first = found[0][1].total
        totals = torch.stack([norm.total.to(first) for _, norm in found])
        total = first if len(found) == 1 else torch.linalg.vector_norm(totals)
        least = _least([norm for _, norm in found])
        if shares is None:
            return GradientNorm(total, total, least)
        weights = totals.new_tensor([share for share, _ in found])
        return GradientNorm(total, total, least, squares=self._squares(totals, weights))

    def _grouped(
        self, params: Sequence[Tensor], shares: dict[int, float] | None
    ) -> dict[float, list[Tensor]]:
        """Gradients by the share of their squares; a parameter that came later is a copy."""
        groups: dict[float, list[Tensor]] = {}
        for parameter in params:
            if parameter.grad is None:
                continue
            share = 0.0
            if shares is not None:
                share = shares.get(id(parameter), 1.0 / self._ranks)
            groups.setdefault(share, []).append(parameter.grad)
        return groups

    def heard(self, norm: Any) -> GradientNorm:
        """The norm that the loop's own clipping took, of which this rank has a part."""
        own = norm.to_local() if is_distributed(norm) else norm
        parts = parts_of(norm, partial=True) if is_distributed(norm) else None
        if parts is None:
            return GradientNorm(own, own)
        share = own.new_tensor(parts / self._ranks)
        return GradientNorm(own, own, squares=self._squares(own, share))

    @staticmethod
    def _squares(norms: Tensor, shares: Tensor) -> Tensor:
        # A norm that float32 can hold may have a square that it cannot.
        return (norms.double().square() * shares).sum()

    def _of(self, params: Sequence[Tensor]) -> dict[int, float] | None:
        """Shares by the id of the parameter; None where a part is not one of the gradient's own."""
        if params is self._params:
            return self._known
        self._params = params
        self._known = {}
        for parameter in params:
            gradient = parameter.grad
            parts: int | None = self._fsdp1.get(id(parameter), 1)
            if is_distributed(parameter):
                parts = parts_of(parameter if gradient is None else gradient)
            if parts is None:
                self._known = None
                break
            self._known[id(parameter)] = parts / self._ranks
        return self._known


# --- Test parameters, buffers and optimizer state on the device; name the non-finite ones.


PLAIN_TYPES = frozenset(PLAIN)
SCANNED_EACH_STEP = 2**20
"""Elements that are tested after every update: about a quarter of a millisecond."""
TENSORS_EACH_STEP = 128
"""Tensors scanned each step: each costs a microsecond, however small it is."""
JOINED = 2**14
"""Elements up to which a copy of all in one tensor costs less than a kernel for each tensor."""
STEPS_A_ROUND = 32
"""Updates after which every parameter of a larger model was tested once."""


@without_graph
def largest(tensors: Iterable[Tensor], *, small: bool = False) -> Tensor | None:
    """Return one number that is NaN or Inf if a tensor holds NaN or +Inf; None for no tensors.

    `small`: a copy of all in one tensor costs less than a kernel for each.

    A maximum is the cheapest pass that carries NaN. A lone -Inf passes it and is caught by the loss
    or gradient it spoils one step later; half-precision groups, where updates overflow in earnest,
    get the exact test instead.
    """
    found = tensors if isinstance(tensors, list) else list(tensors)
    plain_types = PLAIN_TYPES.issuperset(map(type, found))
    if found and plain_types and not found[0].is_meta and found[0].dtype in ORDINARY:
        try:
            if small:
                joined: Tensor = flatten(found)
                return joined.max().float()
            return torch.stack(foreach_max(found)).float().max()
        except RuntimeError:
            pass  # an empty or a sparse one, or several devices
    plain = [t for t in map(dense_real, found) if t.numel() and t.is_floating_point()]
    if not plain:
        return None
    device = plain[0].device
    return torch.stack([t.max().to(device=device, dtype=torch.float32) for t in plain]).max()


@torch.no_grad()
def root_mean_square(tensors: Iterable[Tensor]) -> Tensor | None:
    """The size of these tensors, on their device: nobody waits for it."""
    plain = [t for t in map(dense_real, tensors) if t.numel() and t.is_floating_point()]
    norm = gradient_norm([t.detach() for t in plain])
    if norm is None:
        return None
    return norm.total / math.sqrt(sum(t.numel() for t in plain))


class RotatingScan:
    """Hands out a long list of tensors one share a step, so that testing all costs little a step.

    A parameter that a step turns non-finite shows at once in the next loss or gradient if the model
    uses it; the scan is for the others, and a round may take a few dozen steps.
    """

    def __init__(self) -> None:
        self._tensors: Sequence[Tensor] = ()
        self._shares: list[list[_Part]] = []
        self._all: list[Tensor] | None = None
        """The whole list, where one share holds it."""
        self.small = False
        """The whole list has few elements."""
        self._next = 0

    def share(self, tensors: Sequence[Tensor], ignored: Collection[int] = ()) -> list[Tensor]:
        """Return the next share without tensors whose id is ignored; all if that is cheap."""
        if tensors is not self._tensors:
            self._tensors = tensors
            self._shares = _shares(tensors)
            self.small = sum(map(elements, tensors)) <= JOINED
            self._all = None
            if len(self._shares) == 1 and all(part.whole for part in self._shares[0]):
                self._all = [part.tensor for part in self._shares[0]]
            self._next = 0
        if not self._shares:
            return []
        if self._all is not None and not ignored:
            return self._all
        self._next = (self._next + 1) % len(self._shares)
        found: list[Tensor] = []
        for part in self._shares[self._next]:
            if id(part.tensor) not in ignored:
                found.append(part.tensor if part.whole else part.now())
        return found


@dataclass(frozen=True, slots=True)
class _Part:
    """A stretch of a tensor's elements, cut out late: the tensor's memory may be replaced."""

    tensor: Tensor
    count: int
    """Elements of the tensor when it was cut."""
    start: int
    end: int
    whole: bool

    def now(self) -> Tensor:
        live = self.tensor.detach()
        if live.numel() != self.count or not live.is_contiguous():
            return live
        return live.view(-1)[self.start : self.end]


def _shares(tensors: Sequence[Tensor]) -> list[list[_Part]]:
    count = sum(map(elements, tensors))
    most = max(SCANNED_EACH_STEP, math.ceil(count / STEPS_A_ROUND))
    most_tensors = max(TENSORS_EACH_STEP, math.ceil(len(tensors) / STEPS_A_ROUND))
    shares: list[list[_Part]] = []
    filled = most
    for tensor in tensors:
        for part in _parts(tensor, most):
            if filled >= most or len(shares[-1]) >= most_tensors:
                shares.append([])
                filled = 0
            shares[-1].append(part)
            filled += part.end - part.start
    return shares


def _parts(tensor: Tensor, most: int) -> list[_Part]:
    """Cut a tensor into stretches of at most `most` elements, if that takes no copy."""
    count = elements(tensor)
    is_dense = type(tensor) in PLAIN and tensor.layout is torch.strided
    if count <= most or not is_dense or not tensor.is_contiguous():
        return [_Part(tensor, count, 0, count, whole=True)]
    starts = range(0, count, most)
    ends = [min(start + most, count) for start in starts]
    pairs = zip(starts, ends, strict=True)
    return [_Part(tensor, count, start, end, whole=False) for start, end in pairs]


def bad_parameters(roots: Roots, optimizer: Optimizer, elsewhere: Container[int] = ()) -> list[str]:
    """Return `param:NAME` of every non-finite parameter whose id is not in `elsewhere`."""
    bad: list[str] = []
    for tensor, name in parameter_names(roots, optimizer):
        if id(tensor) not in elsewhere and not is_finite(tensor):
            bad.append(f"param:{name}")
    return bad


def bad_buffers(roots: Roots) -> list[str]:
    """Return `buffer:NAME` of every non-finite buffer."""
    return [f"buffer:{name}" for name, buffer in named_buffers(roots) if not is_finite(buffer)]


@torch.no_grad()
def extremes(tensor: Tensor) -> Tensor | None:
    """Return smallest and largest element, on the device: both are finite if all elements are."""
    plain = dense_real(tensor)
    if not plain.is_floating_point() or plain.numel() == 0:
        return None
    return torch.stack(torch.aminmax(plain))


def bad_slots(roots: Roots, optimizer: Optimizer) -> list[str]:
    """Return `opt:PARAMETER/SLOT` of every optimizer slot with a non-finite element."""
    names = {id(tensor): name for tensor, name in parameter_names(roots, optimizer)}
    bad: dict[str, None] = {}
    # torch declares tensors as keys; some optimizers use others.
    state: Mapping[Any, Any] = optimizer.state
    for key, slots in state.items():
        for slot, value in _tensors(slots):
            if not is_finite(value):
                bad[f"opt:{names.get(id(key), key)}/{slot}"] = None
    return list(bad)


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """List every tensor that the optimizer keeps."""
    return [value for state in optimizer.state.values() for _, value in _tensors(state)]


def norm_statistics(roots: Roots) -> list[Tensor]:
    """List the running means and variances of norm layers, which must always be finite."""
    found: list[Tensor] = []
    for _, module in named_modules(roots):
        if getattr(module, "track_running_stats", False):
            buffers = module.buffers(recurse=False)
            found += [buffer for buffer in buffers if buffer.is_floating_point()]
    return found


def _tensors(state: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of one parameter's state, also from the lists that LBFGS keeps."""
    if not isinstance(state, Mapping):
        return
    for slot, value in state.items():
        items = value if isinstance(value, list | tuple) else [value]
        for item in items:
            if isinstance(item, Tensor):
                yield slot, item
