"""Every operation of one step as a sketch, and the first one whose values differ between two runs.

A sketch is a digest, a norm and a few elements of a tensor. Two such logs are compared in order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import Tensor

from stepguard._errors import CapsuleError
from stepguard.locate.evidence import Invocation
from stepguard.locate.operands import UNINITIALISED, Call, plain, storage_key, tensors_in
from stepguard.locate.source import ModuleSpans, spell
from stepguard.locate.tracer import Tracer
from stepguard.state.batch import Step, named_tensors
from stepguard.state.isolation import run_backward, run_forward
from stepguard.state.rng import restore_rng
from stepguard.tensors.names import named_buffers, parameter_names
from stepguard.tensors.values import dtype_and_shape

# --- Every operation of one step, as sketches.


SCHEMA = 1
OWN = "digest"
"""What our logs keep of a result; torch's DebugMode keeps a norm, or a hash of another kind."""
ELEMENTS = 64
"""Elements of a tensor that are kept, evenly spaced: enough to measure a difference by."""
HIDDEN = 1e-16
"""Difference of two tensors whose bytes differ where neither these elements nor the norm show it.
"""
GROWTH = (1e-6, 1e-4, 1e-2, 1.0)
"""Relative differences at whose first operation the growth is shown."""


@dataclass(slots=True)
class Sketch:
    """What is kept of a tensor."""

    what: str
    """Dtype and shape."""
    digest: str
    """Digest of all bytes: equal digests mean equal values."""
    norm: float | None
    elements: list[float | None]
    """Some of its elements; None where one is not finite."""

    def beside(self, other: Sketch) -> float:
        """The relative difference; 0 for equal bytes, infinite where one alone is not finite."""
        if self.digest == other.digest:
            return 0.0
        found = self._apart(other)
        if self.what == other.what:
            found = max(found, HIDDEN)
        if self.norm is not None and other.norm is not None:
            largest = max(self.norm, other.norm)
            found = max(found, abs(self.norm - other.norm) / largest if largest else 0.0)
        elif self.norm is not other.norm:
            return math.inf
        return found

    def _apart(self, other: Sketch) -> float:
        """The relative difference of the elements that were kept."""
        if len(self.elements) != len(other.elements):
            return math.inf
        sizes, differences = [], []
        for one, two in zip(self.elements, other.elements, strict=True):
            if one is not None and two is not None:
                sizes.append(max(abs(one), abs(two)))
                differences.append(one - two)
            elif one is not two:
                return math.inf
        # hypot does not overflow
        size = math.hypot(*sizes)
        return math.hypot(*differences) / size if size else 0.0


@dataclass(slots=True)
class LoggedOperand:
    """What went into an operation: made by an earlier one, or stored before the step."""

    name: str
    maker: int | None = None
    stored: str = ""


@dataclass(slots=True)
class LoggedOperation:
    """One operation of the step."""

    op: str
    stage: str
    module: str | None
    source: str | None
    operands: list[LoggedOperand]
    outputs: list[Sketch]


@dataclass(slots=True)
class OperationLog:
    """Everything that one run of a step has computed."""

    what: str
    """Where the step is from, and with which settings it was run."""
    schema: int = SCHEMA
    losses: list[float | None] = field(default_factory=list)
    operations: list[LoggedOperation] = field(default_factory=list)
    stored: dict[str, Sketch] = field(default_factory=dict)
    """Parameters, buffers, batches and constants, as they were first read."""
    gradients: dict[str, Sketch] = field(default_factory=dict)
    updated: dict[str, Sketch] = field(default_factory=dict)
    """Parameters after the optimizer's step; only where an optimizer setting is compared."""
    hashes: str = OWN
    """What the digests are: those of another kind cannot be compared with them."""


