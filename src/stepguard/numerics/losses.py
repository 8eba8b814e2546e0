"""Losses over a mask, in float32, that give a zero with a graph when nothing is left to average."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from stepguard._errors import ConfigError
from stepguard.numerics.safe import safe_norm
from stepguard.tensors.values import HALVES, at_least_float32

# --- Count what these functions had to leave out or limit.


class Events:
    """Named counters. One is shared by all functions; give your own to keep a model's apart."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, torch.device], Tensor] = {}

    def add(self, name: str, happened: Tensor) -> None:
        """Add the number of true elements of `happened` (or its value, if it is a count)."""
        count = happened.detach().sum().to(torch.int64)
        key = (name, count.device)
        known = self._totals.get(key)
        # Not in place: a compiled graph returns the new total like any other output.
        self._totals[key] = count if known is None else known + count

    def counts(self) -> dict[str, int]:
        """Return all counts above 0, summed over devices; waits for the devices."""
        found: dict[str, int] = {}
        for (name, _), total in self._totals.items():
            found[name] = found.get(name, 0) + int(total)
        return {name: count for name, count in found.items() if count}

    def clear(self) -> None:
        """Start again at 0."""
        self._totals.clear()


events = Events()
"""What the functions count into when no other is given."""


# --- Losses over a mask, in float32, that give a zero with a graph when nothing is left to
# average.


def masked_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    denominator: Tensor | float | None = None,
    count: Events = events,
) -> Tensor:
    """Return the mean cross-entropy of `logits` [..., classes] over the positions that count.

    A position counts when its target is not `ignore_index` and `mask`, if given, is true. When none
    counts the loss is a zero that is still connected to the graph, and `masked_cross_entropy.empty`
    is counted. `denominator` replaces the number of positions: the number over all micro-batches
    makes accumulation exact.
    """
    if logits.shape[:-1] != targets.shape:
        raise ConfigError(
            f"masked_cross_entropy: logits {tuple(logits.shape)} do not fit targets "
            f"{tuple(targets.shape)}; "
            "logits have one more dimension, the classes, at the end."
        )
    valid = targets != ignore_index
    if mask is not None:
        valid = valid & mask.bool()
    # Selected, not multiplied: an Inf under the mask times 0 would be NaN.
    wide = torch.where(valid.unsqueeze(-1), logits, torch.zeros_like(logits)).float()
    kept = torch.where(valid, targets, torch.full_like(targets, ignore_index))
    total = F.cross_entropy(
        wide.reshape(-1, logits.shape[-1]),
        kept.reshape(-1),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="sum",
    )
    number = valid.sum()
    count.add("masked_cross_entropy.empty", number == 0)
    if denominator is None:
        denominator = number.clamp(min=1)
    return total / denominator


def masked_mean(
    values: Tensor,
    mask: Tensor,
    dim: int | tuple[int, ...] | None = None,
    *,
    keepdim: bool = False,
    count: Events = events,
) -> Tensor:
    """Return the mean where `mask` is true; 0, counted as `masked_mean.empty`, if it is empty."""
    chosen = mask.bool().expand_as(values)
    axes = tuple(range(values.dim())) if dim is None else dim
    selected = torch.where(chosen, values, torch.zeros_like(values))
    # Added in float32: a sum of half-precision numbers overflows.
    dtype = torch.float32 if values.dtype in HALVES else values.dtype
    total = selected.sum(dim=axes, keepdim=keepdim, dtype=dtype)
    number = chosen.sum(dim=axes, keepdim=keepdim)
    count.add("masked_mean.empty", number == 0)
    return total / number.clamp(min=1)


def latent_mse(
    prediction: Tensor,
    target: Tensor,
    *,
    mask: Tensor | None = None,
    weight: Tensor | float = 1.0,
    normalize: bool = False,
    count: Events = events,
) -> Tensor:
    """Return the weighted mean squared error of latents [batch, ..., features] in float32.

    `normalize` compares directions only: the scale of the prediction is then free, which breaks a
    diffusion model that predicts noise. Standardise the data instead, and leave it off. `mask` has
    the shape without features.
    """
    a = at_least_float32(prediction)
    b = at_least_float32(target)
    if normalize:
        # The inverse of the shortest length is the gradient at 0.
        shortest = max(1e-6, 64.0 / torch.finfo(prediction.dtype).max)
        a = _unit(a, shortest)
        b = _unit(b, shortest)
    errors = (a - b).square().mean(dim=-1)
    factor = torch.as_tensor(weight, device=errors.device)
    if factor.dim() and factor.dim() < errors.dim():
        factor = factor.reshape(*factor.shape, *([1] * (errors.dim() - factor.dim())))
    errors = errors * factor.to(errors.dtype)
    if mask is None:
        return errors.mean()
    return masked_mean(errors, mask, count=count)


