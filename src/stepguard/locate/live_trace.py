"""Trace the user's own step as it runs: forward, loss and backward, with every line.

For a watched loop whose bad value is made where no replay reaches. Every operation and every
collective runs exactly once, as it would have, and the random numbers are left alone.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from stepguard.diagnose.operand_names import name_operands
from stepguard.locate import batch as batches
from stepguard.locate.blame import FirstBad, blame_gradients, blame_loss
from stepguard.locate.calls import Call
from stepguard.locate.finite import plain
from stepguard.locate.module_attributes import kept_tensors
from stepguard.locate.modules import ModuleSpans
from stepguard.locate.origin_record import origin_of
from stepguard.locate.replay import Ran, Replayer, Traced
from stepguard.locate.shared_tracer import Recorder, module_key
from stepguard.records.origin import Origin
from stepguard.records.reading import Reading
from stepguard.state.step import Step
from stepguard.tensors.names import named_buffers, named_parameters

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
            if maker is None:
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
        tracer = self._own_tracer()
        found = self._walk(tracer)
        if found is None:
            return None
        # Another guard may have stored the tensor under its own name.
        if found.call.stage == "stored":
            found = replace(found, call=replace(found.call, op=self._own_name(found.call)))
        step = replace(step, micro_batches=step.micro_batches or ({},), scale=1.0)
        traced = Traced(Ran(loss_finite=not _bad(self._losses)), tracer, 0)
        origin = origin_of(found, traced, Replayer(step, step.buffers))
        if found.call.stage == "stored" and origin.phase == "loss":
            first_read = found.consumer
            if first_read is not None and self._before_the_model(first_read):
                # Data that was bad when it came in; what the loop computes of it is no input.
                origin = replace(origin, phase="input")
        micro = reading.bad_micro_batches[0] if reading.bad_micro_batches else None
        module = tracer.modules.spelled(origin.module)
        remarks = (*origin.remarks, SEEN_LIVE)
        origin = replace(
            origin,
            module=module,
            method="live",
            reproduced=None,
            micro_batch=micro,
            remarks=remarks,
        )
        return name_operands(origin)

    def _own_tracer(self) -> Any:
        """Copy the tracer: the calls of this step, with this guard's names for modules."""
        tracer = copy.copy(self.tracer)
        tracer.calls = [call for call in tracer.calls if call.index >= self.first]
        tracer.modules = OwnSpans(self._roots, self._recorder.spans)
        return tracer

    def _own_name(self, stored: Call) -> str:
        """Return this guard's name of a tensor; one that only another guard knows is a constant."""
        for call, name in self._stored:
            if call is stored:
                return name
        for name, parameter in self._parameters.items():
            if self.tracer.maker_of(parameter) is stored:
                return f"param:{name}"
        return "constant"

    def _walk(self, tracer: Any) -> FirstBad | None:
        losses = _bad(self._losses)
        if losses:
            return blame_loss(tracer, losses)
        gradients = _bad(self._gradients)
        if gradients:
            return blame_gradients(tracer, gradients)
        return None

    def _before_the_model(self, call: Call) -> bool:
        if call.stage != "forward" or call.module is not None:
            return False
        first = self._first_model_call
        return first is not None and call.index < first


def _bad(calls: list[Call]) -> list[Call]:
    return [call for call in calls if call.out]
