"""Half precision and infinities: TO DO says the user's line, values and dtype, and mends it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from zoo.catalogue import chosen
from zoo.tools import run_guarded

from diagnose.test_remedies import Scale, incident_of
from stepguard.records import Finding


def entropy(net: Scale, hidden: Tensor) -> Tensor:
    log_p = (net.gain * hidden).masked_fill(hidden == 0, -math.inf).log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1).mean()


def ratio(net: Scale, hidden: Tensor) -> Tensor:
    new = (net.gain * hidden).masked_fill(hidden == 0, -math.inf)
    old = hidden.masked_fill(hidden == 0, -math.inf)
    return torch.exp(new - old).mean()


def spread(net: Scale, row: Tensor) -> Tensor:
    kept = (net.gain * row)[:, :1]
    return kept.std(1).mean()


def root(net: Scale, power: Tensor) -> Tensor:
    energy = net.gain * power
    return torch.where(power > 0, torch.sqrt(energy), 0.0).mean()


def flat(net: Scale, height: Tensor) -> Tensor:
    h = net.gain * height
    return torch.atan(height.new_ones(2) / h).mean()


def capped(net: Scale, logit: Tensor) -> Tensor:
    score = net.gain * logit * 1000
    return torch.exp(score).clamp(max=100.0).mean()


ZERO = torch.tensor([[0.0, 1.0], [0.0, 2.0]])
CASES: list[tuple[Callable[[Scale, Tensor], Tensor], str, str]] = [
    (entropy, "SG206", "-(log_p.exp() * log_p.masked_fill(log_p.exp() == 0, 0.0)).sum(-1).mean()"),
    (ratio, "SG206", "torch.exp(new - old.masked_fill(old.isinf(), 0.0)).mean()"),
    (spread, "SG205", "safe_sqrt(kept.var(1, correction=min(1, kept.shape[1] - 1))).mean()"),
    (root, "SG402", "torch.where(power > 0, torch.sqrt(torch.where(power > 0, energy, 1.0)), 0.0)"),
    (flat, "SG403", "torch.atan(height.new_ones(2) / torch.where(h == 0, 1e-12, h)).mean()"),
    (capped, "SG403", "score.clamp(max=10.0).exp().clamp(max=100.0).mean()"),
]


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize(
    ("loss_of", "code", "expected"), CASES, ids=[case[0].__name__ for case in CASES]
)
def test_line_that_is_offered_is_theirs_and_finite(
    loss_of: Callable[[Scale, Tensor], Tensor], code: str, expected: str
) -> None:
    first = incident_of(loss_of, ZERO).findings[0]
    assert first.code == code
    offered = first.remedies[0].snippet.splitlines()
    assert offered[-1].startswith(f"return {expected}")
    source = [*offered[:-1], *inspect.getsource(loss_of).splitlines()]
    source[-1] = f"    {offered[-1]}"
    space = {"torch": torch, "math": math, "Tensor": Tensor, "Scale": Scale}
    exec("\n".join(source), space)
    net = Scale()
    loss = space[loss_of.__name__](net, ZERO)  # type: ignore[operator]
    loss.backward()
    assert loss.isfinite() and net.gain.grad is not None and net.gain.grad.isfinite()


def first_finding(name: str, run_dir: Path) -> Finding:
    """The first finding of a case of the zoo."""
    (case,) = chosen([name])
    incidents, _ = run_guarded(case.build(False), str(run_dir))
    return next(one for one in incidents if one.findings).findings[0]


@pytest.mark.parametrize(
    ("name", "code", "title"),
    [
        ("residual_stream_overflows_fp16", "SG301", "Compute `x + added` in float32: `x` reaches"),
        ("t5_ffn_fp16_overflow", "SG301", "Compute `block.1.ff.wo` in float32 and outside of auto"),
        ("rotary_position_beyond_half", "SG301", "Leave `position` in float32: it reaches 70000"),
        ("fp16_grad_accumulation_overflow", "SG301", "Divide the loss by 4, the number of micro-"),
        ("sum_over_a_long_clip_in_half", "SG301", "Compute `x.sum(1)` in float32: it adds 7200 el"),
        ("half_precision_weights_overflow_in_the_update", "SG301", "Keep `weight` in float32 and"),
        ("loss_weight_overflows_half_gradient", "SG301", 'Compute `(model(b["x"] * 1e-3) * d'),
        ("log_epsilon_vanishes_in_half", "SG302", "Write 1e-4 for `1e-8`, which is 0 in float16"),
        ("rms_norm_epsilon_vanishes_in_half", "SG302", "Give `norm` an epsilon of 1e-4: 1e-08 is"),
        ("label_smoothing_zero_times_inf", "SG206", "Leave the product out where the second fact"),
        ("transient_inf_absorbed_forward", "SG403", "Keep what `torch.sqrt(8 * width**2)` is made"),
    ],
)
def test_incident_of_the_zoo_is_answered_in_its_own_words(
    name: str, code: str, title: str, tmp_path: Path
) -> None:
    found = first_finding(name, tmp_path)
    assert found.code == code
    assert found.remedies[0].title.startswith(title), found.remedies[0].title
    assert not any("`self`" in said or "`other`" in said for said in found.evidence)