def soft_limit(loss: Tensor, limit: float) -> Tensor:
    """Return `loss` below `limit`, and a loss that grows like a logarithm above it.

    The gradient never vanishes; a clamp would stop it exactly where it is needed.
    """
    if not limit > 0:
        raise ConfigError(f"soft_limit: limit={limit!r} must be above 0.")
    excess = (loss - limit).clamp(min=0.0)
    return torch.where(loss > limit, limit * (1.0 + torch.log1p(excess / limit)), loss)


def _unit(x: Tensor, shortest: float) -> Tensor:
    return x / safe_norm(x, dim=-1, keepdim=True).clamp(min=shortest)


# --- Weigh micro-batches by the labels they hold: a mean of their means is another loss.


def count_labels(
    targets: Tensor, *, ignore_index: int = -100, mask: Tensor | None = None
) -> Tensor:
    """Count the positions with a label, as a tensor on their device."""
    valid = targets != ignore_index
    if mask is not None:
        valid = valid & mask.bool()
    return valid.sum()


def token_share(micro_batches: Sequence[Any], count: Callable[[Any], Tensor | int]) -> Tensor:
    """Return what to divide each summed loss by, so that all add up to the mean over tokens.

    Under torch.distributed the tokens of all ranks count, and the world size is in it already,
    because DDP averages gradients. Every rank must call it. When no rank has a token it is 1.
    """
    if not micro_batches:
        raise ConfigError(
            "token_share got no micro-batch; give the list that goes into guard.step."
        )
    numbers = [torch.as_tensor(count(batch)) for batch in micro_batches]
    total = torch.stack([number.reshape(()).to(torch.float64) for number in numbers]).sum()
    if not (dist.is_available() and dist.is_initialized()):
        return total.clamp(min=1.0)
    dist.all_reduce(total)
    return total.clamp(min=1.0) / dist.get_world_size()


# --- Times, schedules and loss weights of diffusion models, always in float32 or wider: in bfloat16
# a uniform time equals exactly 1 once in 512 draws, where most schedules divide by zero.


