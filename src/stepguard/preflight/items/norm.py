"""Norm layers: a row of zeros must give finite values and a gradient that a few layers can bear."""

from __future__ import annotations

import copy
import math
import warnings

import torch
from torch import Tensor, nn

from stepguard.diagnose.case import largest, rounds_to_zero
from stepguard.diagnose.case import plain as real_format
from stepguard.preflight.inspection import Inspection, item
from stepguard.preflight.subject import Answer, NotApplicable, failed, passed
from stepguard.report.phrases import count, first_few
from stepguard.state.rng import kept_rng

CHAIN = 4
"""Norms in a row that zeros must survive: four RMSNorms with eps=1e-20 overflow float32."""
LARGEST_GAIN = 1e7
"""Gradients that one norm layer may amplify by so much in every dtype."""
EPSILONS = ("eps", "variance_epsilon", "epsilon")


@item("norm.eps", "norm layers survive a row of zeros")
def eps(run: Inspection) -> Answer:
    total = 0
    kinds: dict[tuple[str, float, str], list[str]] = {}
    for name, module in run.model.named_modules():
        epsilon = _epsilon(module)
        if epsilon is not None:
            total += 1
            kind = (type(module).__name__, epsilon, _dtype(module))
            kinds.setdefault(kind, []).append(name)
    if not kinds:
        raise NotApplicable("the model has no norm layer with an eps")
    bad = []
    for (title, epsilon, dtype), names in kinds.items():
        problem = _problem(run.model.get_submodule(names[0]), epsilon, dtype)
        if problem:
            bad.append(f"{title}(eps={epsilon:g}) in {dtype} ({first_few(names, 2)}): {problem}")
    if bad:
        return failed(*bad, fix="eps=1e-6 or above in float32 and bfloat16, 1e-5 in float16.")
    least = min(epsilon for _, epsilon, _ in kinds)
    return passed(
        f"{count(total, 'norm layer')}, smallest eps {least:g}; zeros pass them with finite "
        "gradients"
    )


def _epsilon(module: nn.Module) -> float | None:
    """The eps of a layer whose class is called a norm, however the library spells it."""
    if "norm" not in type(module).__name__.lower():
        return None
    for name in EPSILONS:
        value = getattr(module, name, None)
        if isinstance(value, int | float):
            return float(value)
    return None


def _dtype(module: nn.Module) -> str:
    for parameter in module.parameters(recurse=False):
        return real_format(str(parameter.dtype))
    return "float32"


def _problem(module: nn.Module, epsilon: float, dtype: str) -> str:
    gain = _measured_gain(module)
    if gain is None:
        # The layer could not be run alone: judge it by its eps.
        if rounds_to_zero(epsilon, dtype) or epsilon == 0:
            return f"eps is 0 in {dtype}: a row of zeros is divided by 0"
        gain = epsilon**-0.5
    if not math.isfinite(gain):
        return "a row of zeros gives NaN or an infinite gradient"
    if gain > max(LARGEST_GAIN, largest(dtype) ** (1 / CHAIN)):
        return (
            f"a row of zeros multiplies the gradient by {gain:.3g}; {CHAIN} in a row leave {dtype}"
        )
    return ""


def _measured_gain(module: nn.Module) -> float | None:
    """Largest gradient a copy passes back from zeros; None if it takes no input we know of."""
    width = getattr(module, "num_features", 8)
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor):
        width = weight.numel()
    # How many dimensions an input must have is not written on a layer: try them.
    for shape in ((2, width), (2, width, 2), (2, width, 2, 2), (2, width, 2, 2, 2)):
        with kept_rng(), warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            try:
                return _gain(copy.deepcopy(module).requires_grad_(True), shape)
            except (RuntimeError, ValueError, TypeError, AttributeError):
                continue
    return None


def _gain(layer: nn.Module, shape: tuple[int, ...]) -> float:
    dtype = torch.float32
    device = torch.device("cpu")
    if isinstance(layer.weight, Tensor):
        # A weight of 0 would hide the gradient.
        nn.init.ones_(layer.weight)
        dtype = layer.weight.dtype
        device = layer.weight.device
    value = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
    out = layer(value)
    # A slope, because the gradient of a norm layer is 0 where all outputs get the same gradient.
    slope = torch.arange(out.numel(), dtype=out.dtype, device=device).reshape(out.shape)
    (grad,) = torch.autograd.grad(out, value, 2 * (slope / out.numel()) - 1)
    if not bool(torch.isfinite(out).all()):
        return math.nan
    return float(grad.abs().max())