def sketch(tensor: Tensor) -> Sketch:
    """Digest, norm and a sample of a tensor."""
    values = plain(tensor.detach())
    what = dtype_and_shape(tensor)
    if values.is_meta or not values.numel():
        return Sketch(what, what, 0.0, [])
    values = values.contiguous().cpu()
    digest = xxhash.xxh3_64_hexdigest(values.flatten().view(torch.uint8).numpy().tobytes())
    flat = values.flatten()
    places = torch.linspace(0, flat.numel() - 1, min(ELEMENTS, flat.numel())).long()
    norm = float(torch.linalg.vector_norm(flat.double())) if flat.dtype != torch.bool else None
    kept = [_finite(value) for value in flat[places].double().tolist()]
    return Sketch(what, digest, _finite(norm), kept)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


class Recorder(Tracer):  # type: ignore[no-untyped-call]
    """Fills the log with the operations that run while it is entered."""

    def __init__(self, log: OperationLog, step: Step, spans: ModuleSpans) -> None:
        super().__init__(spans)
        self._log = log
        self._alive: list[Tensor] = []
        """Results that are held, so that no other tensor gets the same memory."""
        for parameter, name in parameter_names(step.named_roots(), step.optimizer):
            self.store(f"param:{name}", parameter)
        for name, buffer in named_buffers(step.named_roots()):
            self.store(f"buffer:{name}", buffer)
        for index, batch in enumerate(step.micro_batches):
            for name, tensor in named_tensors(batch):
                self.store(f"batch {index}:{name}", tensor)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Without this, torch runs compiled code eagerly while a dispatch mode is active."""
        return True

    def _new_call(self, name: str) -> Call:
        call = super()._new_call(name)
        call.index = -1  # not in the log
        return call

    def _record(self, invocation: Invocation, result: Any) -> None:
        call = self._new_call(invocation.operator.name)
        made = tensors_in(result)
        self._alive += made
        for tensor in made:
            self._makers[storage_key(tensor)] = call
        if call.op in UNINITIALISED:
            return  # what it holds says nothing until something is written there
        operands: list[LoggedOperand] = []
        stored = self._log.stored
        for read in invocation.reads:
            maker = read.maker
            if maker.stage != "stored":
                operands.append(LoggedOperand(read.name, maker.index if maker.index >= 0 else None))
                continue
            if maker.op == "constant":
                # one of the program; held, so that its address keeps its name
                maker.op = f"constant {len(stored)}"
                self._alive.append(read.tensor)
            if maker.op not in stored:
                stored[maker.op] = sketch(read.tensor)
            operands.append(LoggedOperand(read.name, None, maker.op))
        # a backward operation has the module of the forward operation whose gradient it is
        behind = self.owners.get(call.sequence, call)
        source = spell(call.line or behind.line)
        call.index = len(self._log.operations)
        outputs = [sketch(tensor) for tensor in made]
        self._log.operations.append(
            LoggedOperation(call.op, call.stage, behind.module, source, operands, outputs)
        )


# --- One run of a step into a log.


Part = tuple[int, Any, float]
"""Number of the micro-batch whose random numbers it draws, the batch, and what its loss counts."""


def record_passes(log: OperationLog, step: Step, parts: Iterable[Part]) -> bool:
    """Run forward and backward of these parts, inside of `untouched`, and keep what every operation
    gave. True if they drew random numbers.
    """
    drawn = False
    with ModuleSpans(step.named_roots()) as spans:
        recorder = Recorder(log, step, spans)
        for index, batch, weight in parts:
            restore_rng(step.rng[index])
            with recorder:
                outputs, gradients = run_forward(step, batch)
                if gradients is None:
                    outputs = [outputs[0] * weight]
                    log.losses.append(_finite(float(outputs[0].detach())))
                run_backward(outputs, gradients, step.scale)
            drawn = drawn or not torch.equal(torch.get_rng_state(), step.rng[index].cpu)
    if recorder.fault is not None:
        log.what += f" (an operation could not be recorded: {recorder.fault})"
    for parameter, name in parameter_names(step.named_roots(), step.optimizer):
        if parameter.grad is not None:
            log.gradients[name] = sketch(parameter.grad)
    return drawn


# --- Two logs beside each other.


@dataclass(slots=True, kw_only=True)
class DifferingOperation:
    """An operation of both logs whose results differ."""

    op: str
    stage: str
    module: str | None
    source: str | None
    other_source: str | None = None
    difference: float
    outputs: list[str]
    """Dtype, shape and norm of the first differing result, of either run."""
    operands: list[str] = field(default_factory=list)
    """Each operand, and whether it was the same in both runs."""
    same_operands: bool = False
    """All of them were."""


@dataclass(slots=True, kw_only=True)
class StepDifference:
    """What two runs of a step have in common, and where they part."""

    runs: list[str]
    compared: int
    """Operations that both have."""
    only: list[int]
    """Operations that one of them has alone."""
    first_only: list[str]
    """The first of those, in A and in B; empty where there is none."""
    stored: dict[str, float]
    """What differed before the step began: parameters, buffers, batches."""
    first: DifferingOperation | None
    growth: list[DifferingOperation]
    losses: list[float | None]
    gradients: dict[str, float]
    """Parameters whose gradient differs, and by how much, the most first."""
    gradients_compared: int
    updated: dict[str, float]
    hashes: str = OWN
    """What of each result was compared."""

    @property
    def same(self) -> bool:
        """Nothing differs, to the bit."""
        if self.first or self.stored or self.gradients or self.updated:
            return False
        if self.compared and any(self.only):
            return False
        return self.losses[0] == self.losses[1]


Pairs = list[tuple[LoggedOperation, LoggedOperation]]


def compare(one: OperationLog, other: OperationLog) -> StepDifference:
    """Compare two logs in the order in which the first one ran. Raises CapsuleError."""
    if one.hashes != other.hashes:
        raise CapsuleError(
            f"{one.what} has the {one.hashes} of each result, {other.what} the {other.hashes}: "
            "record both in the same way."
        )
    paired, alone, other_alone = _twins(one, other)
    apart = [_apart(*pair) for pair in paired]
    start = next((place for place, size in enumerate(apart) if size), len(paired))
    first = None
    if start < len(paired):
        first = _place(*paired[start], apart[start])
        operands = list(_operands(paired, start, one, other))
        first.operands = [words for words, _ in operands]
        first.same_operands = all(same for _, same in operands)
    stored = _beside(one.stored, other.stored)
    if one.hashes != OWN:
        # elsewhere a tensor that autograd has saved comes back as if it were a new one
        early = {operand.stored for made, _ in paired[: start + 1] for operand in made.operands}
        stored = {name: size for name, size in stored.items() if name in early}
    return StepDifference(
        runs=[one.what, other.what],
        compared=len(paired),
        only=[len(alone), len(other_alone)],
        first_only=[_first_line(alone), _first_line(other_alone)],
        stored=stored,
        first=first,
        growth=list(_growth(paired, apart)),
        losses=[_sum(one.losses), _sum(other.losses)],
        gradients=_beside(one.gradients, other.gradients),
        gradients_compared=len(one.gradients.keys() & other.gradients.keys()),
        updated=_beside(one.updated, other.updated),
        hashes=one.hashes,
    )


def _growth(paired: Pairs, apart: list[float]) -> Iterator[DifferingOperation]:
    """The first operation at each of the limits."""
    reached = 0.0
    for pair, size in zip(paired, apart, strict=True):
        passed = max((limit for limit in GROWTH if limit <= size), default=0.0)
        if passed > reached:
            reached = passed
            yield _place(*pair, size)


def _first_line(alone: list[LoggedOperation]) -> str:
    return line_of(_place(alone[0], alone[0], 0.0)) if alone else ""


def _twins(
    one: OperationLog, other: OperationLog
) -> tuple[Pairs, list[LoggedOperation], list[LoggedOperation]]:
    """Operations of both, in the order of the first, and those that each has alone."""
    found: dict[tuple[Any, ...], list[LoggedOperation]] = {}
    for operation in other.operations:
        found.setdefault(_key(operation), []).append(operation)
    taken: Counter[tuple[Any, ...]] = Counter()
    paired: Pairs = []
    alone: list[LoggedOperation] = []
    for operation in one.operations:
        key = _key(operation)
        twins = found.get(key, [])
        if taken[key] < len(twins):
            paired.append((operation, twins[taken[key]]))
            taken[key] += 1
        else:
            alone.append(operation)
    twinned = {id(twin) for _, twin in paired}
    other_alone = [operation for operation in other.operations if id(operation) not in twinned]
    return paired, alone, other_alone


def _key(operation: LoggedOperation) -> tuple[Any, ...]:
    shapes = tuple(made.what.partition(" ")[2] for made in operation.outputs)
    return operation.stage, operation.module, operation.op, shapes


def _apart(one: LoggedOperation, other: LoggedOperation) -> float:
    return max((a.beside(b) for a, b in zip(one.outputs, other.outputs, strict=False)), default=0.0)


def _place(one: LoggedOperation, other: LoggedOperation, apart: float) -> DifferingOperation:
    pairs = zip(one.outputs, other.outputs, strict=False)
    outputs = next((pair for pair in pairs if pair[0].beside(pair[1])), ())
    return DifferingOperation(
        op=one.op,
        stage=one.stage,
        module=one.module,
        source=one.source,
        other_source=other.source if other.source != one.source else None,
        difference=apart,
        outputs=[f"{made.what}, norm {spelled_number(made.norm)}" for made in outputs],
    )


def _operands(
    paired: Pairs, place: int, log: OperationLog, other_log: OperationLog
) -> Iterator[tuple[str, bool]]:
    """Each operand in words, and whether it was the same in both runs."""
    twin_of = {id(operation): twin for operation, twin in paired}
    one, other = paired[place]
    for a, b in zip(one.operands, other.operands, strict=False):
        if a.maker is not None and b.maker is not None:
            maker, others = log.operations[a.maker], other_log.operations[b.maker]
            same = twin_of.get(id(maker)) is others
            where, elsewhere = (
                f"{m.op} at {m.source}" if m.source else m.op for m in (maker, others)
            )
            said = "the same in both" if same else f"in B by {elsewhere}"
            yield f"{a.name}: made by {where}, {said}", same
            continue
        if not a.stored and not b.stored:
            continue  # memory that this operation is the first to write
        mine, theirs = log.stored.get(a.stored), other_log.stored.get(b.stored)
        if mine is None or theirs is None:
            yield f"{a.name}: of different origin in the two runs", False
            continue
        apart = mine.beside(theirs)
        said = f"differs ({spelled_difference(apart)})" if apart else "the same in both"
        yield f"{a.name}: {a.stored}, {said}", not apart


def _beside(one: Mapping[str, Sketch], other: Mapping[str, Sketch]) -> dict[str, float]:
    return _differing({name: one[name].beside(other[name]) for name in one if name in other})


def _differing(found: Mapping[str, float]) -> dict[str, float]:
    parts = [(name, apart) for name, apart in found.items() if apart]
    return dict(sorted(parts, key=lambda part: -part[1]))


def _sum(losses: list[float | None]) -> float | None:
    known = [loss for loss in losses if loss is not None]
    return math.fsum(known) if known and len(known) == len(losses) else None


def spelled_number(value: float | None) -> str:
    return "not finite" if value is None or not math.isfinite(value) else f"{value:.4g}"


def line_of(place: DifferingOperation) -> str:
    where = f"in {place.module}" if place.module else ""
    if place.module == "":
        where = "in the model itself"
    source = f"at {place.source}" if place.source else ""
    if place.other_source:
        source += f" (B: {place.other_source})"
    said = " ".join(filter(None, (place.stage, place.op, where, source)))
    return f"{said}, {spelled_difference(place.difference)}" if place.difference else said


def spelled_difference(apart: float) -> str:
    if not math.isfinite(apart):
        return "finite in one run only"
    return f"by {spelled_number(apart) if apart > HIDDEN else 'an unknown amount'}"
