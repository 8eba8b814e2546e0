"""Write down as an Origin record what the walk over a trace found."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from stepguard.locate import bad_state
from stepguard.locate import batch as batches
from stepguard.locate.blame import FirstBad
from stepguard.locate.calls import Call
from stepguard.locate.finite import numeric, plain
from stepguard.locate.module_attributes import KEPT, bad_numbers, kept_tensors
from stepguard.locate.operands import summarise
from stepguard.locate.replay import Replayer, Traced
from stepguard.locate.source import Line, with_source
from stepguard.locate.tracer import Tracer
from stepguard.records.evidence import NO_EVIDENCE, Evidence
from stepguard.records.origin import Origin, Phase, with_evidence
from stepguard.state.step import Step

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
        # Not the allocation is the mistake, but reading what is not written yet.
        at = found.consumer
    evidence = call.evidence | found.evidence | _surroundings(replayer.step, traced)
    evidence |= Evidence(
        uninitialised=call.uninitialised,
        inner_gradient=call.node is not None and call.stage == "forward",
    )
    if call.number is not None:
        evidence |= _kept_number(replayer.step)
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
    placed = _at_consumer(origin, found.consumer, traced.tracer)
    inputs = () if tensor is None else (summarise(name, tensor),)
    more = (
        Evidence(huge_parameter=name) if name.startswith("param:") else Evidence(huge_buffer=name)
    )
    return with_evidence(
        replace(
            placed,
            phase=_phase(found.consumer, traced.tracer),
            tensor=name,
            inputs=inputs,
            output=None,
            micro_batch=traced.micro_batch,
            method="replay",
            reproduced=True,
        ),
        more,
    )


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


def _kept_number(step: Step) -> Evidence:
    """Name an attribute of a module that is a bad number: the operation was probably given it."""
    for name, _ in bad_numbers(step.named_roots()):
        return Evidence(attribute=name)
    return NO_EVIDENCE


def _surroundings(step: Step, traced: Traced) -> Evidence:
    """Facts on the replay as a whole."""
    sizes = []
    for _, tensor in batches.named_tensors(step.micro_batches[traced.micro_batch]):
        if numeric(tensor) and tensor.numel():
            sizes.append(_largest(tensor))
    return Evidence(
        scale=float(step.scale) if step.scale != 1.0 else None,
        autocast=traced.tracer.autocast,
        local_collectives=traced.tracer.local_collectives,
        unseen=tuple(sorted(traced.tracer.unseen)),
        batch_max=max(sizes, default=None),
    )


def _largest(tensor: Tensor) -> float:
    return float(plain(tensor).nan_to_num(0.0, 0.0, 0.0).abs().max())


def _phase(call: Call, tracer: Tracer) -> Phase:
    if call.stage == "backward":
        return "backward"
    if call.stage == "optimizer":
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
