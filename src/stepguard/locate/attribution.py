"""Which bad inputs explain the bad outputs of one operation, and whether some output was born bad.

An infinity that was written as a constant, a mask for instance, is tame: it explains other
infinities but never a NaN. Where an operator works element by element the answer is exact, position
by position, so a bad value that a `where` does not select explains nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from stepguard.locate.calls import Call
from stepguard.locate.finite import CLEAN, Flaws, broken
from stepguard.locate.operands import broadcasts


@dataclass(slots=True)
class Read:
    """A tensor that went in, as it was before the call."""

    name: str
    tensor: Tensor
    maker: Call
    flaws: Flaws = CLEAN
    live: Tensor | None = None
    """The tensor itself where the operator writes it and `tensor` is a copy from before."""

    @property
    def intended_inf(self) -> bool:
        """Bad only by infinities that were written on purpose."""
        return not self.flaws.nan and self.maker.intended_inf

    @property
    def harmful(self) -> bool:
        return bool(self.flaws) and not self.intended_inf


@dataclass(slots=True)
class Explanation:
    """Who is to blame for the bad elements of an output."""

    causes: tuple[Read, ...]
    first_bad: bool
    intended_inf: bool
    """The output is bad only by infinities that were written on purpose."""
    where: Tensor | None = None
    """True at the elements that were born bad, where that is known."""


def explain(
    reads: list[Read], numbers: list[float], out: Tensor, flaws: Flaws, exact: bool
) -> Explanation:
    """`exact`: the operator works element by element and comparing positions is affordable."""
    bad = [read for read in reads if read.flaws]
    constant = any(not math.isfinite(number) for number in numbers)
    if exact and (bad or constant) and all(_fits(read, out) for read in bad):
        return _by_position(bad, constant, out)
    wild = tuple(read for read in bad if read.harmful)
    tame_input = constant or any(read.intended_inf for read in bad)
    born = not wild and (flaws.nan or not tame_input)
    return Explanation(wild, first_bad=born, intended_inf=not wild and not born)


def _fits(read: Read, out: Tensor) -> bool:
    dense = read.tensor.layout is torch.strided and out.layout is torch.strided
    return dense and broadcasts(tuple(read.tensor.shape), tuple(out.shape))


def _by_position(bad: list[Read], constant: bool, out: Tensor) -> Explanation:
    out_bad = broken(out)
    wild, tame = torch.zeros_like(out_bad), torch.full_like(out_bad, constant)
    causes = []
    for read in bad:
        there = broken(read.tensor)
        if read.intended_inf:
            tame |= there
        else:
            wild |= there
            if bool((there & out_bad).any()):
                causes.append(read)
    unexplained = out_bad & ~wild
    born = unexplained & (~tame | torch.isnan(out))
    any_born = bool(born.any())
    return Explanation(
        tuple(causes),
        first_bad=any_born,
        intended_inf=not causes and not any_born,
        where=born if any_born else None,
    )
