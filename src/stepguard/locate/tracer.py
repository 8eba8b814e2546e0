"""A dispatch mode that records every operation of a replay and where bad values come from.

A tensor is known by the memory it lives in: the last operation that wrote that memory is its maker.
Each output is tested once, when it is made, so inputs need no test unless their memory is known to
hold something bad. Views are no operations here. Tensors that no operation made (parameters, batch,
constants) are tested when they are first read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from stepguard.locate.attribution import Read, explain
from stepguard.locate.bad_op import Birth, Invocation
from stepguard.locate.calls import MOVES, Call, Stage
from stepguard.locate.evidence import measure
from stepguard.locate.finite import CLEAN, Flaws, broken, flaws, mask_like, numeric, storage_key
from stepguard.locate.modules import ModuleSpans
from stepguard.locate.operators import BLANK, TESTS, Entry, Operator, describe
from stepguard.locate.source import Line, backward_caller, user_line
from stepguard.records.evidence import Evidence
from stepguard.state import faked_collectives
from stepguard.tensors.dtypes import dtype_name
from stepguard.tensors.torch_private import (
    TorchDispatchMode,
    current_autograd_node,
    next_sequence_number,
    tree_map,
)

MOST_MEASURED = 32
"""Births whose operands are measured; a torrent of them tells nothing more."""
EXACT_ELEMENTS = 20_000_000
"""Elements that may be compared position by position before the trace falls back to whole tensors.
"""
MOST_SPOTS = 16
READS_A_NUMBER = "aten._local_scalar_dense"
LEAST_HALF = 2.0**-25
"""Numbers up to this round to 0 in float16."""


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Use as a context around the replayed forward, backward or update; then ask `maker_of`."""

    def __init__(self, modules: ModuleSpans, stage: Stage = "forward") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules = modules
        self.stage: Stage = stage
        self.calls: list[Call] = []
        self.forgotten = 0
        """Calls before the first of `calls` that were dropped."""
        self.lines: dict[int, Line] = {}
        """The user's line that created the autograd node of this number."""
        self.owners: dict[int, Call] = {}
        """The forward call that created the autograd node of this number."""
        self.unseen: set[str] = set()
        """Operators whose results could not be looked at."""
        self.autocast: str | None = None
        """The dtype of the first autocast context that was met in the forward pass."""
        self.local_collectives = False
        """A collective was answered with this rank's own values."""
        self._makers: dict[int, Call] = {}
        self._bad_number: Call | None = None
        """Who made the last bad value that was read as a Python number."""
        self._last_sequence = -1
        self._measured = 0
        self._exact_left = EXACT_ELEMENTS
        self._poisoned_nodes: set[int] = set()

    def store(self, name: str, tensor: Tensor) -> Call:
        """Make a tensor known that existed before the replay."""
        found = flaws(tensor) if numeric(tensor) else CLEAN
        wild = name.startswith("param:") or not mask_like(tensor) if found else False
        call = Call(
            index=-1,
            op=name,
            stage="stored",
            out=found,
            tame=bool(found) and not found.nan and not wild,
        )
        call.born = bool(found) and not call.tame
        call.numeric = numeric(tensor)
        self._makers[storage_key(tensor)] = call
        return call

    def maker_of(self, tensor: Tensor) -> Call | None:
        """The operation that last wrote this tensor's memory."""
        return self._makers.get(storage_key(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in faked_collectives.NAMESPACES:
            self.local_collectives = True
            return faked_collectives.alone(func, args, kwargs)
        # Exotic tensors must not stop the user's code: what cannot be looked at is named and passed
        # through.
        try:
            seen = self._look(func, args, kwargs)
        except (RuntimeError, NotImplementedError, TypeError):
            self.unseen.add(str(func._overloadpacket))
            seen = None
        result = func(*args, **kwargs)
        try:
            if seen is not None:
                self._record(seen, result)
        except (RuntimeError, NotImplementedError, TypeError):
            self.unseen.add(str(func._overloadpacket))
        return result

    def _look(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Invocation | None:
        """What goes in, before the operation runs; None for what is of no interest."""
        operator = describe(func)
        if operator.name == READS_A_NUMBER:
            self._number_read(args[0])
        if operator.views or operator.name in TESTS:
            return None
        entries = operator.entries(args, kwargs)
        if self.autocast is None and self.stage == "forward":
            self.autocast = _autocast(entries)
        reads = [
            self._read(entry, operator) for entry in entries if isinstance(entry.value, Tensor)
        ]
        numbers = [(e.name, float(e.value)) for e in entries if not isinstance(e.value, Tensor)]
        kept_args, kept_kwargs = _keep_overwritten(operator, reads, args, kwargs)
        return Invocation(
            operator, func, kept_args, kept_kwargs, reads, numbers, operator.selects(entries)
        )

    def _number_read(self, tensor: Tensor) -> None:
        """`.item()`: a bad number that is used later on comes from here."""
        maker = self._makers.get(storage_key(tensor))
        if maker is not None and maker.out and numeric(tensor) and flaws(tensor):
            self._bad_number = maker

    def _read(self, entry: Entry, operator: Operator) -> Read:
        tensor = entry.value
        maker = self._makers.get(storage_key(tensor))
        if maker is None:
            maker = self.store("constant", tensor)
        read = Read(entry.name, tensor, maker)
        if (maker.out or maker.blank) and numeric(tensor) and operator.reads(entry.name):
            read.flaws = flaws(tensor)
            if read.flaws and maker.blank:
                maker.out, maker.born = read.flaws, True
        return read

    def _record(self, made_by: Invocation, result: Any) -> None:
        operator, reads = made_by.operator, made_by.reads
        call = self._place(operator.name)
        used = [read for read in reads if operator.reads(read.name)]
        call.parents = tuple(read.maker for read in used)
        call.flawed = tuple(read.maker for read in used if read.flaws)
        call.selects = made_by.selects
        call.pointwise = operator.pointwise
        call.number = operator.odd_number(made_by.numbers)
        call.blank = operator.name in BLANK
        written = [
            read.tensor if read.live is None else read.live
            for read in reads
            if read.name.partition("[")[0] in operator.writes
        ]
        results = list({id(t): t for t in [*written, *_tensors(result)]}.values())
        call.numeric = any(numeric(t) for t in results)
        call.vanished = _vanished(made_by, results)
        for position, tensor in enumerate(results):
            found = CLEAN if call.blank or not numeric(tensor) else flaws(tensor)
            if found and operator.many and not call.born:
                self._judge(call, made_by.only(position), tensor, found)
            elif found and not call.out:
                self._judge(call, made_by, tensor, found)
            self._made(tensor, call, found)

    def _place(self, name: str) -> Call:
        """A call with its stage, module, node and line."""
        call = Call(index=self.forgotten + len(self.calls), op=name, stage=self.stage)
        self.calls.append(call)
        node: Any = current_autograd_node()
        sequence = next_sequence_number()
        call.module = self.modules.current
        if node is None:
            call.line = user_line()
        else:
            caller = backward_caller()
            call.line = caller.line
            if caller.recomputed or call.module is not None:
                call.stage = "forward"
                if caller.recomputed:
                    call.evidence = Evidence(recomputed=True)
                else:
                    call.node = node.name()
            else:
                call.stage, call.node, call.sequence = "backward", node.name(), node._sequence_nr()
                return call
        call.sequence = sequence - 1 if sequence != self._last_sequence else -1
        if call.sequence >= 0 and call.stage == "forward":
            self.owners[call.sequence] = call
            if call.line is not None:
                self.lines[call.sequence] = call.line
        self._last_sequence = sequence
        return call

    def _judge(self, call: Call, made_by: Invocation, out: Tensor, found: Flaws) -> None:
        """Fill in where the bad elements of `out` come from."""
        reads = [read for read in made_by.reads if made_by.operator.reads(read.name)]
        exact = made_by.operator.pointwise and self._affordable(out, reads)
        why = explain(reads, [number for _, number in made_by.numbers], out, found, exact)
        call.causes = (*call.causes, *(read.maker for read in why.causes))
        call.out, call.tame, call.born = found, why.tame and not call.causes, why.born
        if call.number is not None and self._bad_number is not None:
            call.causes, call.number = (*call.causes, self._bad_number), None
            call.tame = call.born = False
        call.shape = tuple(out.shape)
        if call.stage == "backward" and (
            call.born or any(c.stage != "backward" for c in call.causes)
        ):
            self._poisoned_nodes.add(call.sequence)
        in_poisoned_node = call.stage == "backward" and call.sequence in self._poisoned_nodes
        call.reduces = call.op not in MOVES and any(
            out.numel() < read.tensor.numel() for read in reads
        )
        telling = (
            call.born
            or in_poisoned_node
            or (call.tame and (call.reduces or call.number is not None))
        )
        if telling and self._measured < MOST_MEASURED:
            self._measured += 1
            call.rows, call.spots = _positions(out, why.where)
            measure(Birth(call, made_by, out, why.where))

    def _affordable(self, out: Tensor, reads: list[Read]) -> bool:
        cost = out.numel() * (1 + sum(1 for read in reads if read.flaws))
        if cost > self._exact_left:
            return False
        self._exact_left -= cost
        return True

    def _made(self, tensor: Tensor, call: Call, found: Flaws) -> None:
        key = storage_key(tensor)
        old = self._makers.get(key)
        if old is not None and old.out and _partial(tensor):
            if not found:
                return  # the rest of the memory is still bad, and that is what must stay known
            if call.out and old is not call:
                call.causes = (*call.causes, *(() if old.tame or old in call.causes else (old,)))
        self._makers[key] = call


def _autocast(entries: list[Entry]) -> str | None:
    """The dtype that autocast computes in, where it is on for the device of these tensors."""
    device = next((e.value.device.type for e in entries if isinstance(e.value, Tensor)), None)
    if device is None or not torch.is_autocast_enabled(device):
        return None
    return dtype_name(torch.get_autocast_dtype(device))


def _partial(tensor: Tensor) -> bool:
    try:
        return tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        return False


def _tensors(result: Any) -> Iterable[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, list | tuple):
        for item in result:
            yield from _tensors(item)


def _keep_overwritten(
    operator: Operator, reads: list[Read], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with copies of those the operator overwrites, so that a birth can be measured
    afterwards.
    """
    copies: dict[int, Tensor] = {}
    for read in reads:
        if (
            read.name.partition("[")[0] in operator.writes
            and operator.reads(read.name)
            and numeric(read.tensor)
        ):
            read.live, read.tensor = read.tensor, read.tensor.detach().clone()
            copies[id(read.live)] = read.tensor
    if not copies:
        return args, kwargs

    def kept(value: Any) -> Any:
        return copies.get(id(value), value)

    return tree_map(kept, args), tree_map(kept, kwargs)


def _vanished(made_by: Invocation, results: list[Tensor]) -> float | None:
    """A constant that is 0 in the results' dtype, as 1e-8 is in float16."""
    if not results or results[0].dtype is not torch.float16:
        return None
    return next((number for _, number in made_by.numbers if 0 < abs(number) < LEAST_HALF), None)


def _positions(out: Tensor, where: Tensor | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """First-axis rows and some flat positions of the bad elements."""
    if out.layout is not torch.strided:
        return (), ()
    bad = where if where is not None else broken(out)
    spots = tuple(bad.flatten().nonzero().flatten()[:MOST_SPOTS].tolist())
    rows = (
        tuple(bad.reshape(bad.shape[0], -1).any(1).nonzero().flatten().tolist())
        if bad.dim()
        else ()
    )
    return rows, spots
