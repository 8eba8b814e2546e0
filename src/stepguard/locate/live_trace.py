"""Trace the user's own step as it runs: forward, loss and backward, with every line.

For a watched loop whose bad value is made where no replay reaches. Every operation and every
collective runs exactly once, as it would have, and the random numbers are left alone.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from stepguard.diagnose.source_line import name_operands
from stepguard.locate import evidence as bad_state
from stepguard.locate import replay_state as batches
from stepguard.locate.blame import FirstBad, blame_gradients, blame_loss
from stepguard.locate.evidence import Invocation
from stepguard.locate.operands import Call, Flaws, numeric, plain, summarise
from stepguard.locate.replay import Ran, Replayer, Traced
from stepguard.locate.replay_state import KEPT, bad_numbers, kept_tensors
from stepguard.locate.source import Line, ModuleSpans, with_source
from stepguard.locate.tracer import EXACT_ELEMENTS, Tracer
from stepguard.records.incident import Evidence, Origin, Phase, Reading, with_evidence
from stepguard.state import sharded
from stepguard.state.batch import Step
from stepguard.tensors.names import named_buffers, named_parameters
from stepguard.tensors.torch_private import TorchDispatchMode, dispatch_mode_stack

# --- Write down as an Origin record what the walk over a trace found.


PHASES: dict[str, Phase] = {
    "batch": "input",
    "param": "state",
    "buffer": "state",
    "opt": "state",
    "attr": "state",
}
"""Phase of a stored tensor, by the kind that its name begins with."""


def origin_of(found: FirstBad, traced: Traced, replayer: Replayer) -> Origin:
    """Build the record, still without samples."""
    call = found.call
    if call.stage == "stored":
        return _stored_origin(found, traced, replayer)
    at = call
    if call.uninitialised and found.consumer is not None:
        # Reading uninitialised memory is the mistake, not allocating it.
        at = found.consumer
    evidence = call.evidence | found.evidence | _surroundings(replayer.step, traced)
    evidence |= Evidence(
        uninitialised=call.uninitialised,
        inner_gradient=call.node is not None and call.stage == "forward",
    )
    if call.number is not None:
        for name, _ in bad_numbers(replayer.step.named_roots()):
            # An attribute of a module: the operation was probably given it.
            evidence |= Evidence(attribute=name)
            break
    origin = Origin(
        step=replayer.step.index,
        phase=_phase(at, traced.tracer),
        module=_module(at, traced.tracer),
        op=call.op,
        node=call.node,
        micro_batch=traced.micro_batch,
        inputs=call.inputs,
        output=call.output,
        method="replay",
        reproduced=True,
        evidence=evidence,
    )
    return with_source(origin, line_of(at, traced.tracer))


def _stored_origin(found: FirstBad, traced: Traced, replayer: Replayer) -> Origin:
    """Build the record of a tensor that was bad before the step, placed at its first consumer."""
    name = found.call.op
    kind = name.partition(":")[0]
    origin = Origin(
        step=replayer.step.index,
        phase=PHASES.get(kind, "loss"),
        method="replay",
        reproduced=True,
        evidence=found.evidence | _surroundings(replayer.step, traced),
    )
    if found.consumer is not None:
        origin = _at_consumer(origin, found.consumer, traced.tracer)
        if kind not in PHASES:
            origin = replace(origin, phase=_phase(found.consumer, traced.tracer))
    tensor = _stored_tensor(name, replayer, traced.micro_batch)
    if tensor is not None:
        operand = summarise(name, tensor)
        origin = with_evidence(origin, bad_state.bad_elements(tensor, operand))
        origin = replace(origin, inputs=(operand,))
    if origin.phase == "input":
        origin = replace(origin, micro_batch=traced.micro_batch)
    if kind in PHASES and not name.startswith(KEPT):
        return replace(origin, tensor=name)
    origin = with_evidence(origin, Evidence(constant="nan" if found.call.out.nan else "inf"))
    if name.startswith(KEPT):
        origin = with_evidence(origin, Evidence(attribute=name.removeprefix(KEPT)))
    return origin


def huge_origin(origin: Origin, found: FirstBad, traced: Traced, replayer: Replayer) -> Origin:
    """Name the finite but absurd tensor that made what overflowed, where it first did so."""
    name = found.call.op
    assert found.consumer is not None
    tensor = _stored_tensor(name, replayer, traced.micro_batch)
    origin = replace(
        _at_consumer(origin, found.consumer, traced.tracer),
        phase=_phase(found.consumer, traced.tracer),
        tensor=name,
        inputs=() if tensor is None else (summarise(name, tensor),),
        output=None,
        micro_batch=traced.micro_batch,
        method="replay",
        reproduced=True,
    )
    if name.startswith("param:"):
        return with_evidence(origin, Evidence(huge_parameter=name))
    return with_evidence(origin, Evidence(huge_buffer=name))


def _at_consumer(origin: Origin, consumer: Call, tracer: Tracer) -> Origin:
    origin = replace(
        origin,
        module=_module(consumer, tracer),
        op=consumer.op,
        node=consumer.node,
        inputs=consumer.inputs,
    )
    return with_source(origin, line_of(consumer, tracer))


def _stored_tensor(name: str, replayer: Replayer, micro: int) -> Tensor | None:
    kind, _, path = name.partition(":")
    if kind == "param":
        return replayer.parameters.get(path)
    if kind == "buffer":
        return replayer.buffers.get(path)
    if name.startswith(KEPT):
        return dict(kept_tensors(replayer.step.named_roots())).get(name)
    return dict(batches.named_tensors(replayer.step.micro_batches[micro])).get(name)


def _surroundings(step: Step, traced: Traced) -> Evidence:
    """Facts on the replay as a whole."""
    sizes = []
    for _, tensor in batches.named_tensors(step.micro_batches[traced.micro_batch]):
        if numeric(tensor) and tensor.numel():
            sizes.append(float(plain(tensor).nan_to_num(0.0, 0.0, 0.0).abs().max()))
    return Evidence(
        scale=float(step.scale) if step.scale != 1.0 else None,
        autocast=traced.tracer.autocast,
        local_collectives=traced.tracer.local_collectives,
        unseen=tuple(sorted(traced.tracer.unseen)),
        batch_max=max(sizes, default=None),
    )


def _phase(call: Call, tracer: Tracer) -> Phase:
    if call.stage in ("backward", "optimizer"):
        if call.stage == "backward":
            return "backward"
        return "optimizer"
    if tracer.modules.belongs_to_model(call.module):
        return "forward"
    return "loss"


def _module(call: Call, tracer: Tracer) -> str | None:
    if call.stage == "backward":
        return tracer.modules.created(call.sequence)
    return call.module


def line_of(call: Call, tracer: Tracer) -> Line | None:
    """Return the user's line; in the backward, of the forward behind it or behind its parents."""
    seen: set[int] = set()
    queue = [call]
    while queue:
        one = queue.pop(0)
        line = one.line or tracer.lines.get(one.sequence)
        if line is not None:
            return line
        seen.add(id(one))
        for parent in one.parents:
            if id(parent) not in seen and parent.stage != "stored":
                queue.append(parent)
    return None


