"""A dispatch mode that watches a healthy step: every operation runs once, as it would have.

Unlike the tracer of bad steps (locate/tracer.py) it keeps no graph and never reads a value: each
result leaves a few numbers on its device, which are read when the step is over.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stepguard.locate.calls import aten
from stepguard.locate.finite import numeric, plain, storage_key
from stepguard.locate.modules import ModuleSpans
from stepguard.locate.operators import TAKES_INFINITY, TESTS, UNINITIALISED, Operator, describe
from stepguard.locate.shared_tracer import leave
from stepguard.look.layers import LayerFacts
from stepguard.look.loss_facts import LossFacts
from stepguard.look.statistics import Numbers, rounded_to_zero, vector_of
from stepguard.records.look import Stage
from stepguard.state import faked_collectives
from stepguard.tensors.torch_private import TorchDispatchMode, current_autograd_node

MOST_RESULTS = 20_000
"""Results that are measured; a validation between two updates must not fill the memory."""
CONVERSIONS = aten("_to_copy copy_")
DISPATCH_SECONDS = 5e-6
"""What passing one operation through a mode costs, besides the statistics: measured on a CPU."""


@dataclass(slots=True)
class ObservedResult:
    """One result of one operation."""

    op: str
    module: str
    stage: Stage
    dtype: torch.dtype
    vector: int
    """Number of its statistics."""
    parents: tuple[int, ...]
    """Numbers of the results it was made of."""
    may_hold_infinity: bool = False
    """An infinity is an ordinary argument of this operation."""
    conversion: int | None = None
    """Number of the vector that counts what became 0 in a conversion."""


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches the operations between `start` and `stop`. A fault of its own ends the look only."""

    def __init__(
        self,
        roots: Mapping[str, nn.Module],
        trained: Iterable[int] = (),
        owned: Iterable[int] = (),
    ) -> None:
        """`trained`: identities of what this guard's optimizer updates, `owned`: of what any
        optimizer of the process does.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules = ModuleSpans(dict(roots))
        self.numbers = Numbers()
        self.seen: list[ObservedResult] = []
        self.layers = LayerFacts(self.numbers)
        known = {id(one) for root in roots.values() for one in root.parameters()}
        self.loss = LossFacts(self.numbers, set(trained), known | {*trained, *owned})
        self.fault: Exception | None = None
        self.layer_fault: Exception | None = None
        """Why nothing more is noted of layers; everything else is measured on."""
        self.paused = False
        """The guard does work of its own, which is not part of the step."""
        self.backward_begins: Callable[[], None] | None = None
        """Called at the first operation of every backward pass."""
        self.seconds = 0.0
        self._in_backward = False
        self._last: dict[int, int] = {}
        """Who wrote the memory at this address last."""
        self._process = os.getpid()
        self._running = False

    @property
    def on_the_stack(self) -> bool:
        """True while torch hands it every operation."""
        return self._running

    def start(self) -> None:
        """Begin to watch, or go on after `stop`."""
        self.paused = False
        self._running = True
        self.modules.__enter__()
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Watch no more; what was seen stays. Call it again if it was called inside a backward."""
        self.paused = True
        # The engine puts the modes of its beginning back when a backward pass ends.
        if self._running and current_autograd_node() is None:
            self._running = False
            leave(self)
            self.modules.__exit__()

    def store(self, name: str, tensor: Tensor) -> None:
        """Make a tensor known that no operation of the step made."""
        self._add(name, "", "stored", tensor, (), may_hold_infinity=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._idle(func):
            return func(*args, **kwargs)
        operator = describe(func)
        before = self._before(operator, args, kwargs)
        result = func(*args, **kwargs)
        if before is not None:
            self._after(operator, before, args, kwargs, result)
        return result

    def _idle(self, func: Any) -> bool:
        if self.paused or self.fault is not None or len(self.seen) >= MOST_RESULTS:
            return True
        # A worker process of a data loader inherits the mode.
        if os.getpid() != self._process:
            return True
        return func.namespace in faked_collectives.NAMESPACES

    def _before(self, operator: Operator, args: Any, kwargs: Any) -> list[Tensor] | None:
        """The tensors that go in; None where the operation makes no values."""
        began = time.thread_time()
        try:
            if operator.views or operator.name in TESTS or operator.name in UNINITIALISED:
                return None
            self._notice_backward()
            entries = operator.entries(args, kwargs)
            tensors = [entry.value for entry in entries if isinstance(entry.value, Tensor)]
            # before it runs: an operation in place overwrites what it reads
            self._note_layer(self.layers.before, operator, args, kwargs)
            if self._stage() == "forward":
                self._note_loss(self.loss.before, operator, args, kwargs)
            return tensors
        except Exception as fault:
            self.fault = fault
            return None
        finally:
            self.seconds += time.thread_time() - began

    def _after(
        self, operator: Operator, given: list[Tensor], args: Any, kwargs: Any, result: Any
    ) -> None:
        began = time.thread_time()
        try:
            parents = self._parents(operator, given)
            module = self._module()
            stage = self._stage()
            results = _tensors(result) or [t for t in given if t is _written(operator, args)]
            for tensor in results:
                known = operator.name in TAKES_INFINITY
                self._add(operator.name, module, stage, tensor, parents, may_hold_infinity=known)
            if operator.name in CONVERSIONS and results:
                self._note_conversion(given[-1], results[0])
            if stage == "forward":
                self._note_layer(self.layers.after, operator, args, kwargs, results)
                made = _tensors(result) or results
                self._note_loss(self.loss.after, operator, args, kwargs, made)
        except Exception as fault:
            self.fault = fault
        finally:
            self.seconds += time.thread_time() - began + DISPATCH_SECONDS

    def _note_layer(self, note: Callable[..., None], *given: Any) -> None:
        if self.layer_fault is None:
            try:
                note(*given, self._module())
            except Exception as fault:
                self.layer_fault = fault

    def _note_loss(self, note: Callable[..., None], *given: Any) -> None:
        if self.layer_fault is None:
            try:
                note(*given, self.modules.current)
            except Exception as fault:
                self.layer_fault = fault

    def _notice_backward(self) -> None:
        backward = self._stage() == "backward"
        if backward and not self._in_backward and self.backward_begins is not None:
            self.backward_begins()
        self._in_backward = backward

    def _parents(self, operator: Operator, given: list[Tensor]) -> tuple[int, ...]:
        parents = []
        for tensor in given:
            if not numeric(tensor):
                continue
            key = storage_key(tensor)
            if key not in self._last:
                self.store("constant", tensor)
            if key in self._last:
                parents.append(self._last[key])
        return tuple(parents)

    def _add(
        self,
        op: str,
        module: str,
        stage: Stage,
        tensor: Tensor,
        parents: tuple[int, ...],
        *,
        may_hold_infinity: bool,
    ) -> None:
        if not numeric(tensor):
            return
        vector = vector_of(tensor)
        if vector is None:
            return
        number = self.numbers.add(vector)
        dtype = plain(tensor).dtype
        self._last[storage_key(tensor)] = len(self.seen)
        self.seen.append(
            ObservedResult(op, module, stage, dtype, number, parents, may_hold_infinity)
        )

    def _note_conversion(self, before: Tensor, after: Tensor) -> None:
        """Count what a narrower dtype rounds to 0."""
        if not self.seen or not numeric(before) or not numeric(after):
            return
        narrower = torch.finfo(after.dtype).tiny > torch.finfo(before.dtype).tiny
        if narrower and before.shape == after.shape:
            self.seen[-1].conversion = self.numbers.add(rounded_to_zero(before, after))

    def _module(self) -> str:
        node = current_autograd_node()
        if node is None or self.modules.current is not None:
            return self.modules.current or ""
        return self.modules.created(node._sequence_nr()) or ""

    def _stage(self) -> Stage:
        if current_autograd_node() is None or self.modules.current is not None:
            return "forward"
        return "backward"


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, list | tuple):
        return [item for item in result if isinstance(item, Tensor)]
    return []


def _written(operator: Operator, args: Any) -> Any:
    """The argument that an operation without a result writes."""
    if not operator.written or not args:
        return None
    return args[0]
