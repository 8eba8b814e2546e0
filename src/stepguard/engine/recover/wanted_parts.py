"""Which part of every tensor of a checkpoint this rank reads, whatever mesh it was written on."""

from __future__ import annotations

from stepguard.checkpoints import Select
from stepguard.engine.context import Context
from stepguard.state.run_state import RunState
from stepguard.tensors.sharding import TensorPart, whole_part

OF_OTHERS = ("rng/", "rank/")
"""Tensors that each rank has its own of; places in the data are read for all ranks."""
SLOTS = "optimizer/"


def wanted_parts(context: Context, run_state: RunState) -> Select:
    """The parts that the live tensors of this rank are, those of a new optimizer included."""
    parts = run_state.gather().parts
    of_parameters = run_state.parameter_parts()
    own = [f"{kind}{context.agreement.rank}/" for kind in OF_OTHERS]

    def select(name: str, shape: tuple[int, ...]) -> TensorPart | None:
        if name.startswith(OF_OTHERS) and not name.startswith(tuple(own)):
            return None
        part = parts.get(name)
        if part is None and name.startswith(SLOTS):
            # the optimizer has not made it yet: it is divided as its parameter is
            part = of_parameters.get(_parameter(name, of_parameters))
        if part is not None and part.whole == shape:
            return part
        return whole_part(shape)

    return select


def _parameter(name: str, known: dict[str, TensorPart]) -> str:
    """The parameter of `optimizer/PARAMETER/SLOT`; both may have slashes in their names."""
    path = name.removeprefix(SLOTS)
    while path and path not in known:
        path = path.rpartition("/")[0]
    return path
