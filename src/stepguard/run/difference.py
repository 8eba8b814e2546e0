"""The first operation whose values differ between two runs of one step, and how it grows.

A step is taken from a capsule, run once, and every operation of its forward and backward pass is
kept as a sketch: a digest, a norm and a few of its elements. Two such logs are compared in order.
They may come from two capsules (two runs, two ranks), from one capsule under two settings (dtype,
compiled or not, threads), from a file that another version of the program has written, or from
files that torch's DebugMode has written.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import TypeAdapter, ValidationError
from torch.nn.attention import SDPBackend, sdpa_kernel

from stepguard._errors import CapsuleError
from stepguard.locate.operation_log import (
    SCHEMA,
    LoggedOperand,
    LoggedOperation,
    OperationLog,
    Sketch,
    StepDifference,
    line_of,
    record_passes,
    sketch,
    spelled_difference,
    spelled_number,
)
from stepguard.locate.source import Line, spell
from stepguard.run.replay import CapsuleReplay, Confirm, newest_capsule, with_step
from stepguard.state.batch import Step, rebuild, samples_in, subset
from stepguard.state.files import write_file
from stepguard.state.isolation import untouched
from stepguard.tensors.names import parameter_names

LARGEST_LOG = 256 << 20


# --- Settings under which one step is run.


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
        allowed = SETTINGS[name].split("/")
        if allowed == ["N"]:
            if not value.isdecimal() or int(value) < 1:
                raise CapsuleError(f"--with {text} must be a whole number of at least 1.")
        elif value not in allowed:
            raise CapsuleError(f"--with {text} is not known; use one of {', '.join(allowed)}.")
    return settings


def _apply(step: Step, settings: Mapping[str, str], stack: ExitStack) -> None:
    """Enter the settings; weights and batches are changed for good, in a process that ends."""
    if "threads" in settings:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(int(settings["threads"]))
    if "sdpa" in settings:
        stack.enter_context(sdpa_kernel([BACKENDS[settings["sdpa"]]]))
    if "deterministic" in settings:
        stack.callback(
            torch.use_deterministic_algorithms,
            torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        torch.use_deterministic_algorithms(settings["deterministic"] == "on", warn_only=True)
    if "compile" in settings:
        stance = {"on": "default", "off": "force_eager"}[settings["compile"]]
        stack.enter_context(torch.compiler.set_stance(stance))
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
    with ExitStack() as stack, untouched(step):
        _apply(step, settings, stack)
        step.buffers.restore()
        drawn = record_passes(log, step, _parts(step, int(settings.get("split", "1"))))
        if "split" in settings:
            log.operations.clear()  # those of parts have no twin
            if drawn:
                log.what += " (parts draw other random numbers: dropout alone makes them differ)"
        if update:
            step.optimizer.step()
            parameters = parameter_names(step.named_roots(), step.optimizer)
            log.updated = {name: sketch(one) for one, name in parameters}
    return log


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
    """Read a log that was saved, here or by torch's DebugMode. Raises CapsuleError."""
    try:
        if path.stat().st_size > LARGEST_LOG:
            raise CapsuleError(f"{path} is larger than {LARGEST_LOG >> 20} MiB: not a log.")
        saved = path.read_bytes()
        log = TypeAdapter(OperationLog | DebugModeFile).validate_json(saved)
    except (OSError, ValidationError) as fault:
        what = fault.strerror if isinstance(fault, OSError) else "it is not one"
        raise CapsuleError(f"{path} cannot be read as a log of operations: {what}.") from None
    if isinstance(log, DebugModeFile):
        return _of_debug_mode(str(path), log)
    makers = [
        one.maker for made in log.operations for one in made.operands if one.maker is not None
    ]
    if log.schema != SCHEMA or any(not 0 <= one < len(log.operations) for one in makers):
        raise CapsuleError(f"{path} has schema {log.schema}, this version reads {SCHEMA}.")
    log.what = f"{path} ({log.what})"
    return log


# --- Logs that torch's DebugMode has saved (torch 2.15: `DebugMode.save_logs`).


