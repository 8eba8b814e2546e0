"""Facts on operations that work along an axis: softmax rows, reductions, losses over targets."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from stepguard.locate.bad_op import Birth
from stepguard.locate.facts import fact

SOFTMAX = (
    "_softmax",
    "_log_softmax",
    "_safe_softmax",
    "logsumexp",
    "softmax",
    "log_softmax",
    "_softmax_backward_data",
)
SPREAD = ("std", "var", "var_mean", "std_mean")
REDUCES = (
    "mean",
    "sum",
    "amax",
    "amin",
    "max",
    "min",
    "median",
    "nanmean",
    "logsumexp",
    "prod",
    *SPREAD,
)
PROBABILITY = ("binary_cross_entropy", "kl_div")


def rows(birth: Birth) -> list[str]:
    """Everything that can be said about rows, reduced elements and targets."""
    base = birth.operator.base
    notes: list[str] = []
    if base in SOFTMAX:
        notes += _masked_rows(birth, "self")
    if "scaled_dot_product" in base or "efficient_attention" in base:
        notes += _masked_rows(birth, "attn_mask") or _masked_rows(birth, "attn_bias")
    if base in REDUCES:
        notes += _reduced(birth)
    if base.startswith("nll_loss"):
        notes += _targets(birth)
    if base in PROBABILITY:
        notes += _probabilities(birth)
    if base == "xlogy":
        notes += _negative_target(birth)
    if base == "_weight_norm_interface":
        notes += _zero_norm(birth)
    if "batch_norm" in base:
        notes += _negative_variance(birth)
    if base == "_ctc_loss":
        notes += _ctc(birth)
    return notes


def _argument(birth: Birth, name: str) -> Any:
    """An argument by its name in the schema, given by position or by keyword."""
    args, kwargs = birth.made_by.args, birth.made_by.kwargs
    if name in kwargs:
        return kwargs[name]
    arguments = birth.operator.arguments
    position = arguments.index(name) if name in arguments else len(args)
    return args[position] if position < len(args) else None


def _masked_rows(birth: Birth, name: str) -> list[str]:
    read = birth.read(name)
    if read is None or not read.tensor.dim():
        return []
    axis = _argument(birth, "dim")
    axis = axis[0] if isinstance(axis, list | tuple) and axis else axis
    tensor = read.tensor
    closed = ~tensor if tensor.dtype is torch.bool else torch.isneginf(tensor)
    dead = closed.all(dim=axis if isinstance(axis, int) else -1)
    count = int(dead.sum())
    return [fact("masked_rows", count), fact("rows", dead.numel())] if count else []


def _reduced(birth: Birth) -> list[str]:
    read = birth.read("self")
    if read is None:
        return []
    group = read.tensor.numel() // max(1, birth.out.numel())
    if group == 0:
        return [fact("reduced", 0)]
    return ["one_element"] if group == 1 and birth.operator.base in SPREAD else []


def _targets(birth: Birth) -> list[str]:
    target = _argument(birth, "target")
    ignored = _argument(birth, "ignore_index")
    if not isinstance(target, Tensor):
        return []
    valid = (
        target != ignored if isinstance(ignored, int) else torch.ones_like(target, dtype=torch.bool)
    )
    count = int(valid.sum())
    notes = [fact("valid_targets", count), fact("targets", target.numel())]
    log_probabilities = _argument(birth, "self")
    if (
        count
        and isinstance(log_probabilities, Tensor)
        and bool(torch.isinf(log_probabilities).any())
    ):
        notes.append(fact("target_probability", "zero"))
    return notes


def _probabilities(birth: Birth) -> list[str]:
    target = _argument(birth, "target")
    if not isinstance(target, Tensor) or not target.numel():
        return []
    low, high = float(target.min()), float(target.max())
    worst = low if low < 0 else high
    return [fact("target_out_of_domain", worst)] if low < 0 or high > 1 else []


def _negative_target(birth: Birth) -> list[str]:
    """torch computes `target * log(target)` as xlogy in kl_div, where a negative target is outside
    the domain.
    """
    value = birth.at("other")
    return (
        [fact("target_out_of_domain", value)]
        if value is not None and value < 0 and not math.isinf(value)
        else []
    )


def _zero_norm(birth: Birth) -> list[str]:
    """Weight normalisation divides every row of `v` by its norm."""
    direction = _argument(birth, "v")
    if not isinstance(direction, Tensor) or bool(
        direction.reshape(direction.shape[0], -1).any(1).all()
    ):
        return []
    return [fact("denominator", "zero"), fact("denominator_from", "norm")]


def _negative_variance(birth: Birth) -> list[str]:
    variance, eps = _argument(birth, "running_var"), _argument(birth, "eps")
    if not isinstance(variance, Tensor) or _argument(birth, "training"):
        return []
    low = float(variance.min()) + float(eps or 0.0)
    return [fact("argument", "negative"), fact("argument_value", low)] if low < 0 else []


def _ctc(birth: Birth) -> list[str]:
    lengths, wanted = _argument(birth, "input_lengths"), _argument(birth, "target_lengths")
    if lengths is None or wanted is None:
        return []
    have, need = torch.as_tensor(lengths).flatten(), torch.as_tensor(wanted).flatten()
    short = int((have < need).sum())
    return [fact("ctc_infeasible", short or int(torch.isinf(birth.out).sum()))]
