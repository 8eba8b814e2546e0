"""The replayed step as a graph of operation calls: names, lines and flags, never a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from stepguard.locate.finite import CLEAN, Flaws
from stepguard.locate.source import Line
from stepguard.records.evidence import NO_EVIDENCE, Evidence
from stepguard.records.origin import Operand

Stage = Literal["stored", "forward", "backward", "optimizer"]


def aten(names: str) -> frozenset[str]:
    """Names of operators as the dispatcher spells them: `aten.clone` for `clone`."""
    return frozenset(f"aten.{name}" for name in names.split())


COPIES = aten("_to_copy clone copy_ detach lift_fresh alias _unsafe_view _reshape_copy")
"""Operations that only copy values: never the interesting consumer or producer of one."""

MOVES = COPIES | aten("index gather index_select cat stack embedding masked_select take flip roll")
"""Operations that put values elsewhere without combining them."""


@dataclass(slots=True, eq=False)
class Call:
    """One operation of the replay, or (stage `stored`) a tensor that existed before it."""

    index: int
    op: str
    stage: Stage
    module: str | None = None
    """Module whose forward is running; None in the backward pass, where `sequence` leads to it."""
    node: str | None = None
    sequence: int = -1
    """Number of the autograd node: in the backward the one evaluated, else the one created."""
    line: Line | None = None
    parents: tuple[Call, ...] = ()
    """Makers of every tensor that went in."""
    flawed: tuple[Call, ...] = ()
    """Those of the parents whose tensor held a non-finite value when it was read."""
    causes: tuple[Call, ...] = ()
    """Those of the flawed whose bad elements explain bad elements of the output."""
    out: Flaws = CLEAN
    intended_inf: bool = False
    """Every infinity of the output was written on purpose, as in an attention mask."""
    first_bad: bool = False
    """The output holds bad elements that no bad input explains."""
    selects: bool = False
    """Chooses elements by a condition: where, masked_fill, indexing by a boolean mask."""
    numeric: bool = True
    """Gives at least one tensor that could hold a NaN; a comparison does not."""
    pointwise: bool = False
    """Works element by element."""
    reduces: bool = False
    """Combines elements into fewer."""
    number: tuple[str, float] | None = None
    """Argument and value of a NaN or infinite Python number that the operation computes with."""
    rounded_to_zero: float | None = None
    """A constant argument, an epsilon for instance, that is 0 in the dtype of the output."""
    uninitialised: bool = False
    """Memory that has been allocated and, as far as operations show, not all written yet."""
    fresh: int | None = None
    """Checksum of that memory when it was allocated; None once an operation wrote a part of it."""
    function: str | None = None
    """The custom function, else the user's function, that allocated it."""
    rows: tuple[int, ...] = ()
    """First-axis positions of bad output elements."""
    bad_positions: tuple[int, ...] = ()
    """Some flat positions of bad output elements."""
    shape: tuple[int, ...] = ()
    reach: float = 0.0
    """Largest magnitude of the output; measured where the tracer is asked to."""
    inputs: tuple[Operand, ...] = ()
    output: Operand | None = None
    evidence: Evidence = NO_EVIDENCE

    @property
    def harmful(self) -> bool:
        """True if the output holds a NaN, or an infinity that was not written on purpose."""
        return self.out.nan or (self.out.inf and not self.intended_inf)


def real_maker(call: Call) -> Call:
    """Go back over casts and copies to the operation that computed the value."""
    while call.op in COPIES and call.parents:
        call = call.parents[0]
    return call


def ancestors(call: Call) -> Iterator[Call]:
    """Yield the call and every call whose bad values reach it."""
    seen: set[int] = set()
    stack = [call]
    while stack:
        one = stack.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            stack.extend(one.causes)


def earliest(calls: list[Call]) -> Call | None:
    """Return the call that ran first; None of none."""
    return min(calls, key=lambda call: call.index, default=None)