# --- The one live tracer of the process, shared by all guards: several cost no more than one.


MOST_CALLS = 200_000
"""Operations that are remembered; a long validation between two updates must not fill the memory.
"""


class LiveTracer(Tracer):  # type: ignore[no-untyped-call]
    """Traces the user's own step: a fault of the tracer ends the trace, never the step."""

    def __init__(self, modules: ModuleSpans) -> None:
        super().__init__(modules)
        self.fault: Exception | None = None
        self._process = os.getpid()

    @property
    def idle(self) -> bool:
        """True if nothing is recorded: it has failed, it is full, or this is another process."""
        if self.fault is not None or len(self.calls) >= MOST_CALLS:
            return True
        # A worker process of a data loader inherits the mode.
        return os.getpid() != self._process

    @property
    def next_index(self) -> int:
        """Number of the next call."""
        return self.forgotten + len(self.calls)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Unlike in a replay all ranks take part: collectives run as they are.
        if self.idle:
            return func(*args, **kwargs)
        if func.namespace in sharded.NAMESPACES:
            result = func(*args, **kwargs)
            self._carefully(func.namespace, self._exchange, func, args, result)
            return result
        return self._run_recorded(func, args, kwargs, (Exception,))

    def _failed(self, func: Any, fault: Exception) -> None:
        self.fault = fault

    def _attribute(self, call: Call, invocation: Invocation, out: Tensor, found: Flaws) -> None:
        # Measuring may run the operation again in a wider dtype: a random one would draw numbers.
        state = torch.get_rng_state()
        try:
            super()._attribute(call, invocation, out, found)
        finally:
            torch.set_rng_state(state)

    def enter_module(self, args: Any) -> None:
        """What a part of the model is called with was made before it, by whomever."""
        super().enter_module(args)
        if self._active and not self.idle:
            self._carefully("forward", self._read_all, args)

    def forget_before(self, first: int) -> None:
        """Drop the calls numbered below `first`."""
        dropped = [call for call in self.calls if call.index < first]
        for call in dropped:
            # Calls hold on to their parents: without this the whole past would stay alive.
            call.parents = ()
            call.flawed = ()
            call.causes = ()
        self.calls = self.calls[len(dropped) :]
        self.forgotten += len(dropped)
        self._measured = 0
        self._exact_left = EXACT_ELEMENTS
        self._exchanged.clear()
        # The memory of the dropped calls' tensors may belong to other tensors by now.
        for key, maker in list(self._makers.items()):
            if maker.stage != "stored" and maker.index < first:
                del self._makers[key]
        for number, owner in list(self.owners.items()):
            if owner.index < first:
                del self.owners[number]
                self.lines.pop(number, None)
                self._nodes.pop(number, None)
        self.modules.forget_before(min(self.owners, default=0))


