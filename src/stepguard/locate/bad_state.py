"""Tensors that were bad before the step ran: parameters, buffers, optimizer slots, the batch."""

from __future__ import annotations

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
from stepguard.tensors.values import is_finite


def stored_tensor(step: Step, name: str) -> Tensor | None:
    """The tensor behind `param:NAME`, `buffer:NAME` or (first bad one of that slot) `opt:SLOT`."""
    kind, _, path = name.partition(":")
    if kind == "opt":
        return next(
            (t for slot, _, t in optimizer_slots(step) if slot == path and not is_finite(t)), None
        )
    named = named_parameters if kind == "param" else named_buffers
    return dict(named(step.named_roots())).get(path)


def optimizer_slots(step: Step) -> Iterator[tuple[str, str, Tensor]]:
    """Slot, parameter and tensor of the optimizer's state."""
    names = names_by_id(named_parameters(step.named_roots()))
    for parameter, slots in step.optimizer.state.items():
        for slot, value in slots.items() if isinstance(slots, Mapping) else ():
            if numeric(value):
                yield str(slot), names.get(id(parameter), ""), value


def operand_of(name: str, tensor: Tensor) -> Operand:
    """Counts and the exact index of the first bad element."""
    return summarise(name, tensor)


def elements(tensor: Tensor, operand: Operand) -> Evidence:
    """How much of the stored tensor is bad."""
    bad = operand.nan + operand.posinf + operand.neginf
    return Evidence(bad_elements=bad, elements=tensor.numel())


def state_origin(step: Step, reading: Reading) -> Origin:
    """State that was bad before the step, found by looking at it."""
    name = reading.bad_state[0]
    tensor = stored_tensor(step, name)
    inputs: tuple[Operand, ...] = ()
    evidence = Evidence()
    if tensor is not None:
        operand = operand_of(name, tensor)
        inputs = (operand,)
        evidence = elements(tensor, operand)
    owner = next((p for _, p, t in optimizer_slots(step) if t is tensor and p), None)
    return Origin(
        step=reading.step,
        phase="state",
        module=_owner(name),
        tensor=name,
        inputs=inputs,
        method="scan",
        reproduced=True if tensor is not None and not is_finite(tensor) else None,
        evidence=evidence | Evidence(parameter=owner),
    )


def _owner(name: str) -> str | None:
    """The module that holds the parameter or buffer."""
    kind, _, path = name.partition(":")
    return path.rpartition(".")[0] if kind != "opt" else None


def evidence_origin(
    step: Step, reading: Reading, evidence: Evidence = NO_EVIDENCE, *remarks: str
) -> Origin:
    """The best that can be said without a replay."""
    if reading.bad_state and not reading.state_born:
        return state_origin(step, reading)
    for micro, batch in enumerate(step.micro_batches):
        for name, tensor in batches.named_tensors(batch):
            if numeric(tensor) and not is_finite(tensor) and not mask_like(tensor):
                operand = operand_of(name, tensor)
                return Origin(
                    step=reading.step,
                    phase="input",
                    tensor=name,
                    micro_batch=micro,
                    inputs=(operand,),
                    method="scan",
                    evidence=elements(tensor, operand) | evidence,
                    remarks=remarks,
                )
    return replace(_unplaced(reading), evidence=evidence, remarks=remarks)


def _unplaced(reading: Reading) -> Origin:
    bad_losses = reading.bad_micro_batches
    if bad_losses or (reading.loss is not None and reading.loss - reading.loss != 0.0):
        micro = bad_losses[0] if bad_losses else None
        return Origin(step=reading.step, phase="loss", micro_batch=micro, method="evidence")
    tensor = f"param:{reading.bad_grads[0]}" if reading.bad_grads else None
    return Origin(step=reading.step, phase="backward", tensor=tensor, method="evidence")
