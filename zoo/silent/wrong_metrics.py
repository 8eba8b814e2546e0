"""Numbers that alone are wrong: a metric is NaN or Inf while the training is unharmed. No code
names them; the line that reports one is of kind `metric`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zoo.silent.loops import Loop
from zoo.silent.plant import plant

Metric = Callable[[Tensor, Tensor], Tensor | float]


def measure(loop: Loop, name: str, metric: Metric) -> None:
    """Follow this metric of every batch beside the loss."""
    loss = loop.loss

    def measured(output: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            loop.follow(name, metric(output, targets))
        return loss(output, targets)

    loop.loss = measured


@plant("metric", "classifier")
def precision_of_a_class_that_is_never_predicted(loop: Loop, wrong: bool) -> None:
    """0 / 0 where nobody predicts the class; the twin counts at least one."""

    def precision(output: Tensor, targets: Tensor) -> Tensor:
        chosen = output.argmax(-1) == output.shape[-1]
        right = (chosen & (targets == output.shape[-1])).sum()
        return right / (chosen.sum() if wrong else chosen.sum().clamp_min(1))

    measure(loop, "precision", precision)


@plant("metric", "transformer")
def perplexity_of_a_summed_loss(loop: Loop, wrong: bool) -> None:
    """The exponential of a sum overflows; the twin takes that of the mean."""

    def perplexity(output: Tensor, targets: Tensor) -> Tensor:
        logits = output.flatten(0, -2)
        reduction = "sum" if wrong else "mean"
        return torch.nn.functional.cross_entropy(
            logits, targets.flatten(), reduction=reduction
        ).exp()

    measure(loop, "perplexity", perplexity)


@plant("metric", "denoiser")
def signal_to_noise_of_an_empty_part(loop: Loop, wrong: bool) -> None:
    """The mean of a part that no batch has; the twin takes all of it."""

    def ratio(output: Tensor, targets: Tensor) -> Tensor:
        error = (output - targets).square().flatten(1)
        return error[:, error.shape[1] :].mean() if wrong else error.mean()

    measure(loop, "error", ratio)
