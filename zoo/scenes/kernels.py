"""Kernels that return NaN for finite inputs where another way to compute the same is finite, and
kernels whose non-finite values do no harm.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zoo.case import Batch, Expected, Scene, control, incident
from zoo.scenes.parts import randn, sgd

ROWS, WIDTH = 6, 4
INF, NAN = float("inf"), float("nan")


def hidden(tensor: Tensor) -> Any:
    """Memory that a kernel reads and writes by itself."""
    return tensor.detach().numpy()


@torch.library.custom_op("zoo::doubled_rows", mutates_args=())
def doubled_rows(x: Tensor) -> Tensor:
    """Knows contiguous rows only: of others it never writes the last one."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    hidden(out)[...] = 2 * hidden(x)
    if not x.is_contiguous():
        hidden(out)[-1] = NAN
    return out


@torch.library.custom_op("zoo::shares", mutates_args=())
def shares(x: Tensor) -> Tensor:
    """A softmax that does not subtract the maximum."""
    with np.errstate(over="ignore", invalid="ignore"):
        powers = np.exp(hidden(x))
        return torch.from_numpy(powers / powers.sum(-1, keepdims=True))


@torch.library.custom_op("zoo::shares_slope", mutates_args=())
def shares_slope(grad: Tensor, out: Tensor) -> Tensor:
    return out * (grad - (grad * out).sum(-1, keepdim=True))


@torch.library.custom_op("zoo::squared", mutates_args=())
def squared(x: Tensor, empty: int) -> Tensor:
    return x * x


@torch.library.custom_op("zoo::squared_slope", mutates_args=())
def squared_slope(grad: Tensor, x: Tensor, empty: int) -> Tensor:
    """Rows of the last block have no slope written where it is not full."""
    out = 2 * x * grad
    if empty:
        hidden(out)[-empty:] = NAN
    return out


@torch.library.custom_op("zoo::scores", mutates_args=())
def scores(x: Tensor, lengths: Tensor) -> Tensor:
    """Scores between the elements of a row, with -inf beyond its length."""
    out = x[:, :, None] * x[:, None, :]
    past = torch.arange(x.shape[1]) >= lengths[:, None]
    return out.masked_fill(past[:, None, :], -INF)


@torch.library.custom_op("zoo::scores_slope", mutates_args=())
def scores_slope(grad: Tensor, x: Tensor) -> Tensor:
    return (grad * x[:, None, :]).sum(2) + (grad * x[:, :, None]).sum(1)


doubled_rows.register_autograd(
    lambda ctx, grad: 2 * grad, setup_context=lambda ctx, inputs, output: None
)
shares.register_autograd(
    lambda ctx, grad: shares_slope(grad, ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.second = inputs[1]


squared.register_autograd(
    lambda ctx, grad: (squared_slope(grad, ctx.saved_tensors[0], ctx.second), None),
    setup_context=_keep,
)
scores.register_autograd(
    lambda ctx, grad: (scores_slope(grad, ctx.saved_tensors[0]), None), setup_context=_keep
)


class Behind(nn.Module):
    """A layer, then a kernel."""

    def __init__(self, kernel: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.kernel = kernel

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        made: Tensor = self.kernel(self.inner(x), *more)
        return made


def scene(kernel: Any, scale: float = 1.0) -> Scene:
    """Inputs grow in the second step."""
    model = Behind(kernel)

    def batch(step: int) -> Batch:
        return {"x": randn(ROWS, WIDTH, seed=step) * (scale if step else 1.0)}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        squares: Tensor = model(batch["x"]).square()
        return squares.mean()

    return Scene(model=model, batch=batch, loss=loss, optimizer=sgd(model))


@incident(
    "tile-ai/tilelang#2461",
    expected=Expected(
        step=1, phase="forward", event="nan", op="zoo.doubled_rows", module="", node=None
    ),
    accepted=("SG209", "SG208"),
)
def kernel_that_ignores_strides(fixed: bool) -> Scene:
    """A transposed view reaches it in the second step."""
    calls = iter(range(1 << 20))

    def kernel(x: Tensor) -> Tensor:
        turned = x.t() if next(calls) else x
        return doubled_rows(turned.contiguous() if fixed else turned)

    return scene(kernel)


@incident(
    "Hprairie/Bi-Mamba2#3",
    expected=Expected(step=1, phase="forward", event="nan", op="zoo.shares", module=""),
    accepted=("SG209", "SG208"),
)
def kernel_that_overflows_inside(fixed: bool) -> Scene:
    """Scores above 88 in float32; float64 has room for them."""

    def kernel(x: Tensor) -> Tensor:
        return shares(x - x.amax(-1, keepdim=True) if fixed else x)

    return scene(kernel, 200.0)


@incident(
    "Dao-AILab/flash-attention#2421",
    "state-spaces/mamba#352",
    expected=Expected(
        step=1,
        phase="backward",
        event="nan",
        op="zoo.squared_slope",
        module="",
        loss_finite=True,
    ),
    accepted=("SG209", "SG208"),
)
def backward_kernel_that_leaves_a_block_unwritten(fixed: bool) -> Scene:
    """Its own forward has a finite slope at these inputs."""
    calls = iter(range(1 << 20))
    return scene(lambda x: squared(x, 1 if next(calls) and not fixed else 0))


@control("Dao-AILab/flash-attention#2421")
def kernel_that_leaves_padding_unwritten(fixed: bool) -> Scene:
    """Its last row is padding, and cut away before anything reads it."""
    return scene(lambda x: doubled_rows(x.t())[:-1])


@control()
def kernel_that_masks_by_infinities(fixed: bool) -> Scene:
    """Scores of -inf, which a softmax turns into shares of 0."""
    lengths = torch.tensor([4, 3, 2, 1, 4, 2])
    return scene(lambda x: scores(x, lengths).softmax(-1))


@control()
def kernel_with_large_finite_scores(fixed: bool) -> Scene:
    """Just below the overflow."""
    return scene(lambda x: shares(x.clamp(max=80.0)), 200.0)
