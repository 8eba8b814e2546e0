"""TO DO in the user's own words: their line, tensors, rates and ranks; and it mends the step."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo.catalogue import chosen
from zoo.tools import run_guarded

from diagnose.literals import BACKWARD, SPIKE, at, found, origin, spans, traced_in
from report.literals import MASKED_ROW
from stepguard import Guard, GuardConfig, Probes
from stepguard.diagnose import RunFacts
from stepguard.diagnose.engine import diagnose
from stepguard.diagnose.source_line import expression_of
from stepguard.engine.incident.run_facts import run_facts
from stepguard.records import Evidence, Incident, Origin, Reading

QUIET = GuardConfig(terminal="quiet")
ZERO = torch.tensor([[0.0, 1.0], [0.0, 2.0]])
UNIT = torch.tensor([[1.0, 0.5], [0.25, 0.5]])

# --- a line of the program, written anew


class Scale(nn.Module):
    """A weight of 1: gradients reach it, and values stay what the test wants them to be."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))


def log_of_zero(net: Scale, noise: Tensor) -> Tensor:
    level = noise * net.gain
    return level.log().mean()


def division(net: Scale, total: Tensor) -> Tensor:
    duration = total * net.gain
    return (1.5 / duration).mean()


def slope_of_sqrt(net: Scale, power: Tensor) -> Tensor:
    energy = power * net.gain
    return torch.sqrt(energy).mean()


def slope_of_acos(net: Scale, cosine: Tensor) -> Tensor:
    similarity = cosine * net.gain
    return torch.acos(similarity).mean()


def slope_of_asin(net: Scale, sine: Tensor) -> Tensor:
    height = sine * net.gain
    return height.asin().mean()


def slope_of_pow(net: Scale, rest: Tensor) -> Tensor:
    focus = rest * net.gain
    return (focus**0.5).mean()


def masked_softmax(net: Scale, score: Tensor) -> Tensor:
    hidden = (score * net.gain).masked_fill(score == 0, -math.inf)[:, :1]
    return hidden.softmax(dim=-1).mean()


def exp_of_large(net: Scale, logit: Tensor) -> Tensor:
    energy = logit * 1000 * net.gain
    return energy.exp().mean()


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


Loss = Callable[[Scale, Tensor], Tensor]
LINES: list[tuple[Loss, str, str]] = [
    (log_of_zero, "SG202", "safe_log(level).mean()"),
    (division, "SG201", "(safe_div(1.5, duration)).mean()"),
    (slope_of_sqrt, "SG401", "safe_sqrt(energy).mean()"),
    (slope_of_acos, "SG401", "safe_acos(similarity).mean()"),
    (slope_of_asin, "SG401", "safe_asin(height).mean()"),
    (slope_of_pow, "SG401", "(safe_pow(focus, 0.5)).mean()"),
    (masked_softmax, "SG204", "safe_softmax(hidden, dim=-1).mean()"),
    (exp_of_large, "SG203", "energy.clamp(max=10.0).exp().mean()"),
    (entropy, "SG206", "-(log_p.exp() * log_p.masked_fill(log_p.exp() == 0, 0.0)).sum(-1).mean()"),
    (ratio, "SG206", "torch.exp(new - old.masked_fill(old.isinf(), 0.0)).mean()"),
    (spread, "SG205", "safe_sqrt(kept.var(1, correction=min(1, kept.shape[1] - 1))).mean()"),
    (
        root,
        "SG402",
        "torch.where(power > 0, torch.sqrt(torch.where(power > 0, energy, 1.0)), 0.0).mean()",
    ),
    (flat, "SG403", "torch.atan(height.new_ones(2) / torch.where(h == 0, 1e-12, h)).mean()"),
    (capped, "SG403", "score.clamp(max=10.0).exp().clamp(max=100.0).mean()"),
]


