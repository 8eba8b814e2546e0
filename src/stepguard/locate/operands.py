"""Measure a tensor for an Operand record: extremes, counts and the one element that matters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor

from stepguard.locate.source import Line
from stepguard.records.incident import NO_EVIDENCE, Evidence, Operand
from stepguard.state.batch import named_tensors, tensor_label
from stepguard.tensors.values import dtype_name, is_finite, local_part

# --- Test tensors for NaN and Inf. Every tensor of a replay is tested: one pass over the memory.


@dataclass(frozen=True, slots=True)
class Flaws:
    """Kinds of non-finite values that a tensor holds."""

    nan: bool = False
    inf: bool = False

    def __bool__(self) -> bool:
        return self.nan or self.inf


CLEAN = Flaws()


def numeric(value: Any) -> bool:
    """True for a tensor whose elements can be NaN or infinite."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def plain(tensor: Tensor) -> Tensor:
    """Return the elements as a dense real tensor, in the tensor's own memory.

    Empty where there is nothing to read: on the meta device, or nested without one memory for all.
    """
    if tensor.is_meta or (tensor.is_nested and tensor.layout is torch.strided):
        return torch.empty(0)
    dense = local_part(tensor).detach()
    if dense.layout is not torch.strided:
        # Not coalesce(), which would give new memory: a tensor's maker is known by its memory.
        dense = dense._values() if dense.layout is torch.sparse_coo else dense.values()
    if dense.is_complex():
        dense = torch.view_as_real(dense.resolve_conj())
    return dense


def tensors_in(value: Any) -> list[Tensor]:
    """List the tensors of nested lists, tuples and mappings."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [one for item in value for one in tensors_in(item)]
    return []


def flaws(tensor: Tensor) -> Flaws:
    """Say whether there is a NaN or an Inf. Beside a NaN an Inf is not reported."""
    values = plain(tensor)
    if not values.numel():
        return CLEAN
    try:
        # A finite sum proves it. Finite elements may overflow their sum: then the extremes decide.
        if math.isfinite(values.sum().item()):
            return CLEAN
        low, high = torch.aminmax(values)
    except (RuntimeError, NotImplementedError):
        # torch has no reductions of 8-bit floats; float32 holds every value of theirs.
        low, high = torch.aminmax(values.float())
    # Both extremes of a tensor with a NaN are NaN.
    extremes = (low.item(), high.item())
    return Flaws(nan=any(map(math.isnan, extremes)), inf=any(map(math.isinf, extremes)))


def reach(tensor: Tensor) -> float:
    """Return the largest magnitude among the elements; 0 of none, NaN beside a NaN."""
    values = plain(tensor)
    if not values.numel():
        return 0.0
    low, high = torch.aminmax(values.float() if values.element_size() < 4 else values)
    return max(-low.item(), high.item())


def broken(tensor: Tensor) -> Tensor:
    """True where an element is not finite, in the tensor's own shape."""
    bad: Tensor = ~torch.isfinite(tensor.detach())
    return bad


def mask_like(tensor: Tensor) -> bool:
    """True for -inf around a constant, or very much of it: written on purpose, as a mask is."""
    values = plain(tensor)
    if not values.numel() or bool(torch.isnan(values).any()):
        return False
    infinite = torch.isinf(values)
    # A mask is never +inf.
    if bool((values[infinite] > 0).any()):
        return False
    if len(torch.unique(values[~infinite])) <= 1:
        return True
    # A tensor with this share of -inf is a mask even if other values differ (position biases)
    return float(infinite.double().mean()) >= 0.2


