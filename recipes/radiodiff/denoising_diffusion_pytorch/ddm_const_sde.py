"""Decoupled diffusion with a constant drift: x_t = x0 + C t + sqrt(t) n with C = -x0; the network
predicts C and n.

`get_loss` and the weights stand where the source report has them. Three ways of treating bad values
can be chosen:

    none       the values as they are (the default: the guard must see them)
    probe      the same, and a line is printed for every tensor that is not finite
    seedfix    the report's fix: nan_to_num on predictions and losses, clamps on weights. It makes
    the loss look finite
               while the gradients are not; kept so that the table can show it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from stepguard.numerics import ddm_weights

Treatment = Literal["none", "probe", "seedfix"]
PARTS = ("loss_simple", "loss_vlb")
"""The named parts of the loss, as the original logs them."""
Say = Callable[[str], None]


class LatentDiffusion(nn.Module):
    """Times, losses and sampling around a UNet."""

    def __init__(
        self,
        unet: nn.Module,
        *,
        eps: float,
        time_grid: int = 0,
        weighting_loss: bool = True,
        use_l1: bool = False,
        weight_limit: float = 100.0,
        vlb_weight: float = 0.0,
        treatment: Treatment = "none",
        say: Say = print,
    ) -> None:
        super().__init__()
        self.unet = unet
        self.eps, self.time_grid = eps, time_grid
        self.weighting_loss, self.use_l1, self.weight_limit = weighting_loss, use_l1, weight_limit
        self.vlb_weight, self.treatment, self._say = vlb_weight, treatment, say
        self.largest_weight = torch.zeros(())
        """Of the last forward pass."""

    def times(self, number: int, generator: torch.Generator) -> Tensor:
        """On a grid that contains 0 where `time_grid` is set; `eps` is the floor, and 0 leaves it
        out.
        """
        if self.time_grid:
            t = (
                torch.randint(0, self.time_grid + 1, (number,), generator=generator)
                / self.time_grid
            )
        else:
            t = torch.rand(number, generator=generator)
        return t.clamp(min=self.eps) if self.eps else t

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The named parts of the loss for latents `x_start`, `noise`, times `t` and `condition`."""
        x_start, noise, t = batch["x_start"], batch["noise"], batch["t"]
        for name in ("x_start", "noise", "condition"):
            self._probe(name, batch[name])
        k = t[:, None, None, None]
        x = x_start - x_start * k + k.sqrt() * noise
        data, predicted = self.unet(x, t, batch["condition"])
        self._probe("C_pred", data)
        self._probe("noise_pred", predicted)
        first, second = self._weights(t)
        self.largest_weight = torch.maximum(first.max(), second.max()).detach()
        loss = first * self.get_loss(data, -x_start, mean=False) + second * self.get_loss(
            predicted, noise, mean=False
        )
        if self.treatment == "seedfix":
            loss = torch.nan_to_num(loss.clamp(max=1000.0), nan=0.0)
        self._probe("loss_simple", loss)
        vlb = loss.new_zeros(())  # not 0 times an error, which may be infinite
        if self.vlb_weight:
            rebuilt = x - data * k - k.sqrt() * predicted
            vlb = self.vlb_weight * self.get_loss(rebuilt, x_start)
        return dict(zip(PARTS, (loss.mean(), vlb), strict=True))

    def get_loss(self, pred: Tensor, target: Tensor, mean: bool = True) -> Tensor:
        """Squared error (plus absolute, halved, with `use_l1`); one a sample unless `mean`."""
        self._probe("pred", pred, where=" in get_loss")
        if self.treatment == "seedfix":
            pred = torch.nan_to_num(pred, nan=0.0).clamp(-1e6, 1e6)
            target = target.clamp(-1e6, 1e6)
        error = (pred - target).square().mean((1, 2, 3))
        if self.use_l1:
            error = (error + (pred - target).abs().mean((1, 2, 3))) / 2.0
        return error.mean() if mean else error

    def _weights(self, t: Tensor) -> tuple[Tensor, Tensor]:
        if not self.weighting_loss:
            return torch.ones_like(t), torch.ones_like(t)
        return ddm_weights(t, kind="exponential", limit=self.weight_limit)

    def _probe(self, name: str, tensor: Tensor, where: str = "") -> None:
        if self.treatment == "none" or bool(torch.isfinite(tensor).all()):
            return
        rows = (
            (~torch.isfinite(tensor)).reshape(len(tensor), -1).any(1).nonzero().flatten().tolist()
        )
        count = int((~torch.isfinite(tensor)).sum())
        self._say(
            f"Warning: {name} contains NaN values{where}: {count} of {tensor.numel()}, samples "
            f"{rows}"
        )

    @torch.no_grad()
    def sample(
        self, condition: Tensor, shape: tuple[int, ...], generator: torch.Generator, steps: int = 5
    ) -> Tensor:
        """Latents for these conditions in a few reverse steps."""
        x, t = torch.randn(shape, generator=generator), torch.ones(shape[0])
        for index in range(steps):
            size = t.clone() if index == steps - 1 else torch.full_like(t, 1.0 / steps)
            data, noise = self.unet(x, t, condition)
            k, s = t[:, None, None, None], size[:, None, None, None]
            start = x - data * k - k.sqrt() * noise
            spread = torch.sqrt((s * (k - s) / k).clamp(min=0.0))
            x = (
                x
                + start * s
                - s / k.sqrt() * noise
                + spread * torch.randn(x.shape, generator=generator)
            )
            t = t - size
        return x