TORCHS = "torch.utils._debug_mode.DebugMode.logs"
TENSOR = re.compile(r"t(\$\d{1,12})?: (\w{1,20})(\[[^\[\]]{0,200}\])")
"""How DebugMode writes a tensor: `t$3: f32[8, 4]`, with its number where it records ids."""
FRAME = re.compile(r'File "([^"\n]+)", line (\d{1,9})')
LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<")


@dataclass(slots=True)
class Tagged:
    """A value as DebugMode writes it, or a container of such values."""

    type: Literal["scalar", "nonfinite_float", "tuple", "list", "dict"]
    value: bool | int | float | str | None = None
    items: list[Tagged] | list[tuple[str, Tagged]] = field(default_factory=list)


@dataclass(slots=True)
class DebugCall:
    """One call of the log: an operation, a kernel, or the beginning of a module."""

    type: str
    call_depth: int
    log: Tagged | None = None
    output_str: str | None = None
    stack_trace: str | None = None
    fwd_stack_trace: str | None = None
    op_name: str = ""
    args_str: str = ""
    kwargs_str: str = ""
    kernel_name: str = ""
    post_hashes: Tagged | None = None
    tag: str = ""
    header: str = ""

    @property
    def hashes(self) -> dict[str, Tagged]:
        """What was logged of the inputs and the result, by DebugMode's names."""
        items = self.log.items if self.log is not None else ()
        return dict(one for one in items if isinstance(one, tuple))

    @property
    def source(self) -> str | None:
        """The innermost line of the forward pass that is not in an installed package."""
        frames = FRAME.findall(self.fwd_stack_trace or self.stack_trace or "")
        ours = [one for one in frames if not any(part in one[0] for part in LIBRARIES)]
        return spell(Line(ours[-1][0], int(ours[-1][1]))) if ours else None

    @property
    def stage(self) -> str:
        """`backward`, where the stacks show it."""
        return "" if self.fwd_stack_trace in (None, self.stack_trace) else "backward"


@dataclass(slots=True)
class DebugModeFile:
    """What `DebugMode.save_logs` writes."""

    format: str
    version: int
    logs: list[DebugCall]


def _of_debug_mode(path: str, saved: DebugModeFile) -> OperationLog:
    """The operations with their hashes; what they were made from, where ids were recorded."""
    if saved.format != TORCHS or saved.version != 1:
        raise CapsuleError(f"{path} has version {saved.version} of {saved.format}, not 1.")
    log = OperationLog(f"{path} (DebugMode)")
    kinds: set[str] = set()
    makers: dict[str, int] = {}
    for call, module in _in_modules(saved.logs):
        hashes = call.hashes
        inputs, taken = _sketches(call.args_str + call.kwargs_str, hashes.get("input_hash"))
        outputs, made = _sketches(call.output_str or "", hashes.get("hash", call.post_hashes))
        kinds.update(kind for _, kind in outputs)
        operation = LoggedOperation(
            op=call.op_name.replace("::", ".") or f"triton {call.kernel_name}",
            stage=call.stage,
            module=module,
            source=call.source,
            operands=[],
            outputs=[one for one, _ in outputs],
        )
        for place, ((number, *what), (read, _)) in enumerate(zip(taken, inputs, strict=False)):
            operand = LoggedOperand(f"input {place}", makers.get(number))
            if number and operand.maker is None:
                operand.stored = f"tensor {number} {''.join(what)}"
                log.stored.setdefault(operand.stored, read)
            operation.operands.append(operand)
        makers.update((number, len(log.operations)) for number, *_ in made if number)
        log.operations.append(operation)
    log.hashes = " and ".join(sorted(kinds))
    if not kinds:
        raise CapsuleError(f"{path} has no hashes: record it with DebugMode.log_tensor_hashes().")
    return log


