"""Is a loss infinite only because finite values were too many or too large to be added up?

A sum of squared errors in float16 overflows above 65504 while every gradient is finite and right.
Where the step can be run again, its forward pass shows it. In a watched loop that cannot, the end
of the autograd graph shows whether the loss was added up in float16 at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stepguard.locate.impurity import kept_loss_function_state
from stepguard.state.isolation import untouched
from stepguard.state.rng import restore_rng
from stepguard.state.step import Step, total_loss
from stepguard.tensors.torch_private import TorchDispatchMode, tree_flatten
from stepguard.tensors.values import is_finite

SUMS = frozenset({"sum", "mean", "dot", "nansum", "linalg_vector_norm", "norm"})
LOSSES = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"})
"""Losses that make one value of each element before they add: `reduction` is an argument."""
SUM_NODES = frozenset(
    {"SumBackward", "MeanBackward", "DotBackward", "MseLossBackward", "L1LossBackward"}
    | {"SmoothL1LossBackward", "HuberLossBackward", "LinalgVectorNormBackward", "NormBackward"}
)
PASSED = frozenset({"Mul", "Div", "Add", "Sub", "Neg", "ToCopy", "View", "Squeeze", "Reshape"})
"""Nodes behind a sum that may still belong to the loss: weights, means, casts."""
MOST_NODES = 16


class _Sums(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows infinities that sums of finite values have made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: list[Tensor] = []

    def made(self, tensor: Tensor) -> bool:
        return any(tensor is one for one in self._made)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = list(_floats((args, kwargs)))
        rest = [tensor for tensor in given if not self.made(tensor)]
        # terms of a loss are scalars; `+=` writes into its first operand, so it is read before
        terms = name in ("add", "add_") and len(given) > 1 and all(t.numel() == 1 for t in given)
        adds = terms or name in SUMS or name in LOSSES
        follows = (adds or len(rest) < len(given)) and all(map(is_finite, rest))
        out = func(*args, **kwargs)
        for tensor in _floats(out) if follows else ():
            if _infinite(tensor) and _elements_finite(func, args, kwargs):
                self._made.append(tensor)
        return out


def _infinite(tensor: Tensor) -> bool:
    return not is_finite(tensor) and not bool(tensor.isnan().any())


def _floats(tree: Any) -> Iterator[Tensor]:
    for leaf in tree_flatten(tree)[0]:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            yield leaf


def _elements_finite(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Of a loss that makes elements by itself: are they finite before they are added?"""
    if func.overloadpacket.__name__ not in LOSSES:
        return True
    rest = {name: value for name, value in kwargs.items() if name != "reduction"}
    return is_finite(func(*args[:2], 0, *args[3:], **rest))


def overflowed_in_replay(step: Step, micro: Sequence[int]) -> bool:
    """Run the forward of these micro-batches again: is each loss infinite by a sum alone?"""
    assert step.loss_fn is not None
    with untouched(step), kept_loss_function_state(step):
        step.buffers.restore()
        for index in range(max(micro) + 1):
            restore_rng(step.rng[index])
            with _Sums() as sums:
                loss = total_loss(step.loss_fn(step.micro_batches[index]))
            if index in micro and not sums.made(loss):
                return False
    return True


def summed_in_half_precision(root: Tensor) -> bool:
    """Is the loss the result of a sum in float16, by the nodes that its backward begins with?"""
    waiting = [root.grad_fn]
    for _ in range(MOST_NODES):
        if not waiting:
            break
        node = waiting.pop()
        if node is None:
            continue
        kind = node.name().rstrip("0123456789")
        if kind in SUM_NODES:
            made = node._input_metadata[0].dtype
            if made is torch.float16:
                return True
        elif kind.removesuffix("Backward") in PASSED:
            waiting += [below for below, _ in node.next_functions]
    return False
