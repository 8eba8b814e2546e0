"""From what the walk found to the Origin record."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from stepguard.locate import bad_state, source
from stepguard.locate import batch as batches
from stepguard.locate.blame import Found
from stepguard.locate.calls import Call
from stepguard.locate.finite import numeric, plain
from stepguard.locate.module_attributes import KEPT, bad_numbers, kept_tensors
from stepguard.locate.replay import Replayer, Traced
from stepguard.locate.source import Line
from stepguard.locate.tracer import Tracer
from stepguard.records.evidence import Evidence
from stepguard.records.origin import Operand, Origin, Phase
from stepguard.state.step import Step

PHASES: dict[str, Phase] = {
    "batch": "input",
    "param": "state",
    "buffer": "state",
    "opt": "state",
    "attr": "state",
}


def origin_of(found: Found, traced: Traced, replayer: Replayer) -> Origin:
    """The record, still without samples."""
    step, call = replayer.step, found.birth
    if call.stage == "stored":
        return _stored_origin(found, traced, replayer)
    place = found.consumer if call.blank and found.consumer is not None else call
    evidence = call.evidence | found.evidence | _setting(step, traced)
    evidence |= Evidence(
        uninitialised=call.blank,
        inner_gradient=call.node is not None and call.stage == "forward",
    )
    if call.number is not None:
        kept = next(iter(bad_numbers(step.named_roots())), None)
        evidence |= Evidence(attribute=kept[0] if kept is not None else None)
    return _with_source(
        Origin(
            step=step.index,
            phase=_phase(place, traced.tracer),
            module=_module(place, traced.tracer),
            op=call.op,
            node=call.node,
            micro_batch=traced.micro_batch,
            inputs=call.inputs,
            output=call.output,
            method="replay",
            reproduced=True,
            evidence=evidence,
        ),
        line_of(place, traced.tracer),
    )


def _stored_origin(found: Found, traced: Traced, replayer: Replayer) -> Origin:
    name, user = found.birth.op, found.consumer
    tensor = _tensor(name, replayer, traced.micro_batch)
    evidence = found.evidence | _setting(replayer.step, traced)
    operands: tuple[Operand, ...] = ()
    if tensor is not None:
        operand = bad_state.operand_of(name, tensor)
        operands = (operand,)
        evidence |= bad_state.elements(tensor, operand)
    known = name.partition(":")[0] in PHASES and not name.startswith(KEPT)
    if not known:
        evidence |= Evidence(constant="nan" if found.birth.out.nan else "inf")
    if name.startswith(KEPT):
        evidence |= Evidence(attribute=name.removeprefix(KEPT))
    phase = PHASES.get(name.partition(":")[0]) or (_phase(user, traced.tracer) if user else "loss")
    origin = Origin(
        step=replayer.step.index,
        phase=phase,
        module=_module(user, traced.tracer) if user is not None else None,
        op=user.op if user is not None else None,
        node=user.node if user is not None else None,
        tensor=name if known else None,
        micro_batch=traced.micro_batch if phase == "input" else None,
        inputs=operands or (user.inputs if user is not None else ()),
        method="replay",
        reproduced=True,
        evidence=evidence,
    )
    return _with_source(origin, line_of(user, traced.tracer) if user is not None else None)


def _tensor(name: str, replayer: Replayer, micro: int) -> Tensor | None:
    kind, _, path = name.partition(":")
    if kind == "param":
        return replayer.parameters.get(path)
    if kind == "buffer":
        return replayer.buffers.get(path)
    if name.startswith(KEPT):
        return dict(kept_tensors(replayer.step.named_roots())).get(name)
    return dict(batches.named_tensors(replayer.step.micro_batches[micro])).get(name)


def _setting(step: Step, traced: Traced) -> Evidence:
    batch = step.micro_batches[traced.micro_batch]
    sizes = [_largest(t) for _, t in batches.named_tensors(batch) if numeric(t) and t.numel()]
    return Evidence(
        scale=float(step.scale) if step.scale != 1.0 else None,
        autocast=traced.tracer.autocast,
        local_collectives=bool(traced.tracer.local_collectives),
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
    return "forward" if tracer.modules.belongs_to_model(call.module) else "loss"


def _module(call: Call, tracer: Tracer) -> str | None:
    return tracer.modules.created(call.sequence) if call.stage == "backward" else call.module


def line_of(call: Call, tracer: Tracer) -> Line | None:
    """The user's line; in the backward the one that created the node, or the nearest node before
    it.
    """
    seen: set[int] = set()
    stack = [call]
    while stack:
        one = stack.pop(0)
        line = one.line or tracer.lines.get(one.sequence)
        if line is not None:
            return line
        seen.add(id(one))
        stack.extend(p for p in one.parents if id(p) not in seen and p.stage != "stored")
    return None


def _with_source(origin: Origin, line: Line | None) -> Origin:
    return replace(origin, source=source.spell(line), context=source.context(line))