class Recorder:
    """Runs the tracer while a guard has a step open and no guard does work of its own."""

    def __init__(self) -> None:
        self.spans = ModuleSpans({})
        self.tracer = LiveTracer(self.spans)
        self.kept: list[Any] = []
        """Steps that may still be asked for; each knows the number of its first call."""
        self._open: list[Any] = []
        """Steps that are being traced, one a guard."""
        self._working_guards: set[int] = set()
        self._entered = ExitStack()
        self._on = False
        self._thread = threading.get_ident()

    def follow_modules(self, roots: dict[str, nn.Module]) -> None:
        """Record calls of these modules, under keys: every guard has names of its own for them."""
        for root in roots.values():
            for module in root.modules():
                self.spans.names.setdefault(id(module), module_key(module))

    def begin(self, step: Any) -> None:
        """Trace one guard's step from here on."""
        self._open.append(step)
        self.kept.append(step)
        self.tracer.forget_before(min(one.first for one in self.kept))
        self._switch()

    def end(self, step: Any) -> None:
        """End a step. What was recorded of it stays until it is released."""
        if step in self._open:
            self._open.remove(step)
        self._switch()

    def release(self, step: Any) -> None:
        """Drop a step; the recorder goes with the last one."""
        self.end(step)
        if step in self.kept:
            self.kept.remove(step)
        global _recorder
        if not self.kept and _recorder is self:
            _recorder = None

    def set_working(self, guard: int, *, on: bool) -> bool:
        """Begin or end work of a guard's own, which is not recorded; return the state before."""
        before = guard in self._working_guards
        if on:
            self._working_guards.add(guard)
        else:
            self._working_guards.discard(guard)
        self._switch()
        return before

    @property
    def on_this_thread(self) -> bool:
        """True on the thread that made the recorder: dispatch modes belong to one thread."""
        return threading.get_ident() == self._thread

    def _switch(self) -> None:
        wanted = bool(self._open) and not self._working_guards and self.tracer.fault is None
        if wanted == self._on or not self.on_this_thread:
            return
        self._on = wanted
        if not wanted:
            self._entered.close()
            return
        self._entered.enter_context(self.spans)
        self.tracer.__enter__()
        self._entered.callback(leave, self.tracer)


