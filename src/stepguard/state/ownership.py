"""Whose a parameter is: a guard owns what its optimizer holds; what somebody else trains is data to
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn
from torch.optim import Optimizer

from stepguard.state.optimizer_state import every_group


class Ownership:
    """One guard's share of the modules it was given.

    Somebody else's is what another guarded optimizer holds, and what wants a gradient and is not in
    this optimizer. A frozen parameter that no optimizer holds (a teacher that the loop averages
    into) is this run's own.
    """

    def __init__(
        self, roots: Mapping[str, nn.Module], optimizer: Optimizer, others: Iterable[Optimizer] = ()
    ) -> None:
        """`others` is asked again each time: every optimizer that has a guard."""
        self._roots, self._optimizer, self._others = roots, optimizer, others
        self._trained: set[int] = set()
        self.look()

    def look(self) -> None:
        """Remember what wants a gradient now: loops freeze a network for the time of another one's
        step.
        """
        self._trained.update(
            id(p) for root in self._roots.values() for p in root.parameters() if p.requires_grad
        )

    def own(self) -> set[int]:
        """Ids of what the optimizer, or one inside it, holds."""
        return {id(p) for group in every_group(self._optimizer) for p in group["params"]}

    def elsewhere(self) -> set[int]:
        """Ids of parameters below the roots that somebody else trains."""
        self.look()
        own = self.own()
        held = {
            id(p)
            for other in list(self._others)
            if other is not self._optimizer
            for group in every_group(other)
            for p in group["params"]
        }
        below = {id(p) for root in self._roots.values() for p in root.parameters()}
        return {one for one in below - own if one in held or one in self._trained}

    def modules_elsewhere(self, root: nn.Module, elsewhere: set[int]) -> set[str]:
        """Paths of modules whose buffers and numbers belong with somebody else's parameters.

        A module without parameters belongs to the smallest one around it that has some.
        """
        if not elsewhere:
            return set()
        below = {
            path: {id(p) for p in module.parameters()} for path, module in root.named_modules()
        }
        own, found = self.own(), set()
        for path in below:
            around = path
            while around and not below[around]:
                around = around.rpartition(".")[0]
            held = below[around]
            if held & elsewhere and not held & own:
                found.add(path)
        return found
