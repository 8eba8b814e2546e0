"""Locate bad values that the optimizer makes from finite gradients, and norms that overflow.

The update is called from this file: its frames mark where the user's optimizer begins, see
`source`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import Optimizer

from stepguard.locate.calls import Call, ancestors
from stepguard.locate.modules import ModuleSpans
from stepguard.locate.operands import summarise, unravel
from stepguard.locate.origin_record import line_of
from stepguard.locate.replay import Replayer, ReplayError
from stepguard.locate.source import with_source
from stepguard.locate.tracer import Tracer
from stepguard.records.evidence import NO_EVIDENCE, Evidence
from stepguard.records.origin import Operand, Origin, with_evidence
from stepguard.records.reading import Reading
from stepguard.sentinel.gradients import scale_gradients
from stepguard.state.isolation import untouched
from stepguard.state.step import Step
from stepguard.tensors.names import named_parameters, names_by_id, optimizer_parameters
from stepguard.tensors.sharding import is_distributed
from stepguard.tensors.values import is_finite, local_part

Gradients = dict[int, Tensor]


def update_origin(step: Step, reading: Reading) -> Origin:
    """Run the update again on copies of parameters, gradients and optimizer state."""
    origin = Origin(
        step=reading.step,
        phase="optimizer",
        tensor=reading.bad_state[0] if reading.bad_state else None,
        method="evidence",
        evidence=_learning_rate(reading),
    )
    gradients = _gradients(step)
    if not gradients:
        return origin
    twin = _Twin(step, gradients)
    twin.clip(step.clip_norm, reading.clip_factor if step.sharded else None)
    tracer = Tracer(ModuleSpans({}), stage="optimizer")
    for stored in twin.tensors():
        tracer.store(stored.name, stored.tensor)
    try:
        with torch.no_grad(), tracer:
            twin.optimizer.step()
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"[:200]
        origin = with_evidence(origin, Evidence(replay_error=failure))
        return replace(origin, remarks=(f"the replay failed: {failure}",))
    return _from_trace(replace(origin, method="replay"), tracer, twin)


def _from_trace(origin: Origin, tracer: Tracer, twin: _Twin) -> Origin:
    first = _first_bad(tracer, twin)
    if first is None:
        for updated in twin.tensors():
            if not is_finite(updated.tensor):
                # bad all the same: a kernel wrote it that is no operation of torch's
                name = f"{type(twin.optimizer).__name__}.step"
                origin = with_evidence(origin, Evidence(opaque="code"))
                return replace(origin, op=name, tensor=updated.name, reproduced=True)
        return replace(origin, reproduced=False)
    call, updated = first
    if call.stage == "stored":
        return replace(origin, phase="state", tensor=call.op, reproduced=True)
    origin = with_source(origin, line_of(call, tracer))
    return replace(
        origin,
        op=call.op,
        tensor=updated.name,
        inputs=call.inputs,
        output=call.output,
        reproduced=True,
        evidence=call.evidence | origin.evidence | _epsilon(twin.optimizer, updated.parameter),
    )


def _first_bad(tracer: Tracer, twin: _Twin) -> tuple[Call, _Updated] | None:
    """Return the first operation that made a bad value, and the tensor that it ended in."""
    found = []
    for updated in twin.tensors():
        maker = tracer.maker_of(updated.tensor)
        if maker is None or is_finite(updated.tensor):
            continue
        for call in ancestors(maker):
            if call.first_bad:
                found.append((call, updated))
    return min(found, key=lambda pair: pair[0].index, default=None)


@dataclass(frozen=True, slots=True)
class _Updated:
    """A parameter of the copied optimizer, or a slot of its state."""

    name: str
    tensor: Tensor
    parameter: Tensor


class _Twin:
    """An independent optimizer on copied parameters, gradients and state, without any hooks."""

    def __init__(self, step: Step, gradients: Gradients) -> None:
        # what a deep copy finds here it takes for the copy
        memo = _own_parts(step.optimizer)
        self.optimizer = copy.deepcopy(step.optimizer, memo)
        _copy_attributes(step.optimizer, self.optimizer, memo)
        self._parameters = optimizer_parameters(self.optimizer)
        self._names: list[str] = []
        names = names_by_id(named_parameters(step.named_roots()))
        originals = optimizer_parameters(step.optimizer)
        for parameter, original in zip(self._parameters, originals, strict=True):
            gradient = gradients.get(id(original))
            parameter.grad = None if gradient is None else gradient.detach().clone()
            self._names.append(names.get(id(original), ""))

    def clip(self, limit: float | None, factor: float | None = None) -> None:
        """Clip the gradients as the step did. `factor`: what sharded ones were multiplied by."""
        if factor is not None:
            scale_gradients(self._parameters, factor)
        elif limit is not None and any(p.grad is not None for p in self._parameters):
            clip_grad_norm_(self._parameters, limit)

    def tensors(self) -> Iterator[_Updated]:
        """Yield every parameter, then every slot of the optimizer's state."""
        for name, parameter in zip(self._names, self._parameters, strict=True):
            yield _Updated(f"param:{name}", parameter, parameter)
        for parameter in self._parameters:
            for slot, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield _Updated(f"opt:{slot}", value, parameter)


