"""What might have helped: each candidate is one change of the run, and the words to make it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.optim import Optimizer

from stepguard.records import Incident, Origin, Remedy
from stepguard.records.probes import TrialOutcome
from stepguard.state.batch import batch_without
from stepguard.state.capsule import WindowStep
from stepguard.tensors.names import optimizer_parameters
from stepguard.tensors.values import HALVES

# --- What might have helped: each candidate is one change of the run, and the words to make it.


OwnFix = Callable[..., Any]
"""Gets model and optimizer; may return a loss function or a context manager for the trial."""
EPS_FACTOR = 100.0
LEAST_EPS = 1e-6
LEAST_EPS_OF_HALF = 1e-4
"""In float16 a smaller epsilon rounds to 0 beside a second moment that is 0."""
SHORT_MEMORY = 0.95
LONG_MEMORY = 0.999
VERY_SHORT_MEMORY = 0.9
STRONG_DECAY = 0.1
"""Share of the weights that one update takes away by weight decay: no training wants as much."""
RATE_JUMP = 2.0
SCALE_FACTOR = 1.0 / 16.0
LARGE_SCALE = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One change. Everything that is not named is as it was in the run."""

    name: str
    label: str
    cost: int
    """How much it changes a healthy run, 0 for nothing."""
    change: str
    """What to change so that the next run has it."""
    codes: tuple[str, ...] = ()
    """Findings whose remedy it is."""
    skip: bool = False
    """Leave the bad step out."""
    rows: tuple[int, ...] = ()
    """Samples of the bad step to leave out, in its micro-batch `micro_batch`."""
    micro_batch: int = 0
    micro_batches: tuple[int, ...] = ()
    """Whole micro-batches of the bad step to leave out."""
    rates_at_most: tuple[float, ...] = ()
    """What the learning rate of each group must not pass."""
    fresh_state: bool = False
    """Forget the optimizer's state before the bad step."""
    lr_factor: float = 1.0
    scale_factor: float = 1.0
    clip_norm: float | None = None
    settings: tuple[tuple[str, Any], ...] = ()
    """Hyperparameters of every parameter group that has them."""
    wide: str | None = None
    """Module to run in float32; "" is the whole model."""
    own: OwnFix | None = None
    fix: Remedy | None = None
    """A change of the program's lines."""

    @property
    def value(self) -> float | None:
        """The one number that is new, where it is one."""
        return self.clip_norm or dict(self.settings).get("eps")

    @property
    def late(self) -> bool:
        """Does it change nothing before the bad step?"""
        early = self.settings or self.wide is not None or self.own is not None or self.fix
        scaled = self.lr_factor != 1.0 or self.scale_factor != 1.0 or self.clip_norm is not None
        return not (early or scaled or self.rates_at_most)


UNCHANGED = Candidate(name="", label="", cost=0, change="")
NOTHING = Candidate(
    name="nothing",
    label="do nothing: the same steps again",
    cost=0,
    change="nothing to change: the same steps do not fail again",
    codes=("SG702",),
)
SKIP = Candidate(
    name="skip",
    label="skip the step",
    cost=2,
    change='nothing to change: Policy(actions=("skip", ...)) is the default',
    skip=True,
)


def lower_rate(factor: float, cost: int, rates: tuple[float, ...]) -> Candidate:
    """The learning rate of every group times `factor`."""
    label = f"learning rate x{factor:g}"
    change = f"multiply the learning rate by {factor:g}"
    if rates:
        label += f" ({rates[0]:.3g} -> {rates[0] * factor:.3g})"
        change = f"lr={rates[0] * factor:.3g} in place of {rates[0]:.3g}"
    return Candidate(
        name=f"lr x{factor:g}",
        label=label,
        cost=cost,
        change=change,
        codes=("SG505", "SG504"),
        lr_factor=factor,
    )


def candidates(
    optimizer: Optimizer,
    incident: Incident,
    bad: WindowStep,
    *,
    way: Sequence[WindowStep],
    usual_norm: float | None,
    own: OwnFix | None = None,
) -> list[Candidate]:
    """What is worth a trial after this incident, the cheapest first; `NOTHING` is not in it.

    `way`: the steps that led to the bad one.
    """
    finite = [rate for rate in bad.lr if math.isfinite(rate) and rate > 0.0]
    rates = tuple(finite) if len(finite) == len(bad.lr) else ()
    found = _of_panel(incident)
    found += [SKIP, lower_rate(0.5, 8, rates), lower_rate(0.1, 11, rates)]
    found += _left_out(incident, bad)
    found += _of_rates(way, bad)
    found += _of_settings(optimizer)
    found += _of_decay(optimizer)
    found += _in_float32(incident.origin)
    if bad.scale >= LARGE_SCALE:
        found.append(_smaller_scale(bad.scale))
    if usual_norm is not None:
        found.append(_harder_clipping(usual_norm, bad.clip_norm))
    if _spoiled_state(incident):
        found.append(_fresh_state())
    if own is not None:
        found.append(_own(own))
    return sorted(found, key=lambda candidate: candidate.cost)


