"""Do the losses of the micro-batches of an update make a mean, or a sum of means? The factor of
each is read from its autograd graph, between the loss and the mean over its samples.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor

from stepguard.diagnose.case import SplitFacts
from stepguard.engine.context import Context
from stepguard.sentinel.torch_patches import unscaled
from stepguard.tensors.torch_private import no_dispatch_modes

MEANS = (
    "MeanBackward",
    "NllLoss",
    "MseLoss",
    "SmoothL1Loss",
    "HuberLoss",
    "BinaryCrossEntropy",
)
"""Beginnings of nodes that take a mean over samples, unless their reduction is another one."""
PASSING = ("Add", "Alias", "Clone", "ReshapeAlias", "Squeeze", "ToCopy", "Unsqueeze", "View")
"""Nodes that leave the factor as it is. The first addend of a sum is followed."""
MOST_NODES = 32
SAMPLED = 16
"""Parameters whose gradients are observed for writes between the backward pass and the update."""
WITHOUT_LOADER = 4
"""Losses that are needed where no DataLoader shows that each belongs to a batch of its own: a few
may be the terms of one loss, or the real and the generated samples of a discriminator."""


class LossFactors:
    """Collects the losses of an update; two updates are compared."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.facts: SplitFacts | None = None
        self._found: list[SplitFacts] = []
        self._delivered: Counter[int] = Counter()
        """Batches since the step began, by the iterator that delivered them."""
        self._usual = -1
        """Batches that one iterator delivered between the last two beginnings of a step; -1 where
        that was not counted."""
        self._clear()

    def _clear(self) -> None:
        self._means: list[str] = []
        """Reduction of each loss with a factor of 1; empty for any other."""
        self._calls = 0
        self._explicit = 0
        """Micro-batches that were given to `guard.step`."""
        self._writes: list[tuple[int, int]] = []
        """Identity and version of gradients after the newest backward pass."""
        self._clipped = False

    def begin(self, *, counted: bool) -> None:
        """A step begins, perhaps after its first batch was delivered.

        `counted`: the step before was observed too.
        """
        self._usual = max(self._delivered.values(), default=0) if counted else -1
        self._delivered.clear()

    def delivered(self, iterator: Any) -> None:
        """A loader has delivered a batch."""
        if self.facts is None:
            self._delivered[id(iterator)] += 1

    def called(self, batch: Any) -> None:
        """The model is called, or a step of the guard begins with these micro-batches."""
        self._calls += 1
        given = self._calls == 1 and isinstance(batch, tuple | list)
        self._explicit = len(batch) if given else 0

    def loss_seen(self, root: Tensor) -> None:
        """A backward pass begins at this loss."""
        if self._writes and self._writes != self._marks():
            self._means.clear()  # the gradients before it were dropped
        self._means.append(mean_without_factor(root))

    def backward_over(self) -> None:
        self._writes = self._marks()

    def norm_taken(self) -> None:
        """The loop clips, which writes every gradient once."""
        self._clipped = True

    def before_update(self) -> None:
        """Keep what this update shows, if its losses are those of micro-batches."""
        count = len(self._means)
        given = self._explicit == count
        by_loader = self._usual >= count or given
        alone = self._usual == 0 and self._calls == count >= WITHOUT_LOADER
        if count > 1 and (by_loader or alone) and self._unchanged():
            mean = self._means[0]
            if mean and self._means.count(mean) == count:
                name = mean.removesuffix("Backward0").removesuffix("Backward1")
                self._found.append(SplitFacts(count=count, mean=name, given=given, sure=by_loader))
        self._clear()

    def finish(self, *, committed: bool) -> None:
        """The step is over."""
        if not committed:
            self._found.clear()
        elif len(self._found) > 1 and self.facts is None:
            one, other = self._found[-2:]
            self.facts = other if one == other else None
            del self._found[:-1]

    def _marks(self) -> list[tuple[int, int]]:
        gradients = [one.grad for one in self._context.parameters[:SAMPLED]]
        return [(id(one), -1 if one is None else one._version) for one in gradients]

    def _unchanged(self) -> bool:
        """Has nobody but clipping and a GradScaler written to the gradients, a divisor for one?"""
        for one in self._context.parameters[:SAMPLED]:
            if one._backward_hooks or getattr(one, "_post_accumulate_grad_hooks", None):
                return False
        allowed = self._clipped + self._context.scaling()
        pairs = zip(self._writes, self._marks(), strict=True) if self._writes else ()
        return all(one[0] == other[0] and other[1] - one[1] <= allowed for one, other in pairs)


def mean_without_factor(root: Tensor) -> str:
    """The node that takes the mean over samples, if nothing multiplies it; empty otherwise."""
    node: Any = root.grad_fn
    factor = 1.0
    if node is not None and unscaled(root) is not None:
        node = node.next_functions[0][0]
    for _ in range(MOST_NODES):
        if node is None:
            break
        name = node.name()
        if name.startswith(MEANS):
            return name if factor == 1.0 and getattr(node, "_saved_reduction", 1) == 1 else ""
        if name in ("MulBackward0", "DivBackward0"):
            constant = _constant(node)
            if not constant:
                break
            factor *= constant if name == "MulBackward0" else 1.0 / constant
        elif name.removesuffix("Backward0") not in PASSING:
            break
        node = next((source for source, _ in node.next_functions if source is not None), None)
    return ""


def _constant(node: Any) -> float:
    """The number that a node multiplies with or divides by; 0 where it is none, or on a device."""
    raw = node._raw_saved_other
    # behind somebody's hooks it would be computed to be read
    if all(source is not None for source, _ in node.next_functions) or raw is None:
        return 0.0
    value = raw.data if getattr(raw, "unpack_hook", True) is None else None
    if type(value) is Tensor and value.numel() == 1 and value.device.type == "cpu":
        # a dispatch mode would see a number in the place of the tensor
        with no_dispatch_modes():
            return float(value.detach())
    return 0.0
