"""A dispatch mode that records every operation of a replay and where bad values come from.

A tensor is known by the memory it lives in: the last operation that wrote that memory is its maker.
Each output is tested once, when it is made, so inputs need no test unless their memory is known to
hold something bad. Views are not recorded. Tensors that no operation made (parameters, batch,
constants) are tested when they are first read.

Kernels that write memory by themselves (Triton, CUDA, NumPy) are no operations. So custom autograd
functions and modules are boundaries: what goes in and comes out is tested, and a bad value that no
operation made belongs to the innermost one in which it appeared.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import CellType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stepguard.locate.evidence import MOST_OPERANDS, Invocation, measure
from stepguard.locate.operands import (
    CLEAN,
    COPIES,
    MOVES,
    TESTS,
    UNINITIALISED,
    Call,
    Flaws,
    Operator,
    Read,
    Stage,
    attribute,
    broken,
    describe,
    flaws,
    mask_like,
    numeric,
    reach,
    storage_key,
    summarise,
    tensors_in,
)
from stepguard.locate.source import Line, ModuleSpans, backward_caller, user_function, user_line
from stepguard.records.incident import Evidence
from stepguard.state import sharded
from stepguard.tensors.torch_private import (
    TorchDispatchMode,
    current_autograd_node,
    dispatch_mode_stack,
    next_sequence_number,
    no_dispatch_modes,
    observe_functions,
    tree_map,
)
from stepguard.tensors.values import dtype_name

MOST_POSITIONS = 16
CHECKS = ("aten._linalg_check_errors", "aten._assert_async")
"""Operations that only test the result of the operation before them."""
STATISTICS = ("running_mean", "running_var")
"""Arguments that batch norm writes without its schema saying so."""
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
HOLDERS = (dict, list, set, CellType)
Boundary = Literal["function", "operator", "module", "code"]


@dataclass(slots=True)
class CustomFunction:
    """One call of a custom autograd function, and the autograd node it made."""

    name: str
    depth: int
    """How many modules were running when it was called."""
    cls: Any = None
    number: int = 0
    """How many custom functions were called before it in this trace."""
    reads: list[Read] = field(default_factory=list)
    """What it was given; once its forward is over, what is bad of that and of what it returned."""
    gradients: tuple[Any, ...] | None = None
    """While its backward runs: what came in. None where its forward made the bad value."""


@dataclass(slots=True)
class Ran:
    """Result of a replayed micro-batch."""

    loss_finite: bool
    loss: Tensor | None = None
    parts: dict[str, float] = field(default_factory=dict)
    """Named parts of the loss."""
    bad_gradients: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        return self.loss_finite and not self.bad_gradients


class ReachedError(BaseException):
    """Raised in the operation to stop at. A BaseException: the user's handlers do not catch it."""


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Use as a context around the replayed forward, backward or update; then ask `maker_of`."""

    alone = True
    """The other ranks do not replay: a real collective would wait for them for ever."""

    def __init__(self, modules: ModuleSpans, stage: Stage = "forward") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules = modules
        self.stage: Stage = stage
        self.ran = Ran(loss_finite=True)
        """What came of the traced run."""
        self.micro_batch = 0
        self.calls: list[Call] = []
        self.raised_in: str | None = None
        """The operation that raised an exception."""
        self.last: int | None = None
        """Number of the call after which ReachedError is raised."""
        self.lines: dict[int, Line] = {}
        """The user's line that created the autograd node of this number."""
        self.owners: dict[int, Call] = {}
        """The forward call that created the autograd node of this number."""
        self.measures_reach = False
        """Note the largest magnitude of every result as well."""
        self.unseen: set[str] = set()
        """Operators whose results could not be tested."""
        self.fault: Exception | None = None
        """What the last test of an operation raised that failed."""
        self.autocast: str | None = None
        """The first dtype that autocast computed in, as it was when a module was called."""
        self.local_collectives = False
        """A collective was answered with this rank's own values."""
        self._makers: dict[int, Call] = {}
        """The call that wrote the memory at an address. torch reuses addresses of freed memory: the
        next operation that writes there takes over."""
        self._bad_number: Call | None = None
        """Maker of the last bad value that was read as a Python number."""
        self._last_sequence = -1
        self._measured = 0
        self._kept = 0
        """Operations whose tensors are kept, to be run again by another path."""
        self._exact_left = 20_000_000
        """Elements that may be compared position by position; beyond, whole tensors are."""
        self._poisoned_nodes: set[int] = set()
        """Numbers of the autograd nodes in which the gradient went bad."""
        self._count = 0
        """Custom functions that were called."""
        self._functions: list[CustomFunction] = []
        """Custom functions whose forward is running, innermost last."""
        self._nodes: dict[int, CustomFunction] = {}
        """The custom function behind the autograd node of this number."""
        self._exchanged: set[int] = set()
        """Memory that a collective wrote: with values of other ranks, which no operation shows."""
        self._undo: list[Callable[[], None]] = []
        modules.observer = self

    def __enter__(self) -> Any:
        self._undo.append(observe_functions(self._run_function))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._undo.pop()()

    def store(self, name: str, tensor: Tensor) -> Call:
        """Make a tensor known that existed before the replay."""
        call = Call(index=-1, op=name, stage="stored", numeric=numeric(tensor))
        if call.numeric:
            call.out = flaws(tensor)
            self._note_reach(call, tensor)
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
        if func.namespace in sharded.NAMESPACES:
            if self.alone:
                self.local_collectives = True
                result = sharded.alone(func, args, kwargs)
            else:
                result = func(*args, **kwargs)
            self._carefully(func.namespace, self._exchange, func, args, result)
            return result
        name = str(func._overloadpacket)
        invocation = self._try(name, self._inspect, func, args, kwargs)
        try:
            result = func(*args, **kwargs)
        except Exception:
            self.raised_in = name
            if name in CHECKS:
                behind = [call.op for call in self.calls if call.op not in COPIES]
                self.raised_in = behind[-1] if behind else None
            raise
        if invocation is not None:
            self._try(name, self._record, invocation, result)
        return result

    def _inspect(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Invocation | None:
        """Note what goes in, before the operation runs; None if the operation is not recorded."""
        operator = describe(func)
        if operator.name == "aten._local_scalar_dense":
            # `.item()`: a bad number that is used afterwards comes from this tensor.
            maker = self.maker_of(args[0])
            if maker is not None and maker.out and numeric(args[0]) and flaws(args[0]):
                self._bad_number = maker
        if operator.views or operator.name in TESTS:
            return None
        reads = []
        numbers = []
        copies: dict[int, Tensor] = {}
        for name, value in operator.entries(args, kwargs):
            if not isinstance(value, Tensor):
                numbers.append((name, float(value)))
                continue
            read = self._read(name, value, operator)
            reads.append(read)
            if operator.writes(name) and operator.reads(name) and numeric(value):
                # It is overwritten, and may be measured later.
                read.overwritten = value
                read.tensor = copies[id(value)] = value.detach().clone()

        def kept(value: Any) -> Any:
            return copies.get(id(value), value)

        if copies:
            args, kwargs = tree_map(kept, args), tree_map(kept, kwargs)
        return Invocation(operator, func, args, kwargs, reads, numbers)

    def _read(self, name: str, tensor: Tensor, operator: Operator | None = None) -> Read:
        """Describe what an operator, or else a function or module, is given."""
        maker = self.maker_of(tensor)
        if maker is None and operator is not None:
            maker = self._unknown(tensor)
        maker = maker or self.store("constant", tensor)
        read = Read(name, tensor, maker)
        unwritten = maker.uninitialised and operator is not None
        if (maker.out or unwritten) and numeric(tensor):
            # Some of the maker's memory is bad; the part that is read here may not be.
            if operator is None or operator.reads(name):
                read.flaws = flaws(tensor)
            if read.flaws and unwritten:
                read.maker = self._never_written(tensor, read.flaws, maker)
        return read

    def _unknown(self, tensor: Tensor) -> Call:
        """Make a tensor known that no operation made."""
        if self._innermost_function() is not None and numeric(tensor):
            # What it was given is known, so this was made inside, from NumPy for instance.
            found = flaws(tensor)
            if found:
                return self._blame_running(tensor, found, "")
        call = self.store("constant", tensor)
        # What the user's loop makes, outside every module, is its data.
        inside = self.modules.current is not None or current_autograd_node() is not None
        if call.first_bad and inside and tensor.dim() > 0 and _made_just_now(tensor):
            return self._blame_running(tensor, call.out, "a hook")
        return call

    def _never_written(self, tensor: Tensor, found: Flaws, maker: Call) -> Call:
        """Blame what left bad values in memory that no operation wrote."""
        unchanged = maker.fresh is None or maker.fresh == _checksum(tensor)
        function = self._innermost_function()
        inside = function is not None or (maker.stage == "backward" and maker.function is not None)
        if unchanged and not inside:
            maker.out = found
            maker.first_bad = True
            return maker
        made_by = _cpp_function(_node_name(tensor))
        reads: list[Read] = []
        if function is not None:
            made_by, reads = function.name, function.reads
        kind: Boundary = "code"
        if inside or made_by:
            kind = "function"
        name = made_by or maker.function or maker.op
        function = function or self._nodes.get(maker.sequence)
        call = self._opaque(tensor, found, kind, name, function, reads)
        if maker.stage != "backward" or call.sequence != maker.sequence:
            # The operation that allocated it filled it, not the one that reads it now.
            call.stage = maker.stage
            call.module = maker.module
            call.node = maker.node
            call.sequence = maker.sequence
            call.line = maker.line
        return call

    def _record(self, invocation: Invocation, result: Any) -> None:
        """Add a call for an operation that has run, and test what it gave."""
        operator = invocation.operator
        call = self._new_call(operator.name)
        _note_parents(call, invocation.used)
        call.selects = operator.selects((read.name, read.tensor) for read in invocation.reads)
        call.pointwise = operator.pointwise
        call.number = operator.bad_number(invocation.numbers)
        results = _results(invocation, result)
        call.numeric = any(map(numeric, results))
        if operator.custom:
            call.evidence |= Evidence(opaque="operator")
        if operator.custom and self._functions:
            # The function that torch made for the backward of an operator.
            self._functions[-1].name = operator.name
        vanished = [number for _, number in invocation.numbers if 0 < abs(number) < 2.0**-25]
        if vanished and results and results[0].dtype is torch.float16:
            # A constant that is 0 in the results' dtype, as 1e-8 is.
            call.rounded_to_zero = vanished[0]
        if operator.name in UNINITIALISED and results:
            self._allocated(call, results[0])
        for position, tensor in enumerate(results):
            self._test_result(call, invocation, position, tensor)
        if self.last is not None and call.index >= self.last:
            raise ReachedError

    def _allocated(self, call: Call, tensor: Tensor) -> None:
        """Only reading uninitialised memory can be a mistake: it holds whatever was there."""
        call.uninitialised = True
        call.fresh = _checksum(tensor)
        function = self._innermost_function() or self._nodes.get(call.sequence)
        name = _cpp_function(call.node)
        if function is not None:
            name = function.name
        call.function = name or user_function()

    def _test_result(
        self, call: Call, invocation: Invocation, position: int, tensor: Tensor
    ) -> None:
        found = CLEAN
        if numeric(tensor) and not call.uninitialised:
            found = flaws(tensor)
            self._note_reach(call, tensor)
        foreach = invocation.operator.foreach
        if found and foreach and not call.first_bad:
            self._attribute(call, invocation.only(position), tensor, found)
        elif found and not call.out:
            self._attribute(call, invocation, tensor, found)
        self._remember_maker(tensor, call, found)

    def _note_reach(self, call: Call, tensor: Tensor) -> None:
        if self.measures_reach:
            call.reach = max(call.reach, reach(tensor))

    def _new_call(self, name: str) -> Call:
        """Add a call with its stage, module, autograd node and line."""
        call = Call(index=len(self.calls), op=name, stage=self.stage)
        self.calls.append(call)
        call.module = self.modules.current
        node: Any = current_autograd_node()
        if node is None:
            call.line = user_line()
        else:
            call.line, recomputed = backward_caller()
            if recomputed:
                # A checkpointed block computes its forward again inside a backward node.
                call.stage = "forward"
                call.evidence = Evidence(recomputed=True)
            else:
                call.node = node.name()
                if call.module is None:
                    call.stage = "backward"
                    call.sequence = node._sequence_nr()
                    return call
                # A module called autograd.grad in its forward (gradient penalty, forces).
                call.stage = "forward"
        # Which autograd node did the operation create? The backward leads to it by its number.
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
        return call

    def _attribute(self, call: Call, invocation: Invocation, out: Tensor, found: Flaws) -> None:
        """Fill in where the bad elements of `out` come from."""
        operator, used = invocation.operator, invocation.used
        for read in used:
            # Was a tensor that was good when it was made bad when it was read?
            retest = numeric(read.tensor) and storage_key(read.tensor) not in self._exchanged
            if retest and not read.flaws and read.name not in STATISTICS:
                read.flaws = flaws(read.tensor)
                if read.flaws:
                    read.maker = self._blame_running(read.tensor, read.flaws, read.maker.op)
        # A comparison by position is charged to the budget of elements.
        cost = out.numel() * (1 + sum(bool(read.flaws) for read in used))
        exact = operator.pointwise and cost <= self._exact_left
        self._exact_left -= cost * exact
        numbers = [number for _, number in invocation.numbers]
        call.out = found
        where = attribute(call, used, numbers, out, exact=exact)
        if call.number is not None and self._bad_number is not None:
            # `.item()` read the number from a tensor.
            call.causes = (*call.causes, self._bad_number)
            call.number = None
            call.intended_inf = call.first_bad = False
        call.shape = tuple(out.shape)
        shrinks = any(out.numel() < read.tensor.numel() for read in used)
        call.reduces = shrinks and call.op not in MOVES
        self._note_poisoned_node(call)
        self._measure(call, replace(invocation, call=call, out=out, where=where))

    def _measure(self, call: Call, bad_op: Invocation) -> None:
        """Measure the operands of a call that may be part of the explanation."""
        # One autograd node runs several operations; any of them may show why it went bad.
        in_bad_node = call.stage == "backward" and call.sequence in self._poisoned_nodes
        on_purpose = call.intended_inf and (call.reduces or call.number is not None)
        if not self._may_measure(call.first_bad or in_bad_node or on_purpose):
            return
        call.rows, call.bad_positions = _positions(bad_op.out, bad_op.where)
        measure(bad_op)
        operator = bad_op.operator
        ordinary = operator.pointwise or operator.foreach or call.number is not None
        if not call.first_bad or ordinary or any(read.flaws for read in bad_op.reads):
            return
        # A kernel may be run again by another path: the tensors of a few are kept in memory.
        self._kept += 1
        if self._kept <= 4:
            call.kernel = bad_op

    def _may_measure(self, telling: bool) -> bool:
        # First bad values whose operands are measured; a torrent of them tells nothing more
        telling = telling and self._measured < 32
        self._measured += telling
        return telling

    def _note_poisoned_node(self, call: Call) -> None:
        # A saved tensor of the forward that was bad already makes the gradient bad here.
        enters_here = any(cause.stage != "backward" for cause in call.causes)
        if call.stage == "backward" and (call.first_bad or enters_here):
            self._poisoned_nodes.add(call.sequence)

    def _remember_maker(self, tensor: Tensor, call: Call, found: Flaws) -> None:
        key = storage_key(tensor)
        old = self._makers.get(key)
        if old is not None and (old.out or old.uninitialised) and _is_part(tensor):
            # The rest of the memory is still bad, so its maker must stay known.
            if not found and old.out:
                return
            if not found:
                # The rest of the memory is still unwritten.
                call.uninitialised = True
                call.function = old.function
            elif call.out and old is not call and old.harmful and old not in call.causes:
                call.causes = (*call.causes, old)
        self._makers[key] = call

    # --- values that no operation made

    @property
    def _active(self) -> bool:
        """True on the thread, and at the time, at which operations are traced."""
        return any(mode is self for mode in dispatch_mode_stack())

    def _innermost_function(self) -> CustomFunction | None:
        """Return the custom function that is running, unless a module runs inside it."""
        if self._functions:
            function = self._functions[-1]
            return function if self.modules.depth == function.depth else None
        node = current_autograd_node()
        if node is None or self.modules.depth:
            return None
        return self._nodes.get(node._sequence_nr())

    def _run_function(self, cls: Any, apply: Any, args: Any, kwargs: Any) -> Any:
        """Run the forward of a custom autograd function, and test what goes in and comes out."""
        if not self._active:
            return apply(*args, **kwargs)
        name = cls.__name__.removesuffix("Generated")
        function = CustomFunction(name, self.modules.depth, cls, self._count)
        self._count += 1
        self._carefully(function.name, self._settle, args, function)
        self._functions.append(function)
        try:
            outputs = apply(*args, **kwargs)
        finally:
            self._functions.pop()
        self._carefully(function.name, self._leave_function, function, args, outputs)
        return outputs

    def _leave_function(self, function: CustomFunction, args: Any, outputs: Any) -> None:
        for tensor in (*tensors_in(outputs), *tensors_in(args)):
            self._test(tensor, "function", function.name, function.reads, function)
        saved = [*function.reads, *self._read_all(outputs)]
        # The backward may have saved them; good ones must not be kept in memory.
        function.reads = [read for read in saved if read.flaws]
        for tensor in tensors_in(outputs):
            node: Any = tensor.grad_fn
            if getattr(node, "_forward_cls", None) is None:
                continue
            sequence = node._sequence_nr()
            line = user_line()
            if line is not None:
                self.lines[sequence] = line
            for read in function.reads:
                if read.maker.op == function.name:
                    self.owners[sequence] = read.maker
            if sequence not in self._nodes:
                self._nodes[sequence] = function
                node.register_prehook(partial(setattr, function, "gradients"))
                node.register_hook(partial(self._leave_node, function))
        self._last_sequence = next_sequence_number()

    def _leave_node(self, function: CustomFunction, grad_inputs: Any, grad_outputs: Any) -> None:
        """Test what the backward of the function returned."""

        def test() -> None:
            reads = [*self._read_all(grad_outputs), *function.reads]
            for tensor in tensors_in(grad_inputs):
                self._test(tensor, "function", function.name, reads, function)

        if self._active:
            self._carefully(function.name, test)
        # the gradients of a whole backward must not be kept in memory
        function.gradients = None

    def enter_module(self, args: Any) -> None:
        if self._active:
            for tensor in tensors_in(args):
                device = tensor.device.type
                if self.autocast is None and torch.is_autocast_enabled(device):
                    self.autocast = dtype_name(torch.get_autocast_dtype(device))
            self._carefully("forward", self._settle, args)

    def leave_module(self, module: Any, args: Any, output: Any) -> None:
        """Test what a module returned: code in its forward may have made it without operations."""
        name = f"{type(module).__name__}.forward"

        def test() -> None:
            given = {storage_key(tensor) for tensor in tensors_in(args)}
            reads = self._read_all([t for t in tensors_in(args) if self.maker_of(t) is not None])
            for tensor in (*tensors_in(args), *tensors_in(output)):
                if self.maker_of(tensor) is not None or storage_key(tensor) not in given:
                    self._test(tensor, "module", name, reads)

        if self._active:
            self._carefully(name, test)

    def _settle(self, values: Any, function: CustomFunction | None = None) -> None:
        """Blame the code that runs now for bad values that appeared in memory known as good."""
        for tensor in tensors_in(values):
            maker = self.maker_of(tensor)
            if maker is not None and not maker.uninitialised:
                self._test(tensor, "code", user_function() or maker.op, [])
        if function is not None:
            function.reads = self._read_all(values)

    def settle_gradients(self, gradients: Iterable[Tensor]) -> None:
        """Blame the operation that allocated a bad gradient which no operation read again."""
        with no_dispatch_modes():
            for tensor in gradients:
                maker = self.maker_of(tensor)
                if maker is not None and maker.uninitialised and not maker.out and numeric(tensor):
                    found = flaws(tensor)
                    if found:
                        self._never_written(tensor, found, maker)

    def _blame_running(self, tensor: Tensor, found: Flaws, otherwise: str) -> Call:
        """Blame the code that runs now: a custom function, else the user's."""
        function = self._innermost_function()
        if function is None:
            return self._opaque(tensor, found, "code", user_function() or otherwise)
        return self._opaque(tensor, found, "function", function.name, function, function.reads)

    def _test(
        self,
        tensor: Tensor,
        kind: Boundary,
        name: str,
        reads: list[Read],
        function: CustomFunction | None = None,
    ) -> None:
        """Record a call for bad values of this tensor that no operation is known to have made."""
        maker = self.maker_of(tensor)
        known = maker is not None and bool(maker.out)
        if known or not numeric(tensor) or storage_key(tensor) in self._exchanged:
            return
        found = flaws(tensor)
        if not found:
            return
        made_by = _cpp_function(_node_name(tensor)) if kind == "module" else None
        if made_by is not None:
            self._opaque(tensor, found, "function", made_by, None, reads)
            return
        call = self._opaque(tensor, found, kind, name, function, reads)
        allocated = kind == "module" and maker is not None and maker.uninitialised
        if allocated and maker is not None and maker.module == call.module:
            # Better than the line that called the module: where the memory was allocated.
            call.line = maker.line

    def _opaque(
        self,
        tensor: Tensor,
        found: Flaws,
        kind: Boundary,
        name: str,
        function: CustomFunction | None = None,
        reads: Sequence[Read] = (),
    ) -> Call:
        """Record that something made this value where no operation is visible."""
        call = self._new_call(name)
        if function is not None:
            call.kernel = replace(function, reads=[])
        _note_parents(call, reads)
        call.out = found
        attribute(call, reads, [], tensor, exact=False)
        if not call.causes and not found.nan and mask_like(tensor):
            call.intended_inf, call.first_bad = True, False
        call.shape = tuple(tensor.shape)
        self._note_poisoned_node(call)
        call.evidence |= Evidence(opaque=kind)
        if self._may_measure(call.first_bad):
            call.rows, call.bad_positions = _positions(tensor, None)
            call.inputs = tuple(summarise(read.name, read.tensor) for read in reads[:MOST_OPERANDS])
            call.output = summarise("out", tensor)
        self._makers[storage_key(tensor)] = call
        return call

    def _read_all(self, values: Any) -> list[Read]:
        """Describe what a function was given; what no operation made becomes known."""
        tensors = tensors_in(values)
        return [self._read(f"input {n}", tensor) for n, tensor in enumerate(tensors)]

    def _exchange(self, func: Any, args: Any, result: Any) -> None:
        """Make known what a collective wrote: operations of other ranks made it."""
        tensors = [*tensors_in(args), *tensors_in(result)]
        makers = [self.maker_of(tensor) for tensor in tensors]
        bad = tuple(maker for maker in makers if maker is not None and maker.out)
        for tensor, maker in zip(tensors, makers, strict=True):
            self._exchanged.add(storage_key(tensor))
            if maker is None or maker.uninitialised:
                call = self._new_call(str(func._overloadpacket))
                call.numeric = numeric(tensor)
                # Not tested: a collective that is under way has not written it yet.
                call.out = bad[0].out if bad and call.numeric else CLEAN
                call.causes = call.flawed = bad
                self._makers[storage_key(tensor)] = call

    def _try(self, name: str, test: Callable[..., Any], *args: Any) -> Any:
        """Exotic tensors must not stop the user's code: what cannot be tested is named."""
        try:
            return test(*args)
        except Exception as fault:
            self.unseen.add(name)
            self.fault = fault

    def _carefully(self, name: str, test: Callable[..., object], *args: Any) -> None:
        """Test what is not an operation: not traced, and a fault ends no trace."""
        before = self.fault
        with torch.no_grad(), no_dispatch_modes():
            self._try(name, test, *args)
        self.fault = before


def _is_part(tensor: Tensor) -> bool:
    """True if the tensor is a view of some of its memory only."""
    try:
        return tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        # sparse and other tensors without one storage: not a view of anything
        return False


def _note_parents(call: Call, reads: Sequence[Read]) -> None:
    call.parents = tuple(read.maker for read in reads)
    call.flawed = tuple(read.maker for read in reads if read.flaws)


def _results(invocation: Invocation, result: Any) -> list[Tensor]:
    """List what the operation wrote in place and what it returned, each tensor once."""
    results: dict[int, Tensor] = {}
    for read in invocation.reads:
        if invocation.operator.writes(read.name):
            tensor = read.tensor if read.overwritten is None else read.overwritten
            results[id(tensor)] = tensor
    return list((results | {id(one): one for one in tensors_in(result)}).values())


def _made_just_now(tensor: Tensor) -> bool:
    """Does nothing but running code hold it? From NumPy, C or a buffer: no operation shows it.

    A constant of the program is in its globals, an attribute, a list or a closure.
    """
    for one in gc.get_referrers(tensor):
        package = type(one).__module__.partition(".")[0]
        if type(one) in HOLDERS or package not in ("builtins", "stepguard"):
            return False
    return True


def _node_name(tensor: Tensor) -> str | None:
    return None if tensor.grad_fn is None else tensor.grad_fn.name()


def _cpp_function(node: str | None) -> str | None:
    """`Scan` for `torch::autograd::CppNode<Scan>`, the node of a function written in C++."""
    found = re.fullmatch(r".*CppNode<(.+)>", node or "")
    return None if found is None else found[1].rpartition("::")[2]


def _checksum(tensor: Tensor) -> int | None:
    """Sum the memory of a tensor as whole numbers, to see later whether anybody wrote it."""
    word = WORDS.get(tensor.element_size())
    # A subclass, such as a DTensor, is a wrapper without memory of its own.
    if word is None or type(tensor) not in (Tensor, nn.Parameter):
        return None
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    memory = tensor.untyped_storage()
    words = torch.empty(0, dtype=word, device=tensor.device)
    words.set_(memory)
    return int(words.sum(dtype=torch.int64))


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