def sample_times(
    number: int,
    *,
    eps: float = 1e-4,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw uniform times in [eps, 1] in float32, never 0."""
    if not 0.0 < eps < 1.0:
        raise ConfigError(f"sample_times: eps={eps!r} must lie between 0 and 1, for instance 1e-4.")
    uniform = torch.rand(number, device=device, generator=generator, dtype=torch.float32)
    return uniform * (1.0 - eps) + eps


def min_snr_weight(alphas: Tensor, *, predicts: str = "noise", gamma: float = 5.0) -> Tensor:
    """Return min(SNR, gamma) as a weight of the squared error of noise, data or velocity.

    Bounded by gamma (noise: by 1), also at both ends of the schedule. `alphas` are cumulative
    products.
    """
    if not gamma > 0:
        raise ConfigError(f"min_snr_weight: gamma={gamma!r} must be above 0, for instance 5.0.")
    kept = alphas.double().clamp(0.0, 1.0)
    noise = 1.0 - kept
    # min(snr, gamma) and its quotients, written without dividing by a noise or a signal of 0.
    if predicts == "noise":
        ratio = gamma * noise / torch.where(kept > 0, kept, 1.0)
        return torch.where(kept > 0, ratio.clamp(max=1.0), 1.0).float()
    snr = kept / torch.where(noise > 0, noise, 1.0)
    bounded = torch.where(kept < gamma * noise, snr, gamma)
    if predicts == "data":
        return bounded.float()
    if predicts == "velocity":
        return (bounded * noise).float()
    raise ConfigError(
        f"min_snr_weight: predicts={predicts!r} is not known; use 'noise', 'data' or 'velocity'."
    )


def ddm_weights(
    t: Tensor, *, kind: str = "exponential", limit: float = 100.0, count: Events = events
) -> tuple[Tensor, Tensor]:
    """Return data and noise weight of a decoupled diffusion loss, at most `limit`, in float32.

    `exponential`: 2 exp(1 - t) and exp(sqrt t), which are bounded by themselves. `root`: (t + 1) /
    sqrt t and sqrt(2 - t) / sqrt(1 - t), singular at 0 and 1: there the limit acts, and is counted
    as `ddm_weights.limited`.
    """
    wide = t.double().clamp(0.0, 1.0)
    if kind == "exponential":
        data = 2.0 * torch.exp(1.0 - wide)
        noise = torch.exp(wide.sqrt())
    elif kind == "root":
        tiny = torch.finfo(torch.float64).tiny
        data = (wide + 1.0) / wide.clamp(min=tiny).sqrt()
        noise = ((2.0 - wide) / (1.0 - wide).clamp(min=tiny)).sqrt()
    else:
        raise ConfigError(f"ddm_weights: kind={kind!r} is not known; use 'exponential' or 'root'.")
    count.add("ddm_weights.limited", (data > limit) | (noise > limit))
    return data.clamp(max=limit).float(), noise.clamp(max=limit).float()


# --- Doubly stochastic matrices by Sinkhorn's iteration in log space, finite for any scores.

# --- RMSNorm in float32, with an eps that is felt in the backward as well.


SMALLEST_EPS = 1e-12
"""At zero input the gradient is multiplied by 1 / sqrt(eps): by a million with this one."""


def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6) -> Tensor:
    """Return x / sqrt(mean(x**2) + eps) over the last dimension, computed in float32."""
    wide = at_least_float32(x)
    scaled = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    if weight is not None:
        scaled = scaled * weight.to(scaled.dtype)
    return scaled.to(x.dtype)


class RMSNorm(nn.Module):
    """`rms_norm` with a learned weight."""

    def __init__(self, features: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        if not SMALLEST_EPS <= eps < 1.0:
            raise ConfigError(
                f"RMSNorm: eps={eps!r} must lie between {SMALLEST_EPS:g} and 1; "
                "a smaller one multiplies gradients by more than a million where the input is 0."
            )
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps:g}"


# --- Doubly stochastic matrices by Sinkhorn's iteration in log space, finite for any scores.


class Sinkhorn(NamedTuple):
    """The matrix, and how far it is from doubly stochastic."""

    matrix: Tensor
    residual: Tensor
    """Largest distance of a row or column sum from 1, detached, on the device."""


def sinkhorn(scores: Tensor, *, iterations: int = 20) -> Sinkhorn:
    """Scale rows and columns of exp(scores) [..., n, n] to sum to 1.

    exp is taken once, of numbers that are at most 0, so no score overflows (exp alone does at 88.7
    in float32 and at 11 in float16). The last half-step is over rows: they sum to 1 to rounding,
    columns to `residual`, which is what finitely many iterations leave. Compare it with the
    tolerance you need.
    """
    if scores.dim() < 2 or scores.shape[-1] != scores.shape[-2]:
        raise ConfigError(
            f"sinkhorn: scores of shape {tuple(scores.shape)} are not square matrices [..., n, n]."
        )
    if iterations < 1:
        raise ConfigError(f"sinkhorn: iterations={iterations!r} must be at least 1.")
    log = at_least_float32(scores)
    for _ in range(iterations):
        log = log - torch.logsumexp(log, dim=-2, keepdim=True)
        log = log - torch.logsumexp(log, dim=-1, keepdim=True)
    matrix = log.exp()
    with torch.no_grad():
        columns = (matrix.sum(dim=-2) - 1.0).abs().amax()
        rows = (matrix.sum(dim=-1) - 1.0).abs().amax()
        residual = torch.maximum(columns, rows)
    return Sinkhorn(matrix.to(scores.dtype), residual)


# --- Hyper-connections: read n residual streams [batch, n, ...], mix them, write back.


def read_out(streams: Tensor, weights: Tensor) -> Tensor:
    """Return the block's input: the streams added with `weights` [batch, n]."""
    _fits("read_out", streams, weights, 2)
    return torch.einsum("bn,bn...->b...", weights.to(streams.dtype), streams)


def mix_streams(streams: Tensor, matrix: Tensor) -> Tensor:
    """Combine the streams by `matrix` [batch, n, n], whose rows are the new streams."""
    _fits("mix_streams", streams, matrix, 3)
    return torch.einsum("bnm,bm...->bn...", matrix.to(streams.dtype), streams)


def write_in(streams: Tensor, output: Tensor, weights: Tensor) -> Tensor:
    """Add the block's `output` [batch, ...] to each stream with its weight [batch, n]."""
    _fits("write_in", streams, weights, 2)
    return streams + torch.einsum("bn,b...->bn...", weights.to(output.dtype), output)


def _fits(function: str, streams: Tensor, weights: Tensor, dims: int) -> None:
    wanted_shape = (*streams.shape[:2], *streams.shape[1:2])[:dims]
    if weights.shape != wanted_shape or streams.dim() < 2:
        wanted = "[batch, n]" if dims == 2 else "[batch, n, n]"
        raise ConfigError(
            f"{function}: weights {tuple(weights.shape)} do not fit streams "
            f"{tuple(streams.shape)}; give {wanted}."
        )
