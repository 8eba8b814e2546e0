"""Measure operations that work along an axis: softmax rows, reductions, losses over targets."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stepguard.locate.bad_op import BadOp
from stepguard.records.evidence import NO_EVIDENCE, Evidence

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


def rows(bad_op: BadOp) -> Evidence:
    """Everything that can be said about rows, reduced elements and targets."""
    base = bad_op.operator.base
    found = NO_EVIDENCE
    for applies, gather in _GATHERERS:
        if applies(base):
            found |= gather(bad_op)
    return found


def _argument(bad_op: BadOp, name: str) -> Any:
    """An argument by its name in the schema, given by position or by keyword."""
    made = bad_op.invocation
    if name in made.kwargs:
        return made.kwargs[name]
    arguments = bad_op.operator.arguments
    position = arguments.index(name) if name in arguments else len(made.args)
    if position < len(made.args):
        return made.args[position]
    return None


def _softmax_rows(bad_op: BadOp) -> Evidence:
    return _masked_rows(bad_op, "self") or NO_EVIDENCE


def _attention_rows(bad_op: BadOp) -> Evidence:
    return _masked_rows(bad_op, "attn_mask") or _masked_rows(bad_op, "attn_bias") or NO_EVIDENCE


def _masked_rows(bad_op: BadOp, name: str) -> Evidence | None:
    """How many rows of this operand are masked throughout; None for no row at all."""
    read = bad_op.read(name)
    if read is None or not read.tensor.dim():
        return None
    axis = _argument(bad_op, "dim")
    if isinstance(axis, list | tuple) and axis:
        axis = axis[0]
    tensor = read.tensor
    # a boolean attention mask is True where a key may be looked at
    closed = ~tensor if tensor.dtype is torch.bool else torch.isneginf(tensor)
    dead = closed.all(dim=axis if isinstance(axis, int) else -1)
    count = int(dead.sum())
    if count:
        return Evidence(masked_rows=count, rows=dead.numel())
    return None


def _reduced(bad_op: BadOp) -> Evidence:
    read = bad_op.read("self")
    if read is None:
        return NO_EVIDENCE
    group = read.tensor.numel() // max(1, bad_op.out.numel())
    if group == 0 or (group == 1 and bad_op.operator.base in SPREAD):
        return Evidence(reduced_elements=group)
    return NO_EVIDENCE


def _targets(bad_op: BadOp) -> Evidence:
    target = _argument(bad_op, "target")
    if not isinstance(target, Tensor):
        return NO_EVIDENCE
    ignored = _argument(bad_op, "ignore_index")
    count = target.numel()
    if isinstance(ignored, int):
        count = int((target != ignored).sum())
    scores = _argument(bad_op, "self")
    impossible = isinstance(scores, Tensor) and bool(torch.isinf(scores).any())
    return Evidence(
        valid_targets=count,
        targets=target.numel(),
        zero_target_probability=count > 0 and impossible,
    )


def _probabilities(bad_op: BadOp) -> Evidence:
    target = _argument(bad_op, "target")
    if not isinstance(target, Tensor) or not target.numel():
        return NO_EVIDENCE
    low = float(target.min())
    high = float(target.max())
    if low < 0:
        return Evidence(target_out_of_domain=low)
    if high > 1:
        return Evidence(target_out_of_domain=high)
    return NO_EVIDENCE


def _negative_target(bad_op: BadOp) -> Evidence:
    """A negative target of kl_div, which torch computes as xlogy(target, target)."""
    value = bad_op.at("other")
    if value is None or value >= 0 or not math.isfinite(value):
        return NO_EVIDENCE
    return Evidence(target_out_of_domain=value)


def _zero_norm(bad_op: BadOp) -> Evidence:
    """Weight normalisation divides every row of `v` by its norm."""
    direction = _argument(bad_op, "v")
    if not isinstance(direction, Tensor):
        return NO_EVIDENCE
    rows_in_use = direction.reshape(direction.shape[0], -1).any(1)
    if bool(rows_in_use.all()):
        return NO_EVIDENCE
    return Evidence(zero_denominator=True, denominator_from="norm")


def _negative_variance(bad_op: BadOp) -> Evidence:
    variance = _argument(bad_op, "running_var")
    if not isinstance(variance, Tensor) or _argument(bad_op, "training"):
        return NO_EVIDENCE
    eps = float(_argument(bad_op, "eps") or 0.0)
    if float(variance.min()) + eps < 0:
        return Evidence(argument="negative")
    return NO_EVIDENCE


def _ctc(bad_op: BadOp) -> Evidence:
    lengths = _argument(bad_op, "input_lengths")
    wanted = _argument(bad_op, "target_lengths")
    if lengths is None or wanted is None:
        return NO_EVIDENCE
    have = torch.as_tensor(lengths).flatten()
    need = torch.as_tensor(wanted).flatten()
    short = int((have < need).sum())
    # repeated labels need a blank in between: such a target fails without being longer
    return Evidence(ctc_infeasible=short or int(torch.isinf(bad_op.out).sum()))


_GATHERERS: tuple[tuple[Callable[[str], bool], Callable[[BadOp], Evidence]], ...] = (
    (SOFTMAX.__contains__, _softmax_rows),
    (lambda base: "scaled_dot_product" in base or "efficient_attention" in base, _attention_rows),
    (REDUCES.__contains__, _reduced),
    (lambda base: base.startswith("nll_loss"), _targets),
    (PROBABILITY.__contains__, _probabilities),
    (lambda base: base == "xlogy", _negative_target),
    (lambda base: base == "_weight_norm_interface", _zero_norm),
    (lambda base: "batch_norm" in base, _negative_variance),
    (lambda base: base == "_ctc_loss", _ctc),
)
"""Which operations, by name, and what is measured there."""
