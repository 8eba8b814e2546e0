"""A buffer that the forward pass itself made non-finite while loss and gradients stayed finite."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from stepguard.locate import bad_state
from stepguard.locate.blame import Found, Walk
from stepguard.locate.calls import Call
from stepguard.locate.origin_record import origin_of
from stepguard.locate.replay import Replayer, ReplayError, Traced
from stepguard.records.origin import Origin
from stepguard.records.reading import Reading
from stepguard.state.isolation import untouched
from stepguard.state.step import Step
from stepguard.tensors.values import is_finite


def written_origin(step: Step, reading: Reading) -> Origin:
    """Which operation of the forward wrote the bad value into the buffer?"""
    name = reading.bad_state[0]
    plain = Origin(
        step=reading.step, phase="forward", module=_owner(name), tensor=name, method="scan"
    )
    with untouched(step) as keeper:
        replayer = Replayer(step, keeper)
        for micro in range(len(step.micro_batches)):
            try:
                traced = replayer.trace(micro, backward=False)
            except ReplayError:
                return plain
            buffer = bad_state.stored_tensor(step, name)
            if buffer is not None and not is_finite(buffer):
                operand = bad_state.operand_of(name, buffer)
                return replace(
                    _place(buffer, name, traced, replayer) or plain, tensor=name, output=operand
                )
    return replace(plain, reproduced=False)


def _place(buffer: Tensor, name: str, traced: Traced, replayer: Replayer) -> Origin | None:
    """The birth of the value that was written; for norm layers, whose writing no trace sees, the
    layer's operation.
    """
    maker = traced.tracer.maker_of(buffer)
    if maker is not None and maker.out and maker.stage != "stored":
        found = Walk(traced.tracer, [maker]).from_loss()
        return origin_of(found, traced, replayer) if found is not None else None
    reader = _last_reader(f"buffer:{name.partition(':')[2]}", traced)
    return origin_of(Found(reader), traced, replayer) if reader is not None else None


def _last_reader(name: str, traced: Traced) -> Call | None:
    readers = [
        c
        for c in traced.tracer.calls
        if any(p.stage == "stored" and p.op == name for p in c.parents)
    ]
    return readers[-1] if readers else None


def _owner(name: str) -> str:
    return name.partition(":")[2].rpartition(".")[0]