def _copy_attributes(optimizer: Optimizer, twin: Optimizer, memo: dict[int, Any]) -> None:
    """Copy what the author of an optimizer put on `self`."""
    # A deep copy of a torch optimizer carries groups, state and defaults only.
    for name, value in vars(optimizer).items():
        if name in vars(twin) or callable(value):
            continue
        # What cannot be copied is missed only if the update needs it, and the replay says so then.
        with suppress(TypeError, RuntimeError):
            setattr(twin, name, copy.deepcopy(value, memo))


def _own_parts(optimizer: Optimizer) -> dict[int, Any]:
    """Copies of what this rank holds of sharded tensors, to stand for them, by their ids.

    No other rank joins what this one computes.
    """
    parts: dict[int, Any] = {}
    for parameter in optimizer_parameters(optimizer):
        if is_distributed(parameter):
            parts[id(parameter)] = nn.Parameter(local_part(parameter.detach()).clone())
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor) and is_distributed(value):
                parts[id(value)] = local_part(value.detach()).clone()
    return parts


def _epsilon(optimizer: Optimizer, parameter: Tensor) -> Evidence:
    """Say whether the group's epsilon is 0 in the parameter's dtype."""
    for group in optimizer.param_groups:
        eps = group.get("eps")
        if isinstance(eps, float) and any(p is parameter for p in group["params"]):
            rounded = float(torch.tensor(eps, dtype=parameter.dtype))
            return Evidence(eps=eps, eps_underflow=eps > 0 and rounded == 0.0)
    return NO_EVIDENCE


def norm_origin(step: Step, reading: Reading) -> Origin:
    """Name the operation that overflows in the norm of finite gradients."""
    origin = Origin(
        step=reading.step,
        phase="optimizer",
        op="aten._foreach_norm",
        method="evidence",
        evidence=_learning_rate(reading),
    )
    gradients = [gradient for gradient in _gradients(step).values() if gradient.numel()]
    if not gradients:
        return origin
    tracer = Tracer(ModuleSpans({}), stage="optimizer")
    with torch.no_grad(), tracer:
        norm = get_total_norm(gradients)
    for call in tracer.calls:
        if call.first_bad:
            origin = replace(origin, op=call.op, output=call.output)
            break
    exact = math.sqrt(sum(float(g.detach().double().norm()) ** 2 for g in gradients))
    if math.isfinite(exact):
        origin = with_evidence(origin, Evidence(finite_norm=exact))
    reproduced: bool | None = not is_finite(norm)
    if step.sharded and not reproduced:
        # what overflows is the norm of all ranks' parts, and this is one of them
        reproduced = None
    return replace(
        origin,
        inputs=(_largest_gradient(gradients),),
        method="replay",
        reproduced=reproduced,
    )


def _largest_gradient(gradients: list[Tensor]) -> Operand:
    """Describe the gradient with the largest element, and show that element."""
    largest = max(gradients, key=_magnitude)
    position = int(largest.detach().abs().argmax())
    return summarise("grad", largest, unravel(position, tuple(largest.shape)))


def _magnitude(gradient: Tensor) -> float:
    return float(gradient.detach().abs().max())


def divergence_origin(step: Step, reading: Reading) -> Origin:
    """Blame the update as a whole: everything is finite, and yet the run is being lost."""
    evidence = _learning_rate(reading) | Evidence(repeat_loss=reading.repeat_loss)
    return Origin(step=reading.step, phase="optimizer", method="evidence", evidence=evidence)


def _learning_rate(reading: Reading) -> Evidence:
    return Evidence(lr=max(reading.lr, default=None))


def _gradients(step: Step) -> Gradients:
    """Return the gradients that are there, else those of a replay (unscaled), by parameter."""
    present = _present_gradients(step)
    if present or not step.replayable or not step.rng:
        return present
    with untouched(step) as keeper:
        replayer = Replayer(step, keeper)
        try:
            for micro in range(len(step.micro_batches)):
                replayer.run(micro)
        except ReplayError:
            return {}
        replayed = _present_gradients(step)
        return {key: gradient / step.scale for key, gradient in replayed.items()}


def _present_gradients(step: Step) -> Gradients:
    """The gradients themselves; of sharded ones this rank's parts, with which it can work alone."""
    present = {}
    for parameter in optimizer_parameters(step.optimizer):
        if parameter.grad is not None:
            present[id(parameter)] = local_part(parameter.grad)
    return present