def incident_of(net: nn.Module, loss_fn: Callable[[Tensor], Tensor], batch: Tensor) -> Incident:
    with Guard(net, torch.optim.SGD(net.parameters(), lr=0.1), config=QUIET) as guard:
        incident = guard.step(loss_fn, batch).incident
    assert incident is not None
    return incident


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize(("loss_of", "code", "expected"), LINES, ids=[one[1] for one in LINES])
def test_line_that_is_offered_is_theirs_and_finite(loss_of: Loss, code: str, expected: str) -> None:
    """What is offered is run: loss and gradient are finite with the functions it names."""
    batch, net = UNIT if loss_of in (slope_of_acos, slope_of_asin) else ZERO, Scale()
    first = incident_of(net, lambda batch: loss_of(net, batch), batch).findings[0]
    assert first.code == code
    (remedy,) = first.remedies
    *imports, offered = remedy.snippet.splitlines()
    assert (offered, len(imports)) == (f"return {expected}", int("safe_" in expected))
    source = [*imports, *inspect.getsource(loss_of).splitlines()[:-1], f"    {offered}"]
    space: dict[str, Any] = {"torch": torch, "math": math, "Tensor": Tensor, "Scale": Scale}
    exec("\n".join(source), space)
    net = Scale()
    loss = space[loss_of.__name__](net, batch.clone().requires_grad_())
    loss.backward()
    assert loss.isfinite() and (net.gain.grad is None or net.gain.grad.isfinite())


def in_line(line: str) -> Origin:
    return Origin(step=0, phase="loss", op="aten.log", source="a.py:3", context=(f"3 | {line}",))


def test_line_is_read_but_not_guessed_at() -> None:
    for line in ("loss = a.log() + b.log()", "loss = (", ""):
        assert expression_of(in_line(line)) is None
    goes_on = expression_of(in_line("loss = torch.stack([p.log(),"))
    assert goes_on is not None and goes_on.operands == ("p",)
    remedy = goes_on.instead("safe_log(p)", "it stays finite")
    assert remedy.snippet.splitlines()[-1] == "loss = torch.stack([safe_log(p),"


# --- incidents of the zoo are answered in their own words


ZOO = {
    "residual_stream_overflows_fp16": "SG301: Compute `x + added` in float32: `x` reaches",
    "t5_ffn_fp16_overflow": "SG301: Compute `block.1.ff.wo` in float32 and outside of auto",
    "rotary_position_beyond_half": "SG301: Keep `position` in float32: it reaches 70000",
    "fp16_grad_accumulation_overflow": "SG301: Divide the loss by 4, the number of micro-",
    "sum_over_a_long_clip_in_half": "SG301: Compute `x.sum(1)` in float32: it adds 7200 el",
    "half_precision_weights_overflow_in_the_update": "SG301: Keep `weight` in float32 and",
    "loss_weight_overflows_half_gradient": 'SG301: Compute `(model(b["x"] * 1e-3) * d',
    "log_epsilon_vanishes_in_half": "SG302: Write 1e-4 for `1e-8`, which is 0 in float16",
    "rms_norm_epsilon_vanishes_in_half": "SG302: Give `norm` an epsilon of 1e-4: 1e-08 is",
    "label_smoothing_zero_times_inf": "SG206: Skip the product where the second fact",
    "transient_inf_absorbed_forward": "SG403: Keep what `torch.sqrt(8 * width**2)` is made",
    "clip_norm_overflow_zeroes_all_grads": "SG501: ... largest element is 1e+20 ... 1e18",
    "adam_eps_underflow_fp16": "SG502: ... Keep `emb.weight` in float32 (it is float16)",
    "rmsprop_without_epsilon": "SG502: ... Give RMSprop an epsilon ... RMSprop(..., eps=1e-8)",
    "adamp_eps_after_rsqrt": "SG502: ... Put the eps of LateEpsilon under the root",
    "moments_loaded_with_nan": "SG503: ... Load `exp_avg` from where the weights come from",
    "second_moment_saved_in_fp16": "SG503: ... 52 of its elements were rounded to 0",
    "rate_of_one_group_in_the_wrong_unit": 'SG504: ... group 1 back to 0.05 ... [1]["lr"] = 0.05',
    "schedule_divides_by_zero_warmup": "SG504: ... lr of group 0 to nan at step 3",
    "lr_too_high_divergence": "SG505: ... Give SGD a lower lr than 0.8",
    "uninitialised_parameter": 'SG601: ... Fill `bg` ... model.get_parameter("bg")',
    "bad_weights_loaded_in_mid_run": "SG601: ... wrote into `fc1.weight` between step 1",
    "biaffine_weight_from_torch_tensor": 'SG601: ... Fill `biaffine.U` ... "biaffine.U"',
    "bn_running_var_nan_in_checkpoint": 'SG602: ... `bn.running_var` ... get_submodule("bn")',
    "position_table_never_filled": "SG602: ... Fill `position` before its first use (3 of 3",
    "centre_that_is_no_buffer": 'SG602: ... `self.centre` of `head` as a buffer ... "centre"',
}
"""Code, title and snippet of the first remedy."""


