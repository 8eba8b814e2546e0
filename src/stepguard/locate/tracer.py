"""A dispatch mode that records every operation of a replay and where bad values come from.

A tensor is known by the memory it lives in: the last operation that wrote that memory is its maker.
Each output is tested once, when it is made, so inputs need no test unless their memory is known to
hold something bad. Views are not recorded. Tensors that no operation made (parameters, batch,
constants) are tested when they are first read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from stepguard.locate.attribution import Read, attribute
from stepguard.locate.bad_op import BadOp, Invocation
from stepguard.locate.calls import MOVES, Call, Stage
from stepguard.locate.evidence import measure
from stepguard.locate.finite import CLEAN, Flaws, broken, flaws, mask_like, numeric, storage_key
from stepguard.locate.modules import ModuleSpans
from stepguard.locate.operators import TESTS, UNINITIALISED, Operator, OperatorEntry, describe
from stepguard.locate.source import Line, backward_caller, user_line
from stepguard.records.evidence import Evidence
from stepguard.state import faked_collectives
from stepguard.tensors.torch_private import (
    TorchDispatchMode,
    current_autograd_node,
    next_sequence_number,
    tree_map,
)

MOST_MEASURED = 32
"""First bad values whose operands are measured; a torrent of them tells nothing more."""
EXACT_ELEMENTS = 20_000_000
"""Elements that may be compared position by position; beyond, whole tensors are compared."""
MOST_POSITIONS = 16
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
        """Operators whose results could not be tested."""
        self.autocast: str | None = None
        """The dtype that autocast computed in; set by whoever ran the traced step."""
        self.local_collectives = False
        """A collective was answered with this rank's own values."""
        self._makers: dict[int, Call] = {}
        """Who wrote the memory at this address. torch reuses addresses of freed tensors: then the
        next operation that writes there takes over."""
        self._bad_number: Call | None = None
        """Maker of the last bad value that was read as a Python number."""
        self._last_sequence = -1
        self._measured = 0
        self._exact_left = EXACT_ELEMENTS
        self._poisoned_nodes: set[int] = set()
        """Numbers of the autograd nodes in which the gradient went bad."""

    def store(self, name: str, tensor: Tensor) -> Call:
        """Make a tensor known that existed before the replay."""
        call = Call(index=-1, op=name, stage="stored", numeric=numeric(tensor))
        if call.numeric:
            call.out = flaws(tensor)
        if call.out:
            # A weight is never infinite on purpose; a buffer or a constant may be a mask.
            may_be_mask = not name.startswith("param:") and mask_like(tensor)
            call.intended_inf = may_be_mask and not call.out.nan
            call.first_bad = not call.intended_inf
        self._makers[storage_key(tensor)] = call
        return call

    def maker_of(self, tensor: Tensor) -> Call | None:
        """Return the operation that last wrote this tensor's memory."""
        return self._makers.get(storage_key(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch takes the mode off its stack while this method runs: operations of the tracer's own
        # (finite tests, copies) are not traced.
        kwargs = kwargs or {}
        if func.namespace in faked_collectives.NAMESPACES:
            # The other ranks do not replay: a real collective would wait for them for ever.
            self.local_collectives = True
            return faked_collectives.alone(func, args, kwargs)
        # Exotic tensors must not stop the user's code: an operator whose tensors cannot be tested
        # is named and passed through.
        try:
            invocation = self._inspect(func, args, kwargs)
        except (RuntimeError, NotImplementedError, TypeError):
            self.unseen.add(str(func._overloadpacket))
            invocation = None
        result = func(*args, **kwargs)
        try:
            if invocation is not None:
                self._record(invocation, result)
        except (RuntimeError, NotImplementedError, TypeError):
            self.unseen.add(str(func._overloadpacket))
        return result

    def _inspect(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Invocation | None:
        """Note what goes in, before the operation runs; None if the operation is not recorded."""
        operator = describe(func)
        if operator.name == READS_A_NUMBER:
            self._note_number_read(args[0])
        if operator.views or operator.name in TESTS:
            return None
        entries = operator.entries(args, kwargs)
        reads = []
        numbers = []
        for entry in entries:
            if isinstance(entry.value, Tensor):
                reads.append(self._read(entry, operator))
            else:
                numbers.append((entry.name, float(entry.value)))
        kept_args, kept_kwargs = _keep_overwritten(operator, reads, args, kwargs)
        selects = operator.selects(entries)
        return Invocation(operator, func, kept_args, kept_kwargs, reads, numbers, selects)

    def _note_number_read(self, tensor: Tensor) -> None:
        """`.item()`: a bad number that is used afterwards comes from this tensor."""
        maker = self.maker_of(tensor)
        if maker is not None and maker.out and numeric(tensor) and flaws(tensor):
            self._bad_number = maker

    def _read(self, entry: OperatorEntry, operator: Operator) -> Read:
        tensor = entry.value
        maker = self.maker_of(tensor)
        if maker is None:
            maker = self.store("constant", tensor)
        read = Read(entry.name, tensor, maker)
        suspect = maker.out or maker.uninitialised
        if suspect and numeric(tensor) and operator.reads(entry.name):
            # Some of the maker's memory is bad; the part that is read here may not be.
            read.flaws = flaws(tensor)
            if read.flaws and maker.uninitialised:
                maker.out = read.flaws
                maker.first_bad = True
        return read

    def _record(self, invocation: Invocation, result: Any) -> None:
        """Add a call for an operation that has run, and test what it gave."""
        operator = invocation.operator
        call = self._new_call(operator.name)
        used = invocation.used
        call.parents = tuple(read.maker for read in used)
        call.flawed = tuple(read.maker for read in used if read.flaws)
        call.selects = invocation.selects
        call.pointwise = operator.pointwise
        call.number = operator.bad_number(invocation.numbers)
        call.uninitialised = operator.name in UNINITIALISED
        results = _results(invocation, result)
        call.numeric = any(map(numeric, results))
        call.rounded_to_zero = _rounded_to_zero(invocation, results)
        for position, tensor in enumerate(results):
            self._record_result(call, invocation, tensor, position)

    def _record_result(
        self, call: Call, invocation: Invocation, tensor: Tensor, position: int
    ) -> None:
        found = CLEAN
        # Uninitialised memory holds whatever was there: only reading it can be a mistake.
        if numeric(tensor) and not call.uninitialised:
            found = flaws(tensor)
        if found and invocation.operator.foreach and not call.first_bad:
            self._attribute(call, invocation.only(position), tensor, found)
        elif found and not call.out:
            self._attribute(call, invocation, tensor, found)
        self._remember_maker(tensor, call, found)

    def _new_call(self, name: str) -> Call:
        """Add a call with its stage, module, autograd node and line."""
        call = Call(index=self.forgotten + len(self.calls), op=name, stage=self.stage)
        self.calls.append(call)
        call.module = self.modules.current
        node: Any = current_autograd_node()
        if node is None:
            call.line = user_line()
            self._link_to_node(call)
            return call
        caller = backward_caller()
        call.line = caller.line
        if caller.recomputed:
            # A checkpointed block computes its forward again inside a backward node.
            call.stage = "forward"
            call.evidence = Evidence(recomputed=True)
        elif call.module is not None:
            # A module called autograd.grad in its forward (gradient penalty, forces).
            call.stage = "forward"
            call.node = node.name()
        else:
            call.stage = "backward"
            call.node = node.name()
            call.sequence = node._sequence_nr()
            return call
        self._link_to_node(call)
        return call

    def _link_to_node(self, call: Call) -> None:
        """Find out which autograd node the operation created, so that the backward leads to it."""
        # Autograd creates the node before it hands the operation to the dispatch mode, and each
        # node takes the next number: the number has moved if this operation is differentiable.
        sequence = next_sequence_number()
        if sequence != self._last_sequence:
            call.sequence = sequence - 1
        self._last_sequence = sequence
        if call.sequence >= 0 and call.stage == "forward":
            self.owners[call.sequence] = call
            if call.line is not None:
                self.lines[call.sequence] = call.line

    def _attribute(self, call: Call, invocation: Invocation, out: Tensor, found: Flaws) -> None:
        """Fill in where the bad elements of `out` come from."""
        used = invocation.used
        exact = invocation.operator.pointwise and self._can_compare(out, used)
        numbers = [number for _, number in invocation.numbers]
        why = attribute(used, numbers, out, found, exact)
        call.causes = (*call.causes, *(read.maker for read in why.causes))
        call.out = found
        call.intended_inf = why.intended_inf and not call.causes
        call.first_bad = why.first_bad
        self._follow_bad_number(call)
        call.shape = tuple(out.shape)
        shrinks = any(out.numel() < read.tensor.numel() for read in used)
        call.reduces = shrinks and call.op not in MOVES
        self._note_poisoned_node(call)
        if self._measured < MOST_MEASURED and self._is_telling(call):
            self._measured += 1
            call.rows, call.bad_positions = _positions(out, why.where)
            measure(BadOp(call, invocation, out, why.where))

    def _follow_bad_number(self, call: Call) -> None:
        """Lead from a bad number to the tensor that .item() read it from."""
        if call.number is None or self._bad_number is None:
            return
        call.causes = (*call.causes, self._bad_number)
        call.number = None
        call.intended_inf = False
        call.first_bad = False

    def _note_poisoned_node(self, call: Call) -> None:
        if call.stage != "backward":
            return
        # A saved tensor of the forward that was bad already makes the gradient bad here.
        enters_here = any(cause.stage != "backward" for cause in call.causes)
        if call.first_bad or enters_here:
            self._poisoned_nodes.add(call.sequence)

    def _is_telling(self, call: Call) -> bool:
        """True if the operands of this call may be part of the explanation."""
        if call.first_bad:
            return True
        # One autograd node runs several operations; any of them may show why it went bad.
        if call.stage == "backward" and call.sequence in self._poisoned_nodes:
            return True
        return call.intended_inf and (call.reduces or call.number is not None)

    def _can_compare(self, out: Tensor, used: list[Read]) -> bool:
        """Charge a comparison by position to the budget of elements; False if it is used up."""
        flawed = [read for read in used if read.flaws]
        cost = out.numel() * (1 + len(flawed))
        if cost > self._exact_left:
            return False
        self._exact_left -= cost
        return True

    def _remember_maker(self, tensor: Tensor, call: Call, found: Flaws) -> None:
        key = storage_key(tensor)
        old = self._makers.get(key)
        if old is not None and old.out and _covers_part(tensor):
            # The rest of the memory is still bad, so its maker must stay known.
            if not found:
                return
            if call.out and old is not call and not old.intended_inf and old not in call.causes:
                call.causes = (*call.causes, old)
        self._makers[key] = call


def _covers_part(tensor: Tensor) -> bool:
    """True if the tensor is a view of some of its memory only."""
    try:
        return tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        # sparse and other tensors without one storage: not a view of anything
        return False


def _results(invocation: Invocation, result: Any) -> list[Tensor]:
    """List what the operation wrote in place and what it returned, each tensor once."""
    results: dict[int, Tensor] = {}
    for read in invocation.reads:
        if invocation.operator.writes(read.name):
            tensor = read.tensor if read.overwritten is None else read.overwritten
            results[id(tensor)] = tensor
    for tensor in _tensors(result):
        results[id(tensor)] = tensor
    return list(results.values())


def _tensors(result: Any) -> Iterable[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, list | tuple):
        for item in result:
            yield from _tensors(item)


def _keep_overwritten(
    operator: Operator, reads: list[Read], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put copies in the place of arguments that the operator overwrites, to be measured later."""
    copies: dict[int, Tensor] = {}
    for read in reads:
        overwritten = operator.writes(read.name) and operator.reads(read.name)
        if overwritten and numeric(read.tensor):
            read.overwritten = read.tensor
            read.tensor = read.tensor.detach().clone()
            copies[id(read.overwritten)] = read.tensor
    if not copies:
        return args, kwargs

    def kept(value: Any) -> Any:
        return copies.get(id(value), value)

    return tree_map(kept, args), tree_map(kept, kwargs)


def _rounded_to_zero(invocation: Invocation, results: list[Tensor]) -> float | None:
    """Find a constant that is 0 in the results' dtype, as 1e-8 is in float16."""
    if not results or results[0].dtype is not torch.float16:
        return None
    for _, number in invocation.numbers:
        if 0 < abs(number) < LEAST_HALF:
            return number
    return None


def _positions(out: Tensor, where: Tensor | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return first-axis rows and some flat positions of the bad elements."""
    if out.layout is not torch.strided:
        return (), ()
    bad = broken(out) if where is None else where
    positions = tuple(bad.flatten().nonzero().flatten()[:MOST_POSITIONS].tolist())
    if not bad.dim():
        return (), positions
    return tuple(bad_rows(bad)), positions


def bad_rows(bad: Tensor) -> list[int]:
    """List the first-axis positions at which a mask is True anywhere."""
    rows: list[int] = bad.reshape(bad.shape[0], -1).any(1).nonzero().flatten().tolist()
    return rows