_recorder: Recorder | None = None


def present_recorder() -> Recorder | None:
    """Return the recorder, if a step is being traced."""
    return _recorder


def shared_recorder() -> Recorder | None:
    """Return the recorder of the process, made where there is none; None if it cannot be used."""
    global _recorder
    if _recorder is not None and _recorder.tracer.fault is not None:
        # Its steps get no answer from it any more.
        _recorder = None
    if _recorder is None:
        # Beside another dispatch mode: two that are not nested leave each other on the stack.
        if dispatch_mode_stack():
            return None
        _recorder = Recorder()
    return _recorder if _recorder.on_this_thread else None


def module_key(module: nn.Module) -> str:
    """Name a module for all guards; each guard has a name of its own for it."""
    return f"#{id(module)}"


def leave(mode: TorchDispatchMode) -> None:
    """Take a mode off the stack wherever it is: the user's code may have entered others since."""
    stack = list(dispatch_mode_stack())
    if mode not in stack:
        return
    # torch can only pop the topmost mode: take those above off, and put them back.
    above = stack[stack.index(mode) + 1 :]
    for other in reversed(above):
        other.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    for other in above:
        other.__enter__()  # type: ignore[no-untyped-call]


# --- Trace the user's own step as it runs: forward, loss and backward, with every line.


SEEN_LIVE = "seen as it happened: the step ran under the tracer"


class OwnSpans(ModuleSpans):
    """Module spans that were recorded for all guards, with the module names of one guard."""

    def __init__(self, roots: Mapping[str, nn.Module], recorded: ModuleSpans) -> None:
        super().__init__(roots)
        self._recorded = recorded
        self._outside_model: set[str] = set()
        for prefix, root in roots.items():
            if prefix:
                self._outside_model.update(module_key(module) for module in root.modules())

    def created(self, sequence: int) -> str | None:
        return self._recorded.created(sequence)

    def belongs_to_model(self, name: str | None) -> bool:
        return name is not None and name not in self._outside_model

    def spelled(self, name: str | None) -> str | None:
        """Return the guard's own name of a module; None if it belongs to another guard's model."""
        if name is None:
            return None
        return self.names.get(int(name.removeprefix("#")))


