"""Every operation of one step as a sketch, and the first one whose values differ between two runs.

A sketch is a digest, a norm and a few elements of a tensor. Two such logs are compared in order.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import Tensor

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


SCHEMA = 2
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
        if len(self.elements) != len(other.elements):
            return math.inf
        sizes, differences = [], []
        both = zip((*self.elements, self.norm), (*other.elements, other.norm), strict=True)
        for one, two in both:
            if one is not None and two is not None:
                sizes.append(max(abs(one), abs(two)))
                differences.append(one - two)
            elif one is not two:
                return math.inf
        found = 0.0
        if self.norm is not None:
            found = abs(differences.pop()) / (sizes.pop() or 1.0)
        # hypot does not overflow
        found = max(found, math.hypot(*differences) / (math.hypot(*sizes) or 1.0))
        if self.what == other.what:
            # bytes differ where neither these elements nor the norm show it
            found = max(found, 1e-16)
        return found


Operand = tuple[str, int | None, str]
"""What went into an operation: its name, and the earlier operation that made it, by number, or the
name of what was stored before the step."""


@dataclass(slots=True)
class LoggedOperation:
    """One operation of the step."""

    op: str
    stage: str
    module: str | None
    source: str | None
    operands: list[Operand]
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


def sketch(tensor: Tensor) -> Sketch:
    """Digest, norm and a sample of a tensor."""
    values = plain(tensor.detach())
    what = dtype_and_shape(tensor)
    if values.is_meta or not values.numel():
        return Sketch(what, what, 0.0, [])
    values = values.contiguous().cpu()
    digest = xxhash.xxh3_64_hexdigest(values.flatten().view(torch.uint8).numpy().tobytes())
    flat = values.flatten()
    # evenly spaced, and enough to measure a difference by
    places = torch.linspace(0, flat.numel() - 1, min(64, flat.numel())).long()
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
        operands: list[Operand] = []
        stored = self._log.stored
        for read in invocation.reads:
            maker = read.maker
            if maker.stage != "stored":
                operands.append((read.name, maker.index if maker.index >= 0 else None, ""))
                continue
            if maker.op == "constant":
                # one of the program; held, so that its address keeps its name
                maker.op = f"constant {len(stored)}"
                self._alive.append(read.tensor)
            if maker.op not in stored:
                stored[maker.op] = sketch(read.tensor)
            operands.append((read.name, None, maker.op))
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

    @property
    def same(self) -> bool:
        """Nothing differs, to the bit."""
        if self.first or self.stored or self.gradients or self.updated:
            return False
        if self.compared and any(self.only):
            return False
        return self.losses[0] == self.losses[1]


def compare(one: OperationLog, other: OperationLog) -> StepDifference:
    """Compare two logs in the order in which the first one ran."""
    paired, alone, other_alone = _twins(one, other)
    first = None
    growth: list[DifferingOperation] = []
    for operation, twin in paired:
        pairs = zip(operation.outputs, twin.outputs, strict=False)
        apart = max((a.beside(b) for a, b in pairs), default=0.0)
        if apart and first is None:
            first = _place(operation, twin, apart)
            operands = list(_operands(operation, twin, one, other))
            first.operands = [words for words, _ in operands]
            first.same_operands = all(same for _, same in operands)
        reached = growth[-1].difference if growth else 0.0
        if any(reached < limit <= apart for limit in GROWTH):
            growth.append(_place(operation, twin, apart))
    return StepDifference(
        runs=[one.what, other.what],
        compared=len(paired),
        only=[len(alone), len(other_alone)],
        first_only=[
            line_of(_place(few[0], few[0], 0.0)) if few else "" for few in (alone, other_alone)
        ],
        stored=_differing(one.stored, other.stored),
        first=first,
        growth=growth,
        losses=[_sum(one.losses), _sum(other.losses)],
        gradients=_differing(one.gradients, other.gradients),
        gradients_compared=len(one.gradients.keys() & other.gradients.keys()),
        updated=_differing(one.updated, other.updated),
    )


Operations = list[LoggedOperation]


def _twins(
    one: OperationLog, other: OperationLog
) -> tuple[list[tuple[LoggedOperation, LoggedOperation]], Operations, Operations]:
    """Operations of both, in the order of the first, and those that each has alone."""
    waiting: dict[tuple[Any, ...], Operations] = defaultdict(list)
    for operation in reversed(other.operations):
        waiting[_key(operation)].append(operation)
    paired = []
    alone = []
    for operation in one.operations:
        twins = waiting[_key(operation)]
        if twins:
            paired.append((operation, twins.pop()))
        else:
            alone.append(operation)
    left = {id(operation) for twins in waiting.values() for operation in twins}
    return paired, alone, [operation for operation in other.operations if id(operation) in left]


def _key(operation: LoggedOperation) -> tuple[Any, ...]:
    shapes = tuple(made.what.partition(" ")[2] for made in operation.outputs)
    return operation.stage, operation.module, operation.op, shapes


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
    one: LoggedOperation, other: LoggedOperation, log: OperationLog, other_log: OperationLog
) -> Iterator[tuple[str, bool]]:
    """Each operand in words, and whether it was the same in both runs."""
    pairs = zip(one.operands, other.operands, strict=False)
    for (name, maker, stored), (_, other_maker, other_stored) in pairs:
        if maker is not None and other_maker is not None:
            yield f"{name}: made by {log.operations[maker].op}, the same in both", True
        elif stored in log.stored and other_stored in other_log.stored:
            apart = log.stored[stored].beside(other_log.stored[other_stored])
            said = f"differs by {spelled_number(apart)}" if apart else "the same in both"
            yield f"{name}: {stored}, {said}", not apart
        elif stored or other_stored:
            yield f"{name}: of different origin in the two runs", False
        # else: memory that this operation is the first to write


def _differing(one: Mapping[str, Sketch], other: Mapping[str, Sketch]) -> dict[str, float]:
    found = {name: one[name].beside(other[name]) for name in one if name in other}
    parts = [(name, apart) for name, apart in found.items() if apart]
    return dict(sorted(parts, key=lambda part: -part[1]))


def _sum(losses: list[float | None]) -> float | None:
    known = [loss for loss in losses if loss is not None]
    return math.fsum(known) if len(known) == len(losses) else None


def spelled_number(value: float | None) -> str:
    return "not finite" if value is None or not math.isfinite(value) else f"{value:.4g}"


def line_of(place: DifferingOperation) -> str:
    where = f"in {place.module}" if place.module else "outside every module"
    if place.module == "":
        where = "in the model itself"
    source = f" at {place.source}" if place.source else ""
    if place.other_source:
        source += f" (B: {place.other_source})"
    apart = f", by {spelled_number(place.difference)}" if place.difference else ""
    return f"{place.stage} {place.op} {where}{source}{apart}"
