"""`norm.eps`: a norm layer fed with zeros gives finite values and a gradient that a few layers can
bear.
"""

from __future__ import annotations

import copy
import warnings

import torch
from torch import nn

from stepguard.diagnose.dtypes import largest, plain, rounds_to_zero
from stepguard.preflight.answers import Pointless, Seen, count, failed, passed, some
from stepguard.preflight.inspection import Inspection
from stepguard.preflight.item import Item
from stepguard.state.rng import capture_rng, restore_rng

CHAIN = 4
"""Norms in a row that dead inputs must survive: four RMSNorms with eps=1e-20 give an infinite
float32 gradient.
"""
EPSILONS = ("eps", "variance_epsilon", "epsilon")


def _look(seen: Inspection) -> Seen:
    norms = {
        name: module for name, module in seen.model.named_modules() if _epsilon(module) is not None
    }
    if not norms:
        raise Pointless("the model has no norm layer with an eps")
    kinds: dict[tuple[str, float, str], list[str]] = {}
    for name, module in norms.items():
        kinds.setdefault(
            (type(module).__name__, _epsilon(module) or 0.0, _dtype(module)), []
        ).append(name)
    bad = []
    for (kind, eps, dtype), names in kinds.items():
        problem = _problem(norms[names[0]], eps, dtype)
        if problem:
            bad.append(f"{kind}(eps={eps:g}) in {dtype} ({some(names, 2)}): {problem}")
    if bad:
        return failed(*bad, fix="eps=1e-6 or above in float32 and bfloat16, 1e-5 in float16.")
    least = min(eps for _, eps, _ in kinds)
    return passed(
        f"{count(len(norms), 'norm layer')}, smallest eps {least:g}; zeros pass them with finite "
        f"gradients"
    )


def _epsilon(module: nn.Module) -> float | None:
    if "norm" not in type(module).__name__.lower():
        return None
    values = [getattr(module, name, None) for name in EPSILONS]
    return next((float(value) for value in values if isinstance(value, int | float)), None)


def _dtype(module: nn.Module) -> str:
    first = next(iter(module.parameters(recurse=False)), None)
    return plain(str(first.dtype)) if first is not None else "float32"


def _problem(module: nn.Module, eps: float, dtype: str) -> str:
    gain = _measured_gain(module)
    if gain is None:  # it could not be run alone: what its eps says
        if rounds_to_zero(eps, dtype) or eps == 0:
            return f"eps is 0 in {dtype}: a row of zeros is divided by 0"
        gain = eps**-0.5
    if gain != gain or gain == float("inf"):
        return "a row of zeros gives NaN or an infinite gradient"
    if gain > max(1e7, largest(dtype) ** (1 / CHAIN)):
        return (
            f"a row of zeros multiplies the gradient by {gain:.3g}; {CHAIN} in a row leave {dtype}"
        )
    return ""


def _measured_gain(module: nn.Module) -> float | None:
    """The largest gradient a copy passes back from an input of zeros; None when it cannot be called
    that way.
    """
    weight = getattr(module, "weight", None)
    width = (
        weight.numel() if isinstance(weight, torch.Tensor) else getattr(module, "num_features", 8)
    )
    dtype = weight.dtype if isinstance(weight, torch.Tensor) else torch.float32
    device = weight.device if isinstance(weight, torch.Tensor) else torch.device("cpu")
    state = capture_rng()
    for shape in ((2, width), (2, width, 2), (2, width, 2, 2), (2, width, 2, 2, 2)):
        try:
            with warnings.catch_warnings(), torch.enable_grad():
                warnings.simplefilter("ignore")
                alone = copy.deepcopy(module).requires_grad_(True)
                if isinstance(alone.weight, torch.Tensor):
                    nn.init.ones_(alone.weight)
                value = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
                out = alone(value)
                slope = (
                    torch.arange(out.numel(), dtype=out.dtype, device=device).reshape(out.shape)
                    / out.numel()
                )
                (grad,) = torch.autograd.grad(out, value, 2 * slope - 1)
            return float(grad.abs().max()) if bool(torch.isfinite(out).all()) else float("nan")
        except (RuntimeError, ValueError, TypeError, AttributeError):
            continue
        finally:
            restore_rng(state)
    return None


ITEM = Item(id="norm.eps", title="norm layers survive a row of zeros", look=_look)
