"""The replayed step as a graph of operation calls. It holds names, lines and flags, never a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from stepguard.locate.finite import CLEAN, Flaws
from stepguard.locate.source import Line
from stepguard.records.evidence import NO_EVIDENCE, Evidence
from stepguard.records.origin import Operand

Stage = Literal["stored", "forward", "backward", "optimizer"]

COPIES = frozenset(
    "aten." + name
    for name in (
        "_to_copy",
        "clone",
        "copy_",
        "detach",
        "lift_fresh",
        "alias",
        "_unsafe_view",
        "_reshape_copy",
    )
)
"""Operations that only move values: never the interesting consumer or producer of one."""

MOVES = COPIES | {
    "aten." + name
    for name in (
        "index",
        "gather",
        "index_select",
        "cat",
        "stack",
        "embedding",
        "masked_select",
        "take",
        "flip",
        "roll",
    )
}
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
    """Number of the autograd node: the one being evaluated, or in the forward the one that was
    created.
    """
    line: Line | None = None
    parents: tuple[Call, ...] = ()
    """Makers of every tensor that went in."""
    flawed: tuple[Call, ...] = ()
    """Those of the parents whose tensor held a non-finite value when it was read."""
    causes: tuple[Call, ...] = ()
    """Those of the flawed whose bad elements explain bad elements of the output."""
    out: Flaws = CLEAN
    tame: bool = False
    """Every infinity of the output was written on purpose, as in an attention mask."""
    born: bool = False
    """Bad output elements that no bad input explains."""
    selects: bool = False
    """Chooses elements by a condition: where, masked_fill, indexing by a boolean mask."""
    numeric: bool = True
    """Gives at least one tensor that could hold a NaN; a comparison does not."""
    pointwise: bool = False
    """Works element by element."""
    reduces: bool = False
    """Combines elements into fewer."""
    number: tuple[str, float] | None = None
    """The name and value of a Python number given to an arithmetic operation that is not finite."""
    vanished: float | None = None
    """A constant argument, an epsilon for instance, that is 0 in the dtype of the output."""
    blank: bool = False
    """Memory nobody has written yet."""
    rows: tuple[int, ...] = ()
    """First-axis positions of bad output elements."""
    spots: tuple[int, ...] = ()
    """Some flat positions of bad output elements."""
    shape: tuple[int, ...] = ()
    inputs: tuple[Operand, ...] = ()
    output: Operand | None = None
    evidence: Evidence = NO_EVIDENCE

    @property
    def harmful(self) -> bool:
        """The output holds a non-finite value that nobody intended."""
        return self.out.nan or (self.out.inf and not self.tame)


def real_maker(call: Call) -> Call:
    """Behind casts and copies: the operation that computed the value."""
    while call.op in COPIES and call.parents:
        call = call.parents[0]
    return call


def ancestors(call: Call) -> Iterator[Call]:
    """The call and everything whose bad values reach it."""
    seen: set[int] = set()
    stack = [call]
    while stack:
        one = stack.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            stack.extend(one.causes)
