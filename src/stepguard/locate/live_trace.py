"""The user's own step under the op tracer, as it runs: forward, loss and backward, with every line.

For a watched loop whose bad value was born where no replay reaches. It only looks: every operation
and every collective runs exactly once, as it would have, and the random numbers are left alone.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from stepguard.locate import batch as batches
from stepguard.locate.blame import Found, Walk
from stepguard.locate.calls import Call
from stepguard.locate.finite import plain
from stepguard.locate.module_attributes import kept_tensors
from stepguard.locate.modules import ModuleSpans
from stepguard.locate.origin_record import origin_of
from stepguard.locate.replay import Ran, Replayer, Traced
from stepguard.locate.shared_tracer import Recorder, token
from stepguard.records.origin import Origin
from stepguard.records.reading import Reading
from stepguard.state.step import Step
from stepguard.tensors.names import named_buffers, named_parameters

SEEN_LIVE = "seen as it happened: the step ran under the tracer"


class OwnSpans(ModuleSpans):
    """What was recorded for all guards, as one of them sees it."""

    def __init__(self, roots: Mapping[str, nn.Module], recorded: ModuleSpans) -> None:
        super().__init__(roots)
        self._recorded = recorded
        self._foreign = tuple(
            token(m) for prefix, root in roots.items() if prefix for m in root.modules()
        )

    def created(self, sequence: int) -> str | None:
        return self._recorded.created(sequence)

    def belongs_to_model(self, name: str | None) -> bool:
        return name is not None and name not in self._foreign

    def spelled(self, name: str | None) -> str | None:
        """The guard's own name of a module; None for what belongs to another guard's model."""
        return None if name is None else self.names.get(int(name.removeprefix("#")))


class LiveTrace:
    """One step of a watched loop, from the end of one update to the beginning of the next."""

    def __init__(self, step: Step, recorder: Recorder) -> None:
        self._recorder, self.tracer = recorder, recorder.tracer
        self.first = recorder.tracer.seen
        """Number of this step's first call."""
        roots = step.named_roots()
        recorder.know(roots)
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
            if maker is None or maker.stage == "stored":
                self._store(f"buffer:{name}", buffer)
        self._losses: list[Call] = []
        self._root: Call | None = None
        """Maker of what the present backward starts from."""
        self._gradients: list[Call] = []
        self._first_model_call: int | None = None

    def _store(self, name: str, tensor: Tensor) -> None:
        self._stored.append((self.tracer.store(name, tensor), name))

    # --- while the user's code runs
    # ----------------------------------------------------------------------------

    def enter(self) -> None:
        self._recorder.begin(self)

    def exit(self) -> None:
        self._recorder.end(self)

    def release(self) -> None:
        """What was recorded is of no more use."""
        self._recorder.release(self)

    def model_called(self, arguments: Mapping[str, Any]) -> None:
        """The batch is what the model is called with, unless an operation of this step made it."""
        if self._first_model_call is None:
            self._first_model_call = self.tracer.seen
        for name, tensor in batches.named_tensors(dict(arguments)):
            maker = self.tracer.maker_of(tensor)
            if maker is None:
                self._store(name, tensor)
            elif maker.op.startswith("batch"):
                self._stored.append((maker, name))  # another guard's model has been called with it

    def before_backward(self, root: Tensor) -> None:
        self._root = self.tracer.maker_of(root) if root.numel() == 1 else None
        self.tracer.stage = "backward"

    def after_backward(self, *, ours: bool) -> None:
        """`ours`: the backward reached this guard's parameters."""
        if ours and self._root is not None:
            self._losses.append(self._root)
        self.tracer.stage = "forward"

    def finish(self) -> None:
        """The gradients are complete: remember who made them, before the guard hides them."""
        self.exit()
        grads = [p.grad for p in self._parameters.values() if p.grad is not None]
        makers = [self.tracer.maker_of(plain(grad)) for grad in grads]
        self._gradients = [maker for maker in makers if maker is not None]

    # --- afterwards
    # --------------------------------------------------------------------------------------------

    def origin(self, step: Step, reading: Reading) -> Origin | None:
        """Where the first harmful value was born; None when the trace does not show it."""
        if self.tracer.fault is not None:
            return None
        tracer = self._own_tracer()
        found = self._walk(tracer)
        if found is None:
            return None
        if found.birth.stage == "stored":
            found = replace(found, birth=replace(found.birth, op=self._own_name(found.birth)))
        step = replace(step, micro_batches=step.micro_batches or ({},), scale=1.0)
        traced = Traced(Ran(loss_finite=not _bad(self._losses)), tracer, 0)
        origin = origin_of(found, traced, Replayer(step, step.buffers))
        if origin.phase == "loss" and self._before_the_model(found.consumer or found.birth):
            origin = replace(origin, phase="input")
        micro = reading.bad_micro_batches[0] if reading.bad_micro_batches else None
        module = tracer.modules.spelled(origin.module)
        remarks = (*origin.remarks, SEEN_LIVE)
        return replace(
            origin,
            module=module,
            method="live",
            reproduced=None,
            micro_batch=micro,
            remarks=remarks,
        )

    def _own_tracer(self) -> Any:
        """The recorded calls of this step, with this guard's names for modules and stored tensors."""
        tracer = copy.copy(self.tracer)
        tracer.calls = [call for call in tracer.calls if call.index >= self.first]
        tracer.modules = OwnSpans(self._roots, self._recorder.spans)
        return tracer

    def _own_name(self, stored: Call) -> str:
        """What this guard calls a tensor; one that only another guard knows is a constant here."""
        for call, name in self._stored:
            if call is stored:
                return name
        held = (
            (name, p) for name, p in self._parameters.items() if self.tracer.maker_of(p) is stored
        )
        return next((f"param:{name}" for name, _ in held), "constant")

    def _walk(self, tracer: Any) -> Found | None:
        losses, gradients = _bad(self._losses), _bad(self._gradients)
        if losses:
            return Walk(tracer, losses).from_loss()
        return Walk(tracer, gradients).from_gradients() if gradients else None

    def _before_the_model(self, call: Call) -> bool:
        first = self._first_model_call
        return (
            call.stage == "forward"
            and call.module is None
            and first is not None
            and call.index < first
        )


def _bad(calls: list[Call]) -> list[Call]:
    return [call for call in calls if call.out]
