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

from stepguard.locate.operands import UNINITIALISED, describe, plain, storage_key
from stepguard.locate.source import ModuleSpans, backward_caller, spell, user_line
from stepguard.state.batch import Step, named_tensors, total_loss
from stepguard.state.rng import restore_rng
from stepguard.tensors.names import named_buffers, parameter_names
from stepguard.tensors.torch_private import (
    TorchDispatchMode,
    current_autograd_node,
    next_sequence_number,
    no_dispatch_modes,
    tree_flatten,
)
from stepguard.tensors.values import dtype_and_shape

# --- Every operation of one step, as sketches.


SCHEMA = 1
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


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills the log with the operations that run while it is entered."""

    def __init__(self, log: OperationLog, spans: ModuleSpans, named: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log = log
        self._spans = spans
        self._named = dict(named)
        """Address of the memory of what existed before the step -> its name."""
        self._makers: dict[int, int] = {}
        self._unwritten: set[int] = set()
        self._owners: dict[int, LoggedOperation] = {}
        """The forward operation behind the autograd node of this number."""
        self._kept: list[Tensor] = []
        """Results that are held, so that no other tensor gets the same memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operator = describe(func)
        if operator.views:
            return func(*args, **kwargs)
        with no_dispatch_modes():
            operands = [
                self._operand(name, value)
                for name, value in operator.entries(args, kwargs)
                if isinstance(value, Tensor)
            ]
        result = func(*args, **kwargs)
        with no_dispatch_modes():
            made = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
            if operator.name in UNINITIALISED:
                # what it holds says nothing until something is written there
                self._kept += made
                self._unwritten.update(map(storage_key, made))
                return result
            operation = self._placed(operator.name, operands, made)
            for tensor in made:
                self._makers[storage_key(tensor)] = len(self._log.operations)
            self._kept += made
            self._log.operations.append(operation)
        return result

    def _operand(self, name: str, tensor: Tensor) -> LoggedOperand:
        key = storage_key(tensor)
        if key in self._makers:
            return LoggedOperand(name, self._makers[key])
        if key in self._unwritten:
            return LoggedOperand(name)
        stored = self._named.get(key)
        if stored is None:
            # a constant of the program; held, so that its address keeps its name
            stored = self._named[key] = f"constant {len(self._log.stored)}"
            self._kept.append(tensor)
        if stored not in self._log.stored:
            self._log.stored[stored] = sketch(tensor)
        return LoggedOperand(name, None, stored)

    def _placed(
        self, op: str, operands: list[LoggedOperand], made: list[Tensor]
    ) -> LoggedOperation:
        outputs = [sketch(tensor) for tensor in made]
        node: Any = current_autograd_node()
        stage, module = "forward", self._spans.current
        if node is None:
            line = user_line()
        else:
            line, recomputed = backward_caller()
            if not recomputed and module is None:
                # torch acts alone here: the forward operation says whose gradient it is
                behind = self._owners.get(node._sequence_nr())
                source = spell(line)
                if behind is not None:
                    module, source = behind.module, source or behind.source
                return LoggedOperation(op, "backward", module, source, operands, outputs)
        operation = LoggedOperation(op, stage, module, spell(line), operands, outputs)
        self._owners[next_sequence_number() - 1] = operation
        return operation


# --- One run of a step into a log.


Part = tuple[int, Any, float]
"""Number of the micro-batch whose random numbers it draws, the batch, and what its loss counts."""


def record_passes(log: OperationLog, step: Step, parts: Iterable[Part]) -> bool:
    """Run forward and backward of these parts, inside of `untouched`, and keep what every operation
    gave. True if they drew random numbers.
    """
    drawn = False
    with ModuleSpans(step.named_roots()) as spans:
        recorder = Recorder(log, spans, _names_of_memory(step))
        for index, batch, weight in parts:
            restore_rng(step.rng[index])
            with recorder:
                if step.loss_fn is not None:
                    loss = total_loss(step.loss_fn(batch)) * weight
                    torch.autograd.backward(loss * step.scale if step.scale != 1.0 else loss)
                    log.losses.append(_finite(float(loss.detach())))
                else:
                    _run_model(step, batch)
            drawn = drawn or not torch.equal(torch.get_rng_state(), step.rng[index].cpu)
    for parameter, name in parameter_names(step.named_roots(), step.optimizer):
        if parameter.grad is not None:
            log.gradients[name] = sketch(parameter.grad)
    return drawn


def _run_model(step: Step, batch: Any) -> None:
    """Run the part of a watched step that is known: the model, and its outputs' gradients."""
    assert step.model_fn is not None
    outputs, gradients = step.model_fn(batch)
    pairs = [one for one in zip(outputs, gradients, strict=True) if one[1] is not None]
    if pairs:
        torch.autograd.backward([one for one, _ in pairs], [one for _, one in pairs])


def _names_of_memory(step: Step) -> dict[int, str]:
    stored = [
        (f"param:{name}", one) for one, name in parameter_names(step.named_roots(), step.optimizer)
    ]
    stored += [(f"buffer:{name}", one) for name, one in named_buffers(step.named_roots())]
    for index, batch in enumerate(step.micro_batches):
        stored += [(f"batch {index}:{name}", one) for name, one in named_tensors(batch)]
    return {storage_key(tensor): name for name, tensor in stored}


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
    reached = 0.0
    for operation, twin in paired:
        apart = _apart(operation, twin)
        if apart and first is None:
            first = _place(operation, twin, apart)
            operands = list(_operands(operation, twin, one, other))
            first.operands = [words for words, _ in operands]
            first.same_operands = all(same for _, same in operands)
        if apart >= next((limit for limit in GROWTH if limit > reached), math.inf):
            growth.append(_place(operation, twin, apart))
            reached = max(limit for limit in GROWTH if limit <= apart)
    first_only = [
        line_of(_place(few[0], few[0], 0.0)) if few else "" for few in (alone, other_alone)
    ]
    return StepDifference(
        runs=[one.what, other.what],
        compared=len(paired),
        only=[len(alone), len(other_alone)],
        first_only=first_only,
        stored=_beside(one.stored, other.stored),
        first=first,
        growth=growth,
        losses=[_sum(one.losses), _sum(other.losses)],
        gradients=_beside(one.gradients, other.gradients),
        gradients_compared=len(one.gradients.keys() & other.gradients.keys()),
        updated=_beside(one.updated, other.updated),
    )


Pairs = list[tuple[LoggedOperation, LoggedOperation]]


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
    one: LoggedOperation, other: LoggedOperation, log: OperationLog, other_log: OperationLog
) -> Iterator[tuple[str, bool]]:
    """Each operand in words, and whether it was the same in both runs."""
    for a, b in zip(one.operands, other.operands, strict=False):
        if a.maker is not None and b.maker is not None:
            yield f"{a.name}: made by {log.operations[a.maker].op}, the same in both", True
            continue
        if not a.stored and not b.stored:
            continue  # memory that this operation is the first to write
        mine, theirs = log.stored.get(a.stored), other_log.stored.get(b.stored)
        if mine is None or theirs is None:
            yield f"{a.name}: of different origin in the two runs", False
            continue
        apart = mine.beside(theirs)
        said = "the same in both" if not apart else f"differs by {spelled_number(apart)}"
        yield f"{a.name}: {a.stored}, {said}", not apart


def _beside(one: Mapping[str, Sketch], other: Mapping[str, Sketch]) -> dict[str, float]:
    return _differing({name: one[name].beside(other[name]) for name in one if name in other})


def _differing(found: Mapping[str, float]) -> dict[str, float]:
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
