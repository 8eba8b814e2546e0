"""Tell which parameters belong to a guard: those of its optimizer. Others are data to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn
from torch.optim import Optimizer

from stepguard.state.optimizer_state import every_group
from stepguard.tensors.names import named_parameters


class Ownership:
    """One guard's share of the modules it was given.

    Not its own: what another guarded optimizer holds, and what wants a gradient and is not in this
    optimizer. A frozen parameter that no optimizer holds (a teacher that the loop averages into) is
    its own.
    """

    def __init__(
        self, roots: Mapping[str, nn.Module], optimizer: Optimizer, others: Iterable[Optimizer] = ()
    ) -> None:
        """`others`: every optimizer with a guard; iterated again each time."""
        self._roots = roots
        self.optimizer = optimizer
        """May be set later: a loop may replace its optimizer."""
        self._others = others
        self._trained: set[int] = set()
        self.look()

    def look(self) -> None:
        """Remember what wants a gradient now: loops freeze a network while another one trains."""
        for _, parameter in named_parameters(self._roots):
            if parameter.requires_grad:
                self._trained.add(id(parameter))

    def own(self) -> set[int]:
        """Return the ids of what the optimizer, or one inside it, holds."""
        return _held_by(self.optimizer)

    def elsewhere(self) -> set[int]:
        """Return the ids of parameters below the roots that are trained elsewhere."""
        self.look()
        trained = set(self._trained)
        # A list: guards may come and go while it is read.
        for other in list(self._others):
            if other is not self.optimizer:
                trained |= _held_by(other)
        below = {id(parameter) for _, parameter in named_parameters(self._roots)}
        return (below - self.own()) & trained

    def modules_elsewhere(self, root: nn.Module, elsewhere: set[int]) -> set[str]:
        """Return paths of modules whose buffers and counters go with parameters `elsewhere`.

        A module without parameters belongs to the smallest one around it that has some.
        """
        if not elsewhere:
            return set()
        below = {path: {id(p) for p in m.parameters()} for path, m in root.named_modules()}
        own = self.own()
        found: set[str] = set()
        for path in below:
            around = path
            while around and not below[around]:
                around = around.rpartition(".")[0]
            held = below[around]
            if held & elsewhere and not held & own:
                found.add(path)
        return found


def _held_by(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in every_group(optimizer) for p in group["params"]}
