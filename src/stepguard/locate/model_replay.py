"""A watched step: only the model's part of it can be run again.

The model gets the arguments and random numbers it had, and its outputs the gradients that came back
to them. What is born inside the model is found as in a full replay. What is not was born in the
user's own loss expression, and the origin says so instead of guessing.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from stepguard.locate import bad_state
from stepguard.locate.batch import named_tensors
from stepguard.locate.replay import Ran, Replayer, ReplayError
from stepguard.locate.source import Line, context, spell
from stepguard.locate.tracer import Tracer
from stepguard.records.origin import Origin
from stepguard.records.reading import Reading
from stepguard.state.batch import OUTPUT_GRADIENT
from stepguard.state.rng import restore_rng
from stepguard.tensors.values import is_finite

METHOD = "output-gradient"
OUTSIDE_FORWARD = (
    "born outside the model: run again, its outputs are finite; the loss expression was not seen"
)
OUTSIDE_BACKWARD = (
    "born outside the model: the gradient that came back to its outputs is bad already; "
    "the loss expression was not seen"
)
OUTSIDE_BOTH = (
    "the model run again gives finite gradients, so the bad one came another way: a parameter used "
    "outside the "
    "model's forward, a hook, or something transient"
)
CAME_IN = (
    "the bad value came into the model through an argument that was computed before; that "
    "part was not seen"
)


class ModelReplayer(Replayer):
    """Runs the recorded calls of the model. `Ran.loss` is the first bad output, or any."""

    def bad_call(self) -> int | None:
        """First call whose outputs or gradients are bad when run again; bad outputs go before bad
        gradients.
        """
        calls = range(len(self.step.micro_batches))
        for backward in (False, True):
            for call in calls:
                self.clear_gradients()
                if not self.run(call, backward=backward).clean:
                    self.clear_gradients()
                    return call
        return None

    def came_back_finite(self, call: int) -> bool:
        """Is what the loss sent back to the outputs of this call finite?"""
        return all(is_finite(g) for g in self.step.micro_batches[call][OUTPUT_GRADIENT].values())

    def placed(self, origin: Origin, call: int | None) -> Origin:
        """What a full replay would know from the user's frames: who called the model, and where
        arguments come from.
        """
        line = self.step.lines[call] if call is not None and call < len(self.step.lines) else None
        if origin.phase == "input" and call is not None and origin.tensor in self._computed(call):
            return replace(
                origin,
                phase="forward",
                tensor=None,
                module=None,
                op=None,
                reproduced=None,
                remarks=(*origin.remarks, CAME_IN),
            )
        if (
            origin.source is None
            and origin.phase in ("input", "forward", "backward")
            and line is not None
        ):
            place = Line(*line)
            return replace(origin, source=spell(place), context=context(place))
        return origin

    def _computed(self, call: int) -> list[str]:
        return [
            name
            for name, tensor in named_tensors(self.step.micro_batches[call])
            if tensor.grad_fn is not None
        ]

    def _run(self, micro: int, batch: Any, backward: bool, tracer: Tracer | None) -> Ran:
        self.put_back()
        restore_rng(self.step.rng[min(micro, len(self.step.rng) - 1)])
        assert self.step.model_fn is not None
        backward = backward and self.came_back_finite(micro)
        try:
            with ExitStack() as stack:
                if tracer is not None:
                    stack.enter_context(tracer)
                outputs, gradients = self.step.model_fn(batch)
                bad = [output for output in outputs if not is_finite(output)]
                ran = Ran(
                    loss_finite=not bad, loss=(bad or outputs)[0].detach() if outputs else None
                )
                pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None]
                if backward and not bad and pairs:
                    if tracer is not None:
                        tracer.stage = "backward"
                    torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        except Exception as error:
            raise ReplayError(f"{type(error).__name__}: {error}") from error
        if backward and not bad:
            ran.grads_finite = not self.bad_gradients()
        return ran


def outside(replayer: ModelReplayer, reading: Reading) -> Origin:
    """What can be said when the model's part is clean: not where, but where not."""
    step = replayer.step
    if reading.bad_state and not reading.state_born:
        return bad_state.state_origin(step, reading)
    loss_bad = bool(reading.bad_micro_batches) or (
        reading.loss is not None and reading.loss - reading.loss != 0.0
    )
    remark = OUTSIDE_FORWARD
    if not loss_bad:
        all_came_back = all(
            replayer.came_back_finite(call) for call in range(len(step.micro_batches))
        )
        remark = OUTSIDE_BOTH if all_came_back else OUTSIDE_BACKWARD
    return Origin(
        step=reading.step,
        phase="loss" if loss_bad else "backward",
        micro_batch=reading.bad_micro_batches[0] if reading.bad_micro_batches else None,
        method=METHOD,
        remarks=(remark,),
    )