class LiveTrace:
    """One step of a watched loop, from the end of one update to the beginning of the next."""

    def __init__(self, step: Step, recorder: Recorder) -> None:
        self._recorder = recorder
        self.tracer = recorder.tracer
        self.first = recorder.tracer.next_index
        """Number of this step's first call."""
        roots = step.named_roots()
        recorder.follow_modules(roots)
        self._roots = roots
        self._stored: list[tuple[Call, str]] = []
        """This guard's names for tensors that no operation made."""
        self._parameters = dict(named_parameters(roots))
        for name, tensor in kept_tensors(roots):
            self.tracer.store(name, tensor)
        for name, parameter in self._parameters.items():
            self._store(f"param:{name}", parameter)
        for name, buffer in named_buffers(roots):
            maker = self.tracer.maker_of(buffer)
            # The forward of an earlier step may have written it: then that is its maker.
            if maker is None or maker.stage == "stored":
                self._store(f"buffer:{name}", buffer)
        self._losses: list[Call] = []
        self._root: Call | None = None
        """Maker of what the present backward starts from."""
        self._gradients: list[Call] = []
        self._first_model_call: int | None = None

    def _store(self, name: str, tensor: Tensor) -> None:
        self._stored.append((self.tracer.store(name, tensor), name))

    def enter(self) -> None:
        """Start to record."""
        self._recorder.begin(self)

    def release(self) -> None:
        """Drop what was recorded."""
        self._recorder.release(self)

    def model_called(self, arguments: Mapping[str, Any]) -> None:
        """Name the batch: what the model is called with, unless an operation made it."""
        if self._first_model_call is None:
            self._first_model_call = self.tracer.next_index
        for name, tensor in batches.named_tensors(dict(arguments)):
            maker = self.tracer.maker_of(tensor)
            if maker is None or (maker.stage == "stored" and maker.op == "constant"):
                self._store(name, tensor)
            elif maker.op.startswith("batch"):
                # Another guard's model has been called with it.
                self._stored.append((maker, name))

    def before_backward(self, root: Tensor) -> None:
        """Note what the backward starts from: a single number is taken for the loss."""
        self._root = self.tracer.maker_of(root) if root.numel() == 1 else None
        self.tracer.stage = "backward"

    def after_backward(self, *, ours: bool) -> None:
        """Note the loss. `ours`: the backward reached this guard's parameters."""
        if ours and self._root is not None:
            self._losses.append(self._root)
        self.tracer.stage = "forward"

    def finish(self) -> None:
        """End the recording; remember who made the gradients, before the guard hides them."""
        self._recorder.end(self)
        self._gradients = []
        gradients = [plain(p.grad) for p in self._parameters.values() if p.grad is not None]
        self.tracer.settle_gradients(gradients)
        for gradient in gradients:
            maker = self.tracer.maker_of(gradient)
            if maker is not None:
                self._gradients.append(maker)

    def origin(self, step: Step, reading: Reading) -> Origin | None:
        """Locate the first harmful value; None if the trace does not show it."""
        if self.tracer.fault is not None:
            return None
        # The calls of this step, with this guard's names for modules.
        tracer: Any = copy.copy(self.tracer)
        tracer.calls = [call for call in tracer.calls if call.index >= self.first]
        tracer.modules = OwnSpans(self._roots, self._recorder.spans)
        found = self._walk(tracer)
        if found is None:
            return None
        stored = found.call.stage == "stored"
        # Another guard may have stored the tensor under its own name.
        if stored:
            found = replace(found, call=replace(found.call, op=self._own_name(found.call)))
        step = replace(step, micro_batches=step.micro_batches or ({},), scale=1.0)
        bad_loss = any(call.out for call in self._losses)
        traced = Traced(Ran(loss_finite=not bad_loss), tracer, 0)
        origin = origin_of(found, traced, Replayer(step, step.buffers))
        read = found.consumer
        if stored and origin.phase == "loss" and read is not None and read.stage == "forward":
            first = self._first_model_call or 0
            if read.module is None and read.index < first:
                # Data that was bad when it came in; what the loop computes of it is no input.
                origin = replace(origin, phase="input")
        origin = replace(
            origin,
            module=tracer.modules.spelled(origin.module),
            method="live",
            reproduced=None,
            micro_batch=bad_state.first_bad_micro_batch(reading),
            remarks=(*origin.remarks, SEEN_LIVE),
        )
        return name_operands(origin)

    def _walk(self, tracer: Any) -> FirstBad | None:
        losses = [call for call in self._losses if call.out]
        if losses:
            return blame_loss(tracer, losses)
        gradients = [call for call in self._gradients if call.out]
        if gradients:
            return blame_gradients(tracer, gradients)
        return None

    def _own_name(self, stored: Call) -> str:
        """Return this guard's name of a tensor; one that only another guard knows is a constant."""
        for call, name in self._stored:
            if call is stored:
                return name
        for name, parameter in self._parameters.items():
            if self.tracer.maker_of(parameter) is stored:
                return f"param:{name}"
        return "constant"
