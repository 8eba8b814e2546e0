"""Locate the operation of the forward that made a buffer non-finite, under a finite loss."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from stepguard.locate import bad_state
from stepguard.locate.blame import FirstBad, blame_loss
from stepguard.locate.model_replay import ModelReplayer
from stepguard.locate.operands import summarise
from stepguard.locate.origin_record import origin_of
from stepguard.locate.replay import Replayer, ReplayError, Traced
from stepguard.records.evidence import Evidence
from stepguard.records.origin import Origin
from stepguard.records.reading import Reading
from stepguard.state.isolation import untouched
from stepguard.state.step import Step
from stepguard.tensors.values import is_finite


def buffer_origin(step: Step, reading: Reading, no_replay: str | None = None) -> Origin:
    """Name the operation that wrote the bad value into the first bad buffer.

    `no_replay`: why the step cannot be run again; then the buffer's name is all that is known.
    """
    name = reading.bad_state[0]
    unlocated = Origin(
        step=reading.step,
        phase="forward",
        module=bad_state.owner_of(name),
        tensor=name,
        method="scan",
    )
    if no_replay is not None:
        remark = f"the step could not be run again: {no_replay}"
        return replace(unlocated, evidence=Evidence(no_replay=no_replay), remarks=(remark,))
    with untouched(step) as keeper:
        # under `watch` only the calls of the model can be run again
        replayer = ModelReplayer(step, keeper) if step.model_only else Replayer(step, keeper)
        for micro in range(len(step.micro_batches)):
            try:
                traced = replayer.trace(micro, backward=False)
            except ReplayError:
                return unlocated
            buffer = bad_state.stored_tensor(step, name)
            if buffer is not None and not is_finite(buffer):
                origin = _writer_origin(buffer, name, traced, replayer) or unlocated
                return replace(origin, tensor=name, output=summarise(name, buffer))
    return replace(unlocated, reproduced=False)


def _writer_origin(buffer: Tensor, name: str, traced: Traced, replayer: Replayer) -> Origin | None:
    maker = traced.tracer.maker_of(buffer)
    if maker is not None and maker.out and maker.stage != "stored":
        found = blame_loss(traced.tracer, [maker])
    else:
        # Norm layers update their statistics inside the kernel: no operation of the trace writes
        # the buffer, but the layer's operation is handed it.
        found = _last_reader(f"buffer:{name.partition(':')[2]}", traced)
    if found is None:
        return None
    return origin_of(found, traced, replayer)


def _last_reader(name: str, traced: Traced) -> FirstBad | None:
    for call in reversed(traced.tracer.calls):
        if any(parent.stage == "stored" and parent.op == name for parent in call.parents):
            return FirstBad(call)
    return None