def _in_modules(calls: Iterable[DebugCall]) -> Iterator[tuple[DebugCall, str | None]]:
    """Operations and kernels, each with the module that it ran in, where modules were recorded."""
    entered: list[tuple[int, str]] = []
    for call in calls:
        while entered and entered[-1][0] >= call.call_depth:
            entered.pop()
        if call.type == "annotate" and call.header.startswith("nn.Mod"):
            entered.append((call.call_depth, call.tag))
        elif call.type in ("op", "triton_kernel"):
            yield call, entered[-1][1] if entered else None


def _sketches(
    text: str, tree: Tagged | None
) -> tuple[list[tuple[Sketch, str]], list[tuple[str, str, str]]]:
    """Each hash with its kind, and the tensors in the text: number, dtype and shape."""
    leaves, tensors = _leaves(tree), TENSOR.findall(text)
    # several hashes of each tensor may be recorded
    each = len(leaves) // len(tensors) if tensors and len(leaves) % len(tensors) == 0 else 0
    found = []
    for place, leaf in enumerate(leaves):
        what = " ".join(tensors[place // each][1:]) if each else ""
        number = leaf.value if isinstance(leaf.value, float) else math.nan
        norm = number if math.isfinite(number) else None
        known = leaf.type == "scalar"
        kind = HASHES.get(type(leaf.value), "custom hash") if known else "norm"
        found.append((Sketch(what, str(leaf.value), norm, []), kind))
    return found, tensors


HASHES = {float: "norm", int: "hash_tensor"}


def _leaves(tree: Tagged | None) -> list[Tagged]:
    """The scalars of a value in order, without None."""
    if tree is None:
        return []
    if tree.type in ("scalar", "nonfinite_float"):
        return [tree] if tree.value is not None else []
    members = (one[1] if isinstance(one, tuple) else one for one in tree.items)
    return [leaf for member in members for leaf in _leaves(member)]


# --- Two logs beside each other, in words.


MOST_NAMES = 8


def spelled(found: StepDifference) -> Iterator[str]:
    """The lines that `stepguard diff` prints."""
    yield f"A: {found.runs[0]}"
    yield f"B: {found.runs[1]}"
    losses = [spelled_number(loss) for loss in found.losses]
    # a log of DebugMode has operations only
    whole = bool(found.gradients_compared) or found.losses != [None, None]
    if found.same:
        same = f"the results of {found.compared} operations have equal hashes ({found.hashes})"
        if whole:
            same = (
                f"{found.compared} operations, loss {losses[0]} and {found.gradients_compared} "
                "gradients are bit-identical"
            )
        yield f"no difference: {same}"
        return
    yield from _listed("before the step", found.stored)
    yield from _of_operations(found)
    if whole:
        yield f"loss             {losses[0]} in A, {losses[1]} in B"
        yield from _listed("gradients", found.gradients)
        if not found.gradients:
            yield "gradients        equal"
    yield from _listed("after the update", found.updated)


def _of_operations(found: StepDifference) -> Iterator[str]:
    if not found.compared:
        yield "operations       not compared: the runs have none in common"
        return
    if found.first is None:
        yield f"operations       {found.compared} are equal in both"
    else:
        yield f"first difference {line_of(found.first)}"
        for name, output in zip("AB", found.first.outputs, strict=False):
            yield f"                 {name}: {output}"
        for operand in found.first.operands:
            yield f"                 operand {operand}"
        for place in found.growth:
            if place.difference > found.first.difference:
                yield f"grows            {line_of(place)} (A: {place.outputs[0]})"
    for name, count, where in zip("AB", found.only, found.first_only, strict=True):
        if count:
            more = f", and {count - 1} more" if count > 1 else ""
            yield f"only in {name}        {where}{more}"


def _listed(heading: str, found: Mapping[str, float]) -> Iterator[str]:
    """One line for each name, the most differing first."""
    shown = list(found.items())[:MOST_NAMES]
    lines = [f"{name} {spelled_difference(apart)}" for name, apart in shown]
    if len(found) > len(shown):
        lines.append(f"and {len(found) - len(shown)} more")
    for place, line in enumerate(lines):
        yield f"{'' if place else heading:<17}{line}"