def _of_panel(incident: Incident) -> list[Candidate]:
    """The change of the program that the panel offers, where the step was run with it."""
    for finding in incident.findings[:1]:
        for remedy in finding.remedies:
            if remedy.proven:
                return [
                    Candidate(
                        name="fix",
                        label=f"the fix for {finding.code} in your own line",
                        cost=1,
                        change=f"{remedy.title} (`stepguard fix` writes it)",
                        codes=(finding.code,),
                        fix=remedy,
                    )
                ]
    return []


def _left_out(incident: Incident, bad: WindowStep) -> list[Candidate]:
    """Without the samples or micro-batches that are proven guilty."""
    origin = incident.origin
    change = 'nothing to change: Policy(actions=("leave_out", ...)) is the default; repair the data'
    if origin is not None and origin.samples:
        micro = origin.micro_batch or 0
        if batch_without(bad.micro_batches[micro], origin.samples) is not None:
            return [
                Candidate(
                    name="leave out",
                    label=f"leave out {origin.culprits}",
                    cost=1,
                    change=change,
                    codes=("SG101", "SG102", "SG103", "SG104"),
                    rows=origin.samples,
                    micro_batch=micro,
                )
            ]
    guilty = incident.reading.bad_micro_batches
    if not guilty or len(guilty) >= len(bad.micro_batches):
        return []
    numbers = ", ".join(str(index + 1) for index in guilty)
    return [
        Candidate(
            name="leave out",
            label=f"leave out micro-batch {numbers} of {len(bad.micro_batches)}",
            cost=1,
            change=change,
            codes=("SG101", "SG102", "SG103", "SG104"),
            micro_batches=guilty,
        )
    ]


def _of_rates(way: Sequence[WindowStep], bad: WindowStep) -> list[Candidate]:
    """Where a rate has jumped on the way to the bad step, or with it: the rate it had."""
    if not way or not way[0].lr:
        return []
    first = way[0]
    for one in (*way[1:], bad):
        for now, then in zip(one.lr, first.lr, strict=False):
            if now <= RATE_JUMP * then:
                continue
            # also where it is NaN now
            return [
                Candidate(
                    name="keep lr",
                    label=f"keep the learning rate of step {first.index} ({then:.3g})",
                    cost=3,
                    change=f"the rate rises to {now:.3g} at step {one.index}: keep {then:.3g}",
                    codes=("SG504", "SG802"),
                    rates_at_most=first.lr,
                )
            ]
    return []


def _of_settings(optimizer: Optimizer) -> list[Candidate]:
    """Larger epsilon, another memory of the second moment: where the optimizer has them."""
    found: list[Candidate] = []
    kind = type(optimizer).__name__
    group = optimizer.param_groups[0]
    eps = group.get("eps")
    if isinstance(eps, float):
        larger = max(eps * EPS_FACTOR, _least_eps(optimizer))
        found.append(
            Candidate(
                name="eps",
                label=f"larger epsilon ({eps:g} -> {larger:g})",
                cost=6,
                change=f"{kind}(..., eps={larger:g})",
                codes=("SG502",),
                settings=(("eps", larger),),
            )
        )
    betas = group.get("betas")
    if isinstance(betas, tuple | list) and len(betas) == 2:
        memory = LONG_MEMORY if betas[1] < VERY_SHORT_MEMORY else SHORT_MEMORY
        if betas[1] != memory:
            found.append(
                Candidate(
                    name="beta2",
                    label=f"beta2 {betas[1]:g} -> {memory:g}",
                    cost=9,
                    change=f"{kind}(..., betas=({betas[0]:g}, {memory:g}))",
                    settings=(("betas", (betas[0], memory)),),
                )
            )
    return found


def _least_eps(optimizer: Optimizer) -> float:
    dtypes = {parameter.dtype for parameter in optimizer_parameters(optimizer)}
    return LEAST_EPS_OF_HALF if torch.float16 in dtypes else LEAST_EPS


def _of_decay(optimizer: Optimizer) -> list[Candidate]:
    group = optimizer.param_groups[0]
    decay = group.get("weight_decay", 0.0)
    rate = group.get("lr", 0.0)
    if not isinstance(decay, float | int) or float(rate) * decay < STRONG_DECAY:
        return []
    return [
        Candidate(
            name="no decay",
            label=f"weight decay {decay:g} -> 0",
            cost=7,
            change=f"{type(optimizer).__name__}(..., weight_decay=0), or far less than {decay:g}",
            codes=("SG505",),
            settings=(("weight_decay", 0.0),),
        )
    ]


def _in_float32(origin: Origin | None) -> list[Candidate]:
    """Where the bad value was born in half precision: its module, and the whole model."""
    if origin is None:
        return []
    operands = [*origin.inputs, *([origin.output] if origin.output is not None else [])]
    names = {str(dtype).removeprefix("torch.") for dtype in HALVES}
    if not any(operand.dtype in names for operand in operands):
        return []
    codes = ("SG301", "SG302", "SG801")
    found = [
        Candidate(
            name="float32",
            label="the whole model in float32",
            cost=10,
            change="train without autocast and half-precision weights, or in bfloat16",
            codes=codes,
            wide="",
        )
    ]
    if origin.module:
        module = origin.module
        found.append(
            Candidate(
                name="wider module",
                label=f"{module} in float32",
                cost=5,
                change=f"run {module} under torch.autocast(device_type, enabled=False), in float32",
                codes=codes,
                wide=module,
            )
        )
    return found