@pytest.mark.parametrize("name", ZOO)
def test_incident_of_the_zoo_is_answered_in_its_own_words(name: str, tmp_path: Path) -> None:
    (case,) = chosen([name])
    incidents, _ = run_guarded(case.build(False), str(tmp_path))
    finding = next(one for one in incidents if one.findings).findings[0]
    first = finding.remedies[0]
    said = f"{finding.code}: {first.title}\n{first.snippet}"
    assert re.fullmatch(".*".join(map(re.escape, ZOO[name].split(" ... "))) + ".*", said, re.DOTALL)
    assert not any("`self`" in said or "`other`" in said for said in finding.evidence)


def test_bad_samples_are_named() -> None:
    batch = torch.ones(4, 2)
    batch[3, 0] = math.nan
    net = nn.Linear(2, 1)
    incident = incident_of(net, lambda batch: net(batch).mean(), batch)
    assert incident.findings[0].remedies[0].title.startswith("Drop sample 3 where")


class Contrast(nn.Module):
    """Its temperature is learned, and walks through 0 in steps as large as itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.temperature = nn.Parameter(torch.tensor(0.07))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x) / self.temperature
        return out


def test_parameter_that_ran_away_is_named() -> None:
    torch.manual_seed(0)
    net = Contrast()
    groups = [
        {"params": net.body.parameters(), "lr": 1e-4},
        {"params": [net.temperature], "lr": 3e-2},
    ]
    optimizer = torch.optim.Adam(groups)
    config = GuardConfig(terminal="quiet", probes=Probes(anomalies="act"))
    with Guard(net, optimizer, config=config) as guard:
        x = torch.randn(64, 4)
        for step in range(60):
            optimizer.param_groups[1]["lr"] = 1e-5 if step < 50 else 3e-2
            guard.step(lambda x: net(x).pow(2).mean() * 1e-3, x)
        facts = run_facts(guard._context, Reading(step=60))
    assert facts.moved_most is not None and facts.moved_most[0] == "temperature"


def test_runaway_parameter_comes_first_in_what_to_do() -> None:
    spike = replace(MASKED_ROW, origin=None, verdict=replace(MASKED_ROW.verdict, kind="spike"))
    facts = RunFacts(update_ratio=0.007, moved_most=("temperature", 0.4))
    (finding,) = [found for found in diagnose(spike, facts) if found.code == "SG505"]
    assert "`temperature` moved most: by 0.4 of its own size" in finding.evidence
    assert finding.remedies[0].title.startswith("Give `temperature` a learning rate of its own")


def test_remedies_of_a_page_are_shown_without_their_example() -> None:
    finding = found("SG505", None, **SPIKE)
    assert finding.remedies and not any(remedy.snippet for remedy in finding.remedies)


# --- state, ranks and settings: parameter, slot, group, rate, rank and step are named

SLOT = at("state", None, spans(0.0, 1.0, nan=1), tensor="opt:exp_avg", parameter="fc.bias")
IN_SLOT = {"kind": "nonfinite_optimizer_state", "loss": 1.0}
COMPILED = at("loss", "mul", reproduced=False, compiled_only=True, module="blocks.1")
ONE_DRIFTED = {"ranks": "2", "agree": "0, 1", "tensor": "fc.weight", "parameters": 3}
RATES = {"ranks": "0, 1", "rates": "0.1 and 0.2"}
COLLAPSE = BACKWARD | {"kind": "scaler_collapse", "scale": 0.25, "bad_grads": ("head.weight",)}
NAMED: list[tuple[str, Origin | None, dict[str, Any], int, str, str]] = [
    (
        "SG503",
        SLOT,
        IN_SLOT | {"facts": RunFacts(optimizer="Adam", betas=(0.9, 0.99))},
        1,
        "Or clear the state of `fc.bias`: it is rebuilt within some 100 steps",
        'optimizer.state.pop(model.get_parameter("fc.bias"), None)',
    ),
    (
        "SG506",
        None,
        COLLAPSE,
        0,
        "at 0.25 the gradients are still not finite, first in `head.weight`",
        "",
    ),
    (
        "SG603",
        origin("checkpoint", None, tensor="param:head.weight"),
        {},
        0,
        "`param:head.weight` of this one is not finite",
        "",
    ),
    (
        "SG701",
        None,
        {"bad_ranks": (2,), "facts": RunFacts(world_size=4), "step": 7},
        0,
        "Check the data and the device of rank 2: step 7 was bad there",
        "",
    ),
    (
        "SG703",
        COMPILED,
        {},
        0,
        "Exclude `blocks.1` from the compiled graph",
        'module = model.get_submodule("blocks.1")',
    ),
    (
        "SG704",
        None,
        {"kind": "replica_drift", "said": ONE_DRIFTED},
        0,
        "Give rank 2 `fc.weight` and the rest from rank 0: Policy with 'heal'",
        "",
    ),
    (
        "SG704",
        None,
        {"kind": "replica_drift", "said": RATES},
        0,
        "Give ranks 0, 1 the same learning rate: 0.1 and 0.2",
        "",
    ),
    (
        "SG705",
        None,
        {"kind": "same_data", "said": {"samplers": "seed 1 and seed 2"}},
        0,
        "on all: now seed 1 and seed 2",
        "",
    ),
    (
        "SG802",
        None,
        {
            "kind": "lr_mismatch",
            "lr": (0.1, 0.5),
            "facts": RunFacts(configured_lr=(0.1, 0.01), resumed=True),
        },
        0,
        "0.01 for group 1 (it runs with 0.5)",
        'optimizer.param_groups[1]["lr"] = 0.01',
    ),
    (
        "SG803",
        None,
        {"kind": "zero_loss", "loss": 0.0, "grad_norm": 0.0},
        0,
        "it is 0 with a gradient of 0",
        "",
    ),
    (
        "SG803",
        None,
        {"kind": "no_labels", "loss": 0.0, "labels": 0, "step": 3},
        0,
        "none of the targets of step 3 counts",
        "",
    ),
]


@pytest.mark.parametrize(
    ("code", "where", "reading", "which", "title", "snippet"), NAMED, ids=[row[0] for row in NAMED]
)
def test_what_to_do_names_what_it_is_about(
    code: str, where: Origin | None, reading: dict[str, Any], which: int, title: str, snippet: str
) -> None:
    remedy = found(code, where, **reading).remedies[which]
    assert title in remedy.title and remedy.snippet.startswith(snippet)


@pytest.mark.parametrize(
    ("evidence", "expected"),
    [
        (
            Evidence(moves=("`self.calls` of the loss",)),
            "Keep `self.calls` of the loss in a buffer",
        ),
        (Evidence(different_losses=(1.0, 2.0)), "two replays gave 1 and 2"),
        (Evidence(same_bits=False), "Make step 1 reproducible"),
        (Evidence(same_bits=True), "writes into the batch of step 1 after"),
    ],
)
def test_what_a_replay_showed_decides_what_to_do(evidence: Evidence, expected: str) -> None:
    where = origin("loss", "aten.mul", method="replay", reproduced=False, evidence=evidence)
    assert expected in found("SG702", where).remedies[0].title


def test_dtype_that_was_asked_for_is_named() -> None:
    facts = RunFacts(configured_dtype="bfloat16", scaling="dynamic", param_dtypes=("float16",))
    titles = [one.title for one in found("SG801", traced_in("float16"), facts=facts).remedies]
    assert titles[0] == "Name bfloat16 where the autocast context is opened: it gives float16"
    assert titles[1].endswith("does not unscale gradients in float16")
    unscaled = found("SG801", traced_in("float16"), facts=RunFacts(scaling="none"))
    assert unscaled.remedies[0].title.startswith("Scale the loss, or autocast to bfloat16")
