"""The first operation whose values differ between two runs of one step, and how it grows.

A step is taken from a capsule, run once, and every operation of its forward and backward pass is
kept as a sketch: a digest, a norm and a few of its elements. Two such logs are compared in order.
They may come from two capsules (two runs, two ranks), from one capsule under two settings (dtype,
compiled or not, threads), or from a file that another version of the program has written.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from pydantic import TypeAdapter, ValidationError
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from stepguard._errors import CapsuleError
from stepguard.locate.operands import UNINITIALISED, describe, plain, storage_key
from stepguard.locate.source import ModuleSpans, backward_caller, spell, user_line
from stepguard.run.replay import CapsuleReplay, Confirm, newest_capsule, with_step
from stepguard.state.batch import Step, named_tensors, rebuild, samples_in, subset, total_loss
from stepguard.state.files import write_file
from stepguard.state.isolation import untouched
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

SCHEMA = 1
ELEMENTS = 64
"""Elements of a tensor that are kept, evenly spaced: enough to measure a difference by."""
LARGEST_LOG = 256 << 20
GROWTH = (1e-6, 1e-4, 1e-2, 1.0)
"""Relative differences at whose first operation the growth is shown."""


# --- Every operation of one step, as sketches.


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
        pairs = list(zip(self.elements, other.elements, strict=False))
        if len(self.elements) != len(other.elements):
            return math.inf
        if any((one is None) is not (two is None) for one, two in pairs):
            return math.inf
        finite = [(one, two) for one, two in pairs if one is not None and two is not None]
        # hypot does not overflow
        size = math.hypot(*(max(abs(one), abs(two)) for one, two in finite))
        apart = math.hypot(*(one - two for one, two in finite))
        found = apart / size if size else 0.0
        if self.norm is not None and other.norm is not None:
            largest = max(self.norm, other.norm)
            found = max(found, abs(self.norm - other.norm) / largest if largest else 0.0)
        elif self.norm is not other.norm:
            return math.inf
        return found


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


# --- Settings under which one step is run.


def _number(text: str, name: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise CapsuleError(f"--with {name}={text} must be a whole number of at least 1.")
    return int(text)


def _one_of(text: str, name: str, known: Iterable[str]) -> str:
    if text not in known:
        raise CapsuleError(f"--with {name}={text} is not known; use one of {', '.join(known)}.")
    return text


DTYPES = ("float64", "float32", "bfloat16", "float16")
BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
OPTIMIZERS = {
    "plain": {"foreach": False, "fused": None},
    "foreach": {"foreach": True, "fused": None},
    "fused": {"foreach": None, "fused": True},
}
SETTINGS = {
    "dtype": "/".join(DTYPES),
    "threads": "N",
    "split": "N",
    "sdpa": "/".join(BACKENDS),
    "compile": "on/off",
    "deterministic": "on/off",
    "optimizer": "/".join(OPTIMIZERS),
}


def parse_settings(given: Iterable[str]) -> dict[str, str]:
    """`dtype=float64` and the like. Raises CapsuleError for anything else."""
    settings = {}
    for text in given:
        name, _, value = text.partition("=")
        if name not in SETTINGS or not value:
            known = ", ".join(f"{name}={values}" for name, values in SETTINGS.items())
            raise CapsuleError(f"--with {text} is not a setting; use one of {known}.")
        settings[name] = value
        if name in ("threads", "split"):
            _number(value, name)
        else:
            _one_of(value, name, SETTINGS[name].split("/"))
    return settings


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(wanted, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


def _apply(step: Step, settings: Mapping[str, str], stack: ExitStack) -> None:
    """Enter the settings; weights and batches are changed for good, in a process that ends."""
    entered: dict[str, Callable[[str], AbstractContextManager[Any]]] = {
        "threads": lambda text: _threads(int(text)),
        "sdpa": lambda text: sdpa_kernel([BACKENDS[text]]),
        "deterministic": lambda text: _deterministic(text == "on"),
        "compile": lambda text: torch.compiler.set_stance(
            "default" if text == "on" else "force_eager"
        ),
    }
    for name, value in settings.items():
        if name in entered:
            stack.enter_context(entered[name](value))
    if settings.get("compile") == "on":
        step.model.compile()
    for group in step.optimizer.param_groups:
        group.update(OPTIMIZERS[settings["optimizer"]] if "optimizer" in settings else {})
    if "dtype" in settings:
        dtype = getattr(torch, settings["dtype"])
        for root in step.named_roots().values():
            root.to(dtype)
        step.micro_batches = tuple(
            rebuild(batch, lambda _, one: one.to(dtype) if one.is_floating_point() else one)
            for batch in step.micro_batches
        )


def _parts(step: Step, split: int) -> Iterator[tuple[int, Any, float]]:
    """Index, batch and weight of each pass: the micro-batches, or the parts they are cut into."""
    for index, batch in enumerate(step.micro_batches):
        count = samples_in(batch)
        if split == 1:
            yield index, batch, 1.0
            continue
        if count is None or count < split:
            raise CapsuleError(
                f"--with split={split}: micro-batch {index} cannot be cut into {split} parts."
            )
        edges = [round(part * count / split) for part in range(split + 1)]
        for first, end in pairwise(edges):
            yield index, subset(batch, range(first, end), count), (end - first) / count


def record(
    step: Step, what: str, settings: Mapping[str, str], *, update: bool = False
) -> OperationLog:
    """Run the step once, with these settings, and keep what every operation gave."""
    assert step.loss_fn is not None
    log = OperationLog(what)
    drawn = False
    parameters = parameter_names(step.named_roots(), step.optimizer)
    with ExitStack() as stack, untouched(step):
        _apply(step, settings, stack)
        step.buffers.restore()
        with ModuleSpans(step.named_roots()) as spans:
            recorder = Recorder(log, spans, _names_of_memory(step))
            for index, batch, weight in _parts(step, int(settings.get("split", "1"))):
                restore_rng(step.rng[index])
                with recorder:
                    loss = total_loss(step.loss_fn(batch)) * weight
                    torch.autograd.backward(loss * step.scale if step.scale != 1.0 else loss)
                if "split" in settings:
                    log.operations.clear()  # those of parts have no twin
                    drawn = drawn or not torch.equal(torch.get_rng_state(), step.rng[index].cpu)
                log.losses.append(_finite(float(loss.detach())))
        if drawn:
            log.what += " (parts draw other random numbers: dropout alone makes them differ)"
        for parameter, name in parameters:
            if parameter.grad is not None:
                log.gradients[name] = sketch(parameter.grad)
        if update:
            step.optimizer.step()
            log.updated = {name: sketch(one) for one, name in parameters}
    return log


def _names_of_memory(step: Step) -> dict[int, str]:
    stored = [
        (f"param:{name}", one) for one, name in parameter_names(step.named_roots(), step.optimizer)
    ]
    stored += [(f"buffer:{name}", one) for name, one in named_buffers(step.named_roots())]
    for index, batch in enumerate(step.micro_batches):
        stored += [(f"batch {index}:{name}", one) for name, one in named_tensors(batch)]
    return {storage_key(tensor): name for name, tensor in stored}


# --- Logs from capsules and files.


class Code(NamedTuple):
    """Where model and loss function come from, as `replay` takes it."""

    build: str | None = None
    script: str | None = None
    confirm: Confirm = lambda command: False


def log_of(path: Path, code: Code) -> OperationLog:
    """Read a saved log, or run the step of a capsule or of a run. Raises CapsuleError."""
    if path.is_file() and path.suffix == ".json":
        return read_log(path)
    folder, _ = newest_capsule(path)

    def run_once(again: CapsuleReplay[OperationLog], step: Step) -> OperationLog:
        return record(step, str(folder), {})

    return with_step(folder, run_once, **code._asdict())


def under_settings(
    path: Path, settings: Mapping[str, str], code: Code
) -> tuple[OperationLog, OperationLog]:
    """Run the step of a capsule as it was, and with these settings. Raises CapsuleError."""
    folder, _ = newest_capsule(path)
    update = "optimizer" in settings

    def run_twice(
        again: CapsuleReplay[tuple[OperationLog, OperationLog]], step: Step
    ) -> tuple[OperationLog, OperationLog]:
        one = record(step, "as it was", {}, update=update)
        again.capsule.fill(step.named_roots(), step.optimizer)
        changed = ", ".join(f"{name}={value}" for name, value in settings.items())
        return one, record(step, changed, settings, update=update)

    return with_step(folder, run_twice, **code._asdict())


def write_log(log: OperationLog, path: Path) -> None:
    """Write the log as JSON, to be compared with a run of another version of the program."""
    write_file(path, json.dumps(asdict(log), allow_nan=False).encode())


def read_log(path: Path) -> OperationLog:
    """Read a log that was saved. Raises CapsuleError."""
    try:
        if path.stat().st_size > LARGEST_LOG:
            raise CapsuleError(f"{path} is larger than {LARGEST_LOG >> 20} MiB: not a log.")
        log = TypeAdapter(OperationLog).validate_json(path.read_bytes())
    except (OSError, ValidationError) as fault:
        what = fault.strerror if isinstance(fault, OSError) else "it is not one"
        raise CapsuleError(f"{path} cannot be read as a log of operations: {what}.") from None
    makers = [
        one.maker for made in log.operations for one in made.operands if one.maker is not None
    ]
    if log.schema != SCHEMA or any(not 0 <= one < len(log.operations) for one in makers):
        raise CapsuleError(f"{path} has schema {log.schema}, this version reads {SCHEMA}.")
    return log


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
            first.operands = list(_operands(operation, twin, one, other))
        if apart >= next((limit for limit in GROWTH if limit > reached), math.inf):
            growth.append(_place(operation, twin, apart))
            reached = max(limit for limit in GROWTH if limit <= apart)
    first_only = [_line(_place(few[0], few[0], 0.0)) if few else "" for few in (alone, other_alone)]
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
        outputs=[f"{made.what}, norm {_spelled(made.norm)}" for made in outputs],
    )


def _operands(
    one: LoggedOperation, other: LoggedOperation, log: OperationLog, other_log: OperationLog
) -> Iterator[str]:
    for a, b in zip(one.operands, other.operands, strict=False):
        if a.maker is not None and b.maker is not None:
            yield f"{a.name}: made by {log.operations[a.maker].op}, the same in both"
            continue
        if not a.stored and not b.stored:
            continue  # memory that this operation is the first to write
        mine, theirs = log.stored.get(a.stored), other_log.stored.get(b.stored)
        if mine is None or theirs is None:
            yield f"{a.name}: of different origin in the two runs"
            continue
        apart = mine.beside(theirs)
        said = "the same in both" if not apart else f"differs by {_spelled(apart)}"
        yield f"{a.name}: {a.stored}, {said}"


def _beside(one: Mapping[str, Sketch], other: Mapping[str, Sketch]) -> dict[str, float]:
    return _differing({name: one[name].beside(other[name]) for name in one if name in other})


def _differing(found: Mapping[str, float]) -> dict[str, float]:
    parts = [(name, apart) for name, apart in found.items() if apart]
    return dict(sorted(parts, key=lambda part: -part[1]))


def _sum(losses: list[float | None]) -> float | None:
    known = [loss for loss in losses if loss is not None]
    return math.fsum(known) if len(known) == len(losses) else None


def _spelled(value: float | None) -> str:
    return "not finite" if value is None or not math.isfinite(value) else f"{value:.4g}"


MOST_NAMES = 8


def spelled(found: StepDifference) -> Iterator[str]:
    """The lines that `stepguard diff` prints."""
    yield f"A: {found.runs[0]}"
    yield f"B: {found.runs[1]}"
    losses = [_spelled(loss) for loss in found.losses]
    if found.same:
        yield (
            f"no difference: {found.compared} operations, loss {losses[0]} and "
            f"{found.gradients_compared} gradients are bit-identical"
        )
        return
    if found.stored:
        yield f"before the step  {_listed(found.stored)}"
    yield from _of_operations(found)
    yield f"loss             {losses[0]} in A, {losses[1]} in B"
    yield f"gradients        {_listed(found.gradients) or 'equal'}"
    if found.updated:
        yield f"after the update {_listed(found.updated)}"


def _of_operations(found: StepDifference) -> Iterator[str]:
    if not found.compared:
        yield "operations       not compared: the runs have none in common"
        return
    if found.first is not None:
        yield f"first difference {_line(found.first)}"
        for name, output in zip("AB", found.first.outputs, strict=False):
            yield f"                 {name}: {output}"
        for operand in found.first.operands:
            yield f"                 operand {operand}"
        for place in found.growth:
            if place.difference > found.first.difference:
                yield f"grows            {_line(place)}"
    for name, count, where in zip("AB", found.only, found.first_only, strict=True):
        if count:
            more = f", and {count - 1} more" if count > 1 else ""
            yield f"only in {name}        {where}{more}"


def _line(place: DifferingOperation) -> str:
    where = f"in {place.module}" if place.module else "outside every module"
    if place.module == "":
        where = "in the model itself"
    source = f" at {place.source}" if place.source else ""
    if place.other_source:
        source += f" (B: {place.other_source})"
    apart = f", by {_spelled(place.difference)}" if place.difference else ""
    return f"{place.stage} {place.op} {where}{source}{apart}"


def _listed(found: Mapping[str, float]) -> str:
    shown = [f"{name} by {_spelled(apart)}" for name, apart in list(found.items())[:MOST_NAMES]]
    more = len(found) - len(shown)
    return "; ".join(shown) + (f"; {more} more" if more else "")
