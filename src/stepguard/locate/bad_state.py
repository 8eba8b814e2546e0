"""Tensors that were bad before the step ran: parameters, buffers, optimizer slots, the batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from stepguard.locate import batch as batches
from stepguard.locate.finite import mask_like, numeric
from stepguard.locate.operands import summarise
from stepguard.records.evidence import NO_EVIDENCE, Evidence
from stepguard.records.origin import Operand, Origin
from stepguard.records.reading import Reading
from stepguard.state.step import Step
from stepguard.tensors.names import named_buffers, named_parameters, names_by_id
from stepguard.tensors.values import is_finite, local_part


def stored_tensor(step: Step, name: str) -> Tensor | None:
    """Return the tensor behind `param:NAME`, `buffer:NAME` or `opt:SLOT` (its first bad one)."""
    kind, _, path = name.partition(":")
    if kind == "param":
        return dict(named_parameters(step.named_roots())).get(path)
    if kind == "buffer":
        return dict(named_buffers(step.named_roots())).get(path)
    for slot, _, tensor in optimizer_slots(step):
        if slot == path and not is_finite(tensor):
            return tensor
    return None


def optimizer_slots(step: Step) -> Iterator[tuple[str, str, Tensor]]:
    """Yield slot, parameter and tensor of the optimizer's state."""
    names = names_by_id(named_parameters(step.named_roots()))
    for parameter, slots in step.optimizer.state.items():
        # Some optimizers keep further entries there, under a string for instance.
        if not isinstance(slots, Mapping):
            continue
        for slot, value in slots.items():
            if numeric(value):
                yield str(slot), names.get(id(parameter), ""), value


def bad_elements(tensor: Tensor, operand: Operand) -> Evidence:
    """Count the bad elements of a stored tensor."""
    bad = operand.nan + operand.posinf + operand.neginf
    return Evidence(bad_elements=bad, elements=local_part(tensor).numel())


def state_origin(step: Step, reading: Reading) -> Origin:
    """Describe the first bad state tensor of a reading, as it is found now."""
    name = reading.bad_state[0]
    origin = Origin(
        step=reading.step, phase="state", module=owner_of(name), tensor=name, method="scan"
    )
    tensor = stored_tensor(step, name)
    if tensor is None:
        return origin
    operand = summarise(name, tensor)
    evidence = bad_elements(tensor, operand) | Evidence(parameter=_owning_parameter(step, tensor))
    return replace(
        origin,
        inputs=(operand,),
        reproduced=None if is_finite(tensor) else True,
        evidence=evidence,
    )


def owner_of(name: str) -> str | None:
    """Name the module that holds a parameter or buffer."""
    kind, _, path = name.partition(":")
    if kind == "opt":
        return None
    return path.rpartition(".")[0]


def _owning_parameter(step: Step, tensor: Tensor) -> str | None:
    """Name the parameter whose optimizer slot this tensor is."""
    for _, parameter, value in optimizer_slots(step):
        if value is tensor and parameter:
            return parameter
    return None


def evidence_origin(
    step: Step, reading: Reading, evidence: Evidence = NO_EVIDENCE, *remarks: str
) -> Origin:
    """Say the best that can be said without a replay."""
    if reading.bad_state and not reading.state_born:
        return state_origin(step, reading)
    for micro, batch in enumerate(step.micro_batches):
        for name, tensor in batches.named_tensors(batch):
            if numeric(tensor) and not is_finite(tensor) and not mask_like(tensor):
                operand = summarise(name, tensor)
                return Origin(
                    step=reading.step,
                    phase="input",
                    tensor=name,
                    micro_batch=micro,
                    inputs=(operand,),
                    method="scan",
                    evidence=bad_elements(tensor, operand) | evidence,
                    remarks=remarks,
                )
    return replace(_unlocated(reading), evidence=evidence, remarks=remarks)


def loss_is_bad(reading: Reading) -> bool:
    """True if the loss of the step, or of one of its micro-batches, is not finite."""
    if reading.bad_micro_batches:
        return True
    return reading.loss is not None and not math.isfinite(reading.loss)


def first_bad_micro_batch(reading: Reading) -> int | None:
    """Return the index of the first micro-batch with a bad loss."""
    if not reading.bad_micro_batches:
        return None
    return reading.bad_micro_batches[0]


def _unlocated(reading: Reading) -> Origin:
    """Tell a bad loss from a bad gradient, and no more."""
    origin = Origin(step=reading.step, phase="backward", method="evidence")
    if loss_is_bad(reading):
        return replace(origin, phase="loss", micro_batch=first_bad_micro_batch(reading))
    if reading.bad_grads:
        return replace(origin, tensor=f"param:{reading.bad_grads[0]}")
    return origin