def storage_key(tensor: Tensor) -> int:
    """Return the address of the memory, shared by every view of it; 0 where there is none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        # A wrapper around tensors, a sparse one for instance, has no memory of its own.
        values = plain(tensor)
        if values is tensor:
            return 0
        return values.untyped_storage().data_ptr()


def batch_tensors(batch: Any) -> list[tuple[str, Tensor]]:
    """List every tensor with its name: `batch:x`, `batch:boxes.0`, or `batch` for a tensor."""
    return [(tensor_label(name), tensor) for name, tensor in named_tensors(batch)]


# --- Measure a tensor for an Operand record: extremes, counts and the one element that matters.


Index = tuple[int, ...]
MOST_COUNTED = 1 << 20
"""Elements whose exponents are counted; of a larger tensor every second, third, ..."""


def summarise(name: str, tensor: Tensor, index: Index | None = None) -> Operand:
    """Count and bound the elements; `index` is shown, by default the first non-finite one."""
    floats = numeric(tensor)
    if floats:
        # An operation on a DTensor would wait for ranks that do not take part.
        tensor = local_part(tensor)
    clean = not floats or is_finite(tensor)
    if not clean and index is None:
        index = first_broken(tensor)
    operand = Operand(
        name=name,
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        index=index,
        value=element(tensor, index),
    )
    if not floats and tensor.layout is not torch.strided:
        return operand
    values = tensor
    if floats:
        values = plain(tensor)
    finite = values
    facts: dict[str, Any] = {}
    if not clean:
        finite = values[torch.isfinite(values)]
        facts["nan"] = int(torch.isnan(values).sum())
        facts["posinf"] = int(torch.isposinf(values).sum())
        facts["neginf"] = int(torch.isneginf(values).sum())
    if finite.numel():
        facts["min"], facts["max"] = float(finite.min()), float(finite.max())
    if floats:
        facts["exponents"] = _exponents(finite)
    zeros = values.numel() - int(torch.count_nonzero(values))
    return replace(operand, zeros=zeros, **facts)


def _exponents(finite: Tensor) -> tuple[tuple[int, int], ...]:
    """Count elements by their binary exponent: which part of the dtype's range they use."""
    flat = finite.flatten()
    part = flat[:: 1 + flat.numel() // MOST_COUNTED]
    if part.dtype is not torch.float64:
        # frexp knows no half precision; single precision holds all of its numbers
        part = part.float()
    _, exponents = torch.frexp(part[part != 0])
    found, counts = torch.unique(exponents, return_counts=True)
    # frexp's mantissas lie from 0.5 to 1
    return tuple((n - 1, count) for n, count in zip(found.tolist(), counts.tolist(), strict=True))


def of_number(name: str, value: float) -> Operand:
    """Describe a Python scalar."""
    dtype = "float" if isinstance(value, float) else "int"
    return Operand(name=name, dtype=dtype, value=float(value))


def element(tensor: Tensor, index: Index | None) -> float | None:
    """Return the element; of a complex one the part that is bad, or else its magnitude."""
    if index is None or len(index) != tensor.dim() or tensor.layout is not torch.strided:
        return None
    value = tensor.detach()[index].item()
    if not isinstance(value, complex):
        return float(value)
    for part in (value.real, value.imag):
        if not math.isfinite(part):
            return part
    return abs(value)


def first_broken(tensor: Tensor) -> Index | None:
    """Return the position of the first NaN or Inf."""
    if tensor.layout is not torch.strided:
        return None
    return first_true(broken(tensor))


def first_true(mask: Tensor) -> Index | None:
    """Return the position of the first True."""
    if not bool(mask.any()):
        return None
    # argmax takes no booleans; of several largest elements it returns the first.
    return unravel(mask.flatten().to(torch.uint8).argmax(), mask.shape)


def unravel(flat: Tensor, shape: Index) -> Index:
    """Turn a flat position into one index an axis."""
    return tuple(int(index) for index in torch.unravel_index(flat, shape))


def broadcast_index(index: Index, shape: Index) -> Index | None:
    """Return the position in a tensor of this shape that a broadcast puts at `index`."""
    if len(shape) > len(index):
        return None
    # Broadcasting aligns the last axes.
    tail = index[len(index) - len(shape) :]
    position = []
    for at, size in zip(tail, shape, strict=True):
        if size != 1 and at >= size:
            return None
        position.append(min(at, size - 1))
    return tuple(position)


def broadcasts(shape: Index, to: Index) -> bool:
    """True if a tensor of `shape` can be expanded to `to`."""
    if len(shape) > len(to):
        return False
    return all(size in (1, goal) for size, goal in zip(reversed(shape), reversed(to), strict=False))


# --- The replayed step as a graph of operation calls: names, lines and flags, never a tensor.


Stage = Literal["stored", "forward", "backward", "optimizer"]


def aten(names: str) -> frozenset[str]:
    """Names of operators as the dispatcher spells them: `aten.clone` for `clone`."""
    return frozenset(f"aten.{name}" for name in names.split())


COPIES = aten("_to_copy clone copy_ detach lift_fresh alias _unsafe_view _reshape_copy")
"""Operations that only copy values: never the interesting consumer or producer of one."""

MOVES = COPIES | aten("index gather index_select cat stack embedding masked_select take flip roll")
"""Operations that put values elsewhere without combining them."""


@dataclass(slots=True, eq=False)
class Call:
    """One operation of the replay, or (stage `stored`) a tensor that existed before it."""

    index: int
    op: str
    stage: Stage
    module: str | None = None
    """Module whose forward is running; None in the backward pass, where `sequence` leads to it."""
    node: str | None = None
    sequence: int = -1
    """Number of the autograd node: in the backward the one evaluated, else the one created."""
    line: Line | None = None
    parents: tuple[Call, ...] = ()
    """Makers of every tensor that went in."""
    flawed: tuple[Call, ...] = ()
    """Parents whose tensor held a non-finite value when it was read."""
    causes: tuple[Call, ...] = ()
    """Flawed parents whose bad elements explain bad elements of the output."""
    out: Flaws = CLEAN
    intended_inf: bool = False
    """Every infinity of the output was written on purpose, as in an attention mask."""
    first_bad: bool = False
    """The output holds bad elements that no bad input explains."""
    selects: bool = False
    """Chooses elements by a condition: where, masked_fill, indexing by a boolean mask."""
    numeric: bool = True
    """Gives at least one tensor that could hold a NaN; a comparison does not."""
    pointwise: bool = False
    """Works element by element."""
    reduces: bool = False
    """Combines elements into fewer."""
    number: tuple[str, float] | None = None
    """Argument and value of a NaN or infinite Python number that the operation computes with."""
    rounded_to_zero: float | None = None
    """A constant argument, an epsilon for instance, that is 0 in the dtype of the output."""
    uninitialised: bool = False
    """Memory that has been allocated and, as far as operations show, not all written yet."""
    fresh: int | None = None
    """Checksum of that memory when it was allocated; None once an operation wrote a part of it."""
    function: str | None = None
    """The custom function, else the user's function, that allocated it."""
    rows: tuple[int, ...] = ()
    """First-axis positions of bad output elements."""
    bad_positions: tuple[int, ...] = ()
    """Some flat positions of bad output elements."""
    shape: tuple[int, ...] = ()
    reach: float = 0.0
    """Largest magnitude of the output; measured where the tracer is asked to."""
    adds_up: bool = False
    """Gave an infinity because finite values were too many or too large to be added up."""
    inputs: tuple[Operand, ...] = ()
    output: Operand | None = None
    evidence: Evidence = NO_EVIDENCE
    kernel: Any = None
    """What it takes to run it again by another path, where it is a kernel."""

    @property
    def harmful(self) -> bool:
        """True if the output holds a NaN, or an infinity that was not written on purpose."""
        return self.out.nan or (self.out.inf and not self.intended_inf)


def real_maker(call: Call) -> Call:
    """Go back over casts and copies to the operation that computed the value."""
    while call.op in COPIES and call.parents:
        call = call.parents[0]
    return call


def walk(calls: Iterable[Call], onward: Callable[[Call], Iterable[Call]]) -> Iterator[Call]:
    """Yield the calls and all that `onward` leads to from them, each once."""
    seen: set[int] = set()
    stack = list(calls)
    while stack:
        one = stack.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            stack.extend(onward(one))


def ancestors(call: Call) -> Iterator[Call]:
    """Yield the call and every call whose bad values reach it."""
    return walk([call], lambda one: one.causes)


def earliest(calls: list[Call]) -> Call | None:
    """Return the call that ran first; None of none."""
    return min(calls, key=lambda call: call.index, default=None)


# --- Attribute the bad elements of an operation's output to its inputs, or to the operation
# itself.


@dataclass(slots=True, eq=False)
class Read:
    """A tensor that went in, as it was before the call."""

    name: str
    tensor: Tensor
    maker: Call
    flaws: Flaws = CLEAN
    overwritten: Tensor | None = None
    """The tensor itself where the operator writes it; `tensor` is then a copy from before."""

    @property
    def intended_inf(self) -> bool:
        """True if it is bad only by infinities that were written on purpose."""
        return not self.flaws.nan and self.maker.intended_inf

    @property
    def harmful(self) -> bool:
        """True if it holds a NaN, or an infinity that was not written on purpose."""
        return bool(self.flaws) and not self.intended_inf


def attribute(
    call: Call, reads: Sequence[Read], numbers: Sequence[float], out: Tensor, *, exact: bool
) -> Tensor | None:
    """Note on the call which inputs explain bad elements of `out`, or that some are its own.

    `exact`: the operator works element by element and comparing positions is affordable. Returns
    True at the elements that no input explains, where that is known.
    """
    bad = [read for read in reads if read.flaws]
    causes = [read for read in bad if read.harmful]
    bad_constant = not all(map(math.isfinite, numbers))
    suspected = bool(bad) or bad_constant
    where = None
    call.first_bad = not causes and (call.out.nan or not suspected)
    if exact and suspected and all(map(partial(_fits, out), [out, *(one.tensor for one in bad)])):
        where, causes = _by_position(bad, bad_constant, out)
        call.first_bad = bool(where.any())
    call.causes = (*call.causes, *(read.maker for read in causes))
    call.intended_inf = not call.causes and not call.first_bad
    return where if call.first_bad else None


def _fits(out: Tensor, tensor: Tensor) -> bool:
    strided = tensor.layout is torch.strided
    return strided and broadcasts(tuple(tensor.shape), tuple(out.shape))


def _by_position(bad: list[Read], bad_constant: bool, out: Tensor) -> tuple[Tensor, list[Read]]:
    """The elements of `out` that no input explains, and the inputs that explain some."""
    out_bad = broken(out)
    harmful = torch.zeros_like(out_bad)
    # A constant operand is broadcast: it meets every element.
    intended = torch.full_like(out_bad, bad_constant)
    causes = []
    for read in bad:
        read_bad = broken(read.tensor)
        if not read.harmful:
            intended |= read_bad
            continue
        harmful |= read_bad
        if bool((read_bad & out_bad).any()):
            causes.append(read)
    # -inf + -inf is -inf, but a mask can also meet 0 or +inf: a NaN is always the operation's own.
    return out_bad & ~harmful & (~intended | torch.isnan(out)), causes


# --- Facts on one operator: argument names, what it writes, whether it works element by element.


POINTWISE = aten("where masked_fill masked_fill_ _to_copy copy_ nan_to_num dropout")
"""Element-by-element operators some of whose overloads lack torch's pointwise tag."""
MASKED = aten("where masked_fill masked_fill_ masked_select masked_scatter")
INDEXED = aten("index index_put index_put_ _unsafe_index")
TAKES_INFINITY = (
    aten("where masked_fill masked_fill_ index_fill index_fill_ scatter scatter_ constant_pad_nd")
    | aten("fill fill_ full full_like new_full scalar_tensor arange linspace")
    | aten("clamp clamp_ clamp_min clamp_min_ clamp_max clamp_max_ hardtanh threshold nan_to_num")
    | aten("norm linalg_vector_norm linalg_matrix_norm _foreach_norm _cdist_forward histc")
)
"""Operators with infinity as an ordinary argument: a mask, an open bound, the order of a norm."""
UNINITIALISED = aten("empty new_empty empty_like empty_strided new_empty_strided")
"""Operators that give memory without writing it."""
TORCHS_OWN = ("aten", "prim", "prims", "profiler", "inductor", "quantized", "_c10d_functional")
OVERWRITES = aten("copy_ fill_ zero_ normal_ uniform_ random_ bernoulli_ exponential_ set_")
"""In-place operators that do not read what they replace."""
TESTS = aten("isnan isinf isfinite _local_scalar_dense equal")
"""Operators whose answer is never a bad value."""


OperatorEntry = tuple[str, Any]
"""One tensor or number handed to an operator, under its name in the schema."""


@dataclass(frozen=True, slots=True)
class Operator:
    """Facts of one overload that do not change from call to call."""

    name: str
    namespace: str
    arguments: tuple[str, ...]
    written: frozenset[str]
    """Arguments that it writes in place."""
    views: bool
    """Returns memory of an argument without writing it."""
    pointwise: bool

    @property
    def custom(self) -> bool:
        """True for an operator from outside torch, registered by `torch.library` for instance."""
        return self.namespace not in TORCHS_OWN

    @property
    def base(self) -> str:
        """`div` for `aten.div_` and `aten._foreach_div_`, so that facts are kept once for all."""
        return self.name.partition(".")[2].removeprefix("_foreach_").rstrip("_")

    @property
    def foreach(self) -> bool:
        """True if it does the same to every tensor of its lists, one by one."""
        return self.name.startswith("aten._foreach_")

    def entries(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[OperatorEntry]:
        """List the tensors and numbers that go in, lists taken apart."""
        found: list[OperatorEntry] = []
        for name, value in (*zip(self.arguments, args, strict=False), *kwargs.items()):
            _collect(name, value, found)
        return found

    def writes(self, name: str) -> bool:
        """True if this argument, or the list it stands in, is written in place."""
        return _root(name) in self.written

    def reads(self, name: str) -> bool:
        """True if the result depends on what this argument held before."""
        # zeros_like and new_zeros take the shape only.
        if self.name.endswith("_like") or self.name.startswith("aten.new_"):
            return False
        if not self.writes(name):
            return True
        return self.name not in OVERWRITES and _root(name) != "out"

    def bad_number(self, numbers: list[tuple[str, float]]) -> tuple[str, float] | None:
        """Find a NaN among the numbers, or an infinity where the operator computes with it."""
        for name, value in numbers:
            if math.isnan(value) or (math.isinf(value) and self.name not in TAKES_INFINITY):
                return name, value
        return None

    def selects(self, entries: Iterable[OperatorEntry]) -> bool:
        """True if it chooses elements by a condition; indexing by positions does not."""
        if self.name in MASKED:
            return True
        if self.name not in INDEXED:
            return False
        indices = [value for name, value in entries if _root(name) == "indices"]
        return any(isinstance(index, Tensor) and index.dtype is torch.bool for index in indices)


def _root(name: str) -> str:
    """`tensors` for `tensors[3]`, an entry of an argument that is a list."""
    return name.partition("[")[0]


def _collect(name: str, value: Any, found: list[OperatorEntry]) -> None:
    if isinstance(value, Tensor) or (
        isinstance(value, int | float) and not isinstance(value, bool)
    ):
        found.append((name, value))
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            # Lists of integers are shapes and axes.
            if isinstance(item, Tensor | list | tuple | float):
                _collect(f"{name}[{position}]", item, found)


@cache
def describe(func: Any) -> Operator:
    """Describe the overload that a dispatch mode is handed."""
    schema = func._schema
    name = str(func._overloadpacket)
    arguments = []
    written = set()
    for argument in schema.arguments:
        arguments.append(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.add(argument.name)
    aliased = any(returned.alias_info is not None for returned in schema.returns)
    return Operator(
        name=name,
        namespace=func.namespace,
        arguments=tuple(arguments),
        written=frozenset(written),
        views=aliased and not written,
        pointwise=torch.Tag.pointwise in func.tags or name in POINTWISE,
    )