def _smaller_scale(scale: float) -> Candidate:
    smaller = scale * SCALE_FACTOR
    return Candidate(
        name="loss scale",
        label=f"smaller loss scale ({scale:g} -> {smaller:g})",
        cost=4,
        change=f"GradScaler(init_scale={smaller:g}), or GuardConfig(loss_scale={smaller:g})",
        codes=("SG506",),
        scale_factor=SCALE_FACTOR,
    )


def _harder_clipping(usual: float, clip_norm: float | None) -> Candidate:
    limit = usual
    if clip_norm is not None:
        limit = min(usual, clip_norm / 2.0)
    limit = float(f"{limit:.2g}")
    before = "not clipped" if clip_norm is None else f"{clip_norm:g}"
    return Candidate(
        name="clip",
        label=f"clip the gradients to {limit:g} ({before} before)",
        cost=7,
        change=f"GuardConfig(clip_norm={limit:g})",
        codes=("SG501", "SG505"),
        clip_norm=limit,
    )


def _spoiled_state(incident: Incident) -> bool:
    if any(finding.code == "SG503" for finding in incident.findings):
        return True
    return any(name.startswith("opt:") for name in incident.reading.bad_state)


def _fresh_state() -> Candidate:
    return Candidate(
        name="fresh state",
        label="forget the optimizer's state before the step",
        cost=7,
        change="optimizer.state.clear() after loading, or a checkpoint from before the damage",
        codes=("SG503",),
        fresh_state=True,
    )


def _own(own: OwnFix) -> Candidate:
    name = getattr(own, "__name__", type(own).__name__)
    return Candidate(
        name="own", label=f"your own: {name}", cost=3, change=f"what {name} does", own=own
    )


def answered(candidate: Candidate, codes: Iterable[str]) -> tuple[str, ...]:
    """Those of the incident's findings that this is the remedy of."""
    return tuple(code for code in codes if code in candidate.codes)


# --- Order the outcomes: what works first, then what ends lower, then what changes training less.


NOISE_SHARE = 0.02
"""Losses that differ by less than this share are equal."""
NOISE_OF_BATCHES = 0.25
"""So are those that differ by less than this part of what batches of the run differ by."""


def ranked(
    outcomes: Sequence[TrialOutcome], recorded: Sequence[float], healthy: float | None = None
) -> list[TrialOutcome]:
    """Return the best first.

    `recorded`: losses of the run on the way to the bad step. `healthy`: the loss of the good state
    that all trials began with; who ends no higher has lost nothing, however low others end.
    """
    working = [outcome for outcome in outcomes if outcome.works]
    failing = [outcome for outcome in outcomes if not outcome.works]
    order: list[TrialOutcome] = []
    noise = _noise_of_batches(recorded)
    while working:
        equal = _equal_to_best(working, noise, healthy)
        order += sorted(equal, key=lambda outcome: outcome.cost)
        working = [outcome for outcome in working if outcome not in equal]
    return order + sorted(failing, key=_longest_first)


def no_worse(one: TrialOutcome, other: TrialOutcome) -> bool:
    """Does it end at a loss that is not clearly higher?"""
    mine = _loss(one)
    theirs = _loss(other)
    if mine is None or theirs is None:
        return True
    return mine <= theirs + NOISE_SHARE * abs(theirs)


def _equal_to_best(
    working: Sequence[TrialOutcome], noise: float, healthy: float | None
) -> list[TrialOutcome]:
    """Those that lost nothing, or end where the best does, as far as so few batches can tell."""
    losses = [loss for outcome in working if (loss := _loss(outcome)) is not None]
    if not losses:
        return list(working)
    best = min(losses)
    if healthy is not None and math.isfinite(healthy):
        best = max(best, healthy)
    limit = best + max(NOISE_SHARE * abs(best), noise)
    return [outcome for outcome in working if _at_most(_loss(outcome), limit)]


def _at_most(loss: float | None, limit: float) -> bool:
    return loss is None or loss <= limit


def _loss(outcome: TrialOutcome) -> float | None:
    return judged_by(outcome.loss, outcome.held_out)


def judged_by(loss: float | None, held_out: float | None) -> float | None:
    """What counts: batches that were not trained on, where there are any."""
    return loss if held_out is None else held_out


def _noise_of_batches(recorded: Sequence[float]) -> float:
    """How much losses of neighbouring steps differ, without the trend of the run."""
    finite = [loss for loss in recorded if math.isfinite(loss)]
    if len(finite) < 3:
        return 0.0
    steps = [abs(later - earlier) for earlier, later in pairwise(finite)]
    return NOISE_OF_BATCHES * statistics.median(steps)


def _longest_first(outcome: TrialOutcome) -> tuple[bool, int, int]:
    """Of those that fail, the one that got furthest, then the cheapest."""
    return bool(outcome.why_not), -len(outcome.losses), outcome.cost
