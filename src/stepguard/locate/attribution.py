"""Attribute the bad elements of an operation's output to its inputs, or to the operation itself.

An infinity that was written as a constant, a mask for instance, is intended: it explains other
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
    overwritten: Tensor | None = None
    """The tensor itself where the operator writes it; `tensor` is then a copy from before."""

    @property
    def intended_inf(self) -> bool:
        """True if it is bad only by infinities that were written on purpose."""
        return not self.flaws.nan and self.maker.intended_inf

    @property
    def harmful(self) -> bool:
        """True if it holds a NaN, or an infinity that was not written on purpose."""
        return bool(self.flaws) and not self.intended_inf


@dataclass(slots=True)
class Attribution:
    """Where the bad elements of an output come from."""

    causes: tuple[Read, ...]
    first_bad: bool
    """Some bad elements are explained by no input."""
    intended_inf: bool
    """The output is bad only by infinities that were written on purpose."""
    where: Tensor | None = None
    """True at the elements that no input explains, where that is known."""


def attribute(
    reads: list[Read], numbers: list[float], out: Tensor, flaws: Flaws, exact: bool
) -> Attribution:
    """`exact`: the operator works element by element and comparing positions is affordable."""
    bad = [read for read in reads if read.flaws]
    bad_constant = not all(map(math.isfinite, numbers))
    explained = bool(bad) or bad_constant
    if exact and explained and all(_same_layout(read, out) for read in bad):
        return _by_position(bad, bad_constant, out)
    return _by_whole_tensor(bad, bad_constant, flaws)


def _by_whole_tensor(bad: list[Read], bad_constant: bool, flaws: Flaws) -> Attribution:
    harmful = tuple(read for read in bad if read.harmful)
    if harmful:
        return Attribution(harmful, first_bad=False, intended_inf=False)
    intended_input = bad_constant or bool(bad)
    first_bad = flaws.nan or not intended_input
    return Attribution((), first_bad=first_bad, intended_inf=not first_bad)


def _same_layout(read: Read, out: Tensor) -> bool:
    if read.tensor.layout is not torch.strided or out.layout is not torch.strided:
        return False
    return broadcasts(tuple(read.tensor.shape), tuple(out.shape))


def _by_position(bad: list[Read], bad_constant: bool, out: Tensor) -> Attribution:
    out_bad = broken(out)
    harmful = torch.zeros_like(out_bad)
    # A constant operand is broadcast: it meets every element.
    intended = torch.full_like(out_bad, bad_constant)
    causes = []
    for read in bad:
        read_bad = broken(read.tensor)
        if read.intended_inf:
            intended |= read_bad
            continue
        harmful |= read_bad
        if bool((read_bad & out_bad).any()):
            causes.append(read)
    # -inf + -inf is -inf, but a mask can also meet 0 or +inf: a NaN is always the operation's own.
    new = out_bad & ~harmful & (~intended | torch.isnan(out))
    if not bool(new.any()):
        return Attribution(tuple(causes), first_bad=False, intended_inf=not causes)
    return Attribution(tuple(causes), first_bad=True, intended_inf=False, where=new)
