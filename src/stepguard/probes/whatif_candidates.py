"""What might have helped: each candidate is one change of the run, and the words to make it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
FRESH_STATE = Candidate(
    name="fresh state",
    label="forget the optimizer's state before the step",
    cost=7,
    change="optimizer.state.clear() after loading, or a checkpoint from before the damage",
    codes=("SG503",),
    fresh_state=True,
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
    # What its findings, samples and operands suggest.
    of_incident: list[Candidate] = []
    remedies = [(one.code, fix) for one in incident.findings[:1] for fix in one.remedies]
    # the change of the program that the panel offers
    for code, remedy in [(code, remedy) for code, remedy in remedies if remedy.proven][:1]:
        of_incident.append(
            Candidate(
                name="fix",
                label=f"the fix for {code} in your own line",
                cost=1,
                change=f"{remedy.title} (`stepguard fix` writes it)",
                codes=(code,),
                fix=remedy,
            )
        )
    of_incident += _left_out(incident, bad)
    if incident.origin is not None:
        of_incident += _in_float32(incident.origin)
    spoiled = any(name.startswith("opt:") for name in incident.reading.bad_state)
    if spoiled or any(finding.code == "SG503" for finding in incident.findings):
        of_incident.append(FRESH_STATE)
    found = [SKIP, *of_incident, *_of_rates(way, bad), *_of_settings(optimizer)]
    if bad.scale >= LARGE_SCALE:
        smaller = bad.scale * SCALE_FACTOR
        found.append(
            Candidate(
                name="loss scale",
                label=f"smaller loss scale ({bad.scale:g} -> {smaller:g})",
                cost=4,
                change=f"GradScaler(init_scale={smaller:g}), or GuardConfig("
                f"loss_scale={smaller:g})",
                codes=("SG506",),
                scale_factor=SCALE_FACTOR,
            )
        )
    if usual_norm is not None:
        before = "not clipped"
        if bad.clip_norm is not None:
            before = f"{bad.clip_norm:g}"
            usual_norm = min(usual_norm, bad.clip_norm / 2.0)
        limit = float(f"{usual_norm:.2g}")
        found.append(
            Candidate(
                name="clip",
                label=f"clip the gradients to {limit:g} ({before} before)",
                cost=7,
                change=f"GuardConfig(clip_norm={limit:g})",
                codes=("SG501", "SG505"),
                clip_norm=limit,
            )
        )
    if own is not None:
        name = getattr(own, "__name__", type(own).__name__)
        found.append(
            Candidate(
                name="own", label=f"your own: {name}", cost=3, change=f"what {name} does", own=own
            )
        )
    return sorted(found, key=lambda candidate: candidate.cost)


def _left_out(incident: Incident, bad: WindowStep) -> list[Candidate]:
    """Without the samples or micro-batches that are proven guilty."""
    origin = incident.origin
    leave_out = Candidate(
        name="leave out",
        label="",
        cost=1,
        change='nothing to change: Policy(actions=("leave_out", ...)) is the default; repair the '
        "data",
        codes=("SG101", "SG102", "SG103", "SG104"),
    )
    if origin is not None and origin.samples:
        micro = origin.micro_batch or 0
        if batch_without(bad.micro_batches[micro], origin.samples) is not None:
            label = f"leave out {origin.culprits}"
            return [replace(leave_out, label=label, rows=origin.samples, micro_batch=micro)]
    guilty = incident.reading.bad_micro_batches
    if not guilty or len(guilty) >= len(bad.micro_batches):
        return []
    numbers = ", ".join(str(index + 1) for index in guilty)
    label = f"leave out micro-batch {numbers} of {len(bad.micro_batches)}"
    return [replace(leave_out, label=label, micro_batches=guilty)]


def _in_float32(origin: Origin) -> list[Candidate]:
    """Where the bad value was born in half precision: its module, and the whole model."""
    halves = {str(dtype).removeprefix("torch.") for dtype in HALVES}
    dtypes = {operand.dtype for operand in (*origin.inputs, origin.output) if operand is not None}
    if not dtypes & halves:
        return []
    whole = Candidate(
        name="float32",
        label="the whole model in float32",
        cost=10,
        change="train without autocast and half-precision weights, or in bfloat16",
        codes=("SG301", "SG302", "SG801"),
        wide="",
    )
    module = origin.module
    if not module:
        return [whole]
    part = replace(
        whole,
        name="wider module",
        label=f"{module} in float32",
        cost=5,
        change=f"run {module} under torch.autocast(device_type, enabled=False), in float32",
        wide=module,
    )
    return [whole, part]


def _of_rates(way: Sequence[WindowStep], bad: WindowStep) -> list[Candidate]:
    """Lower rates; and where a rate has jumped on the way to the bad step, the rate it had."""
    found: list[Candidate] = []
    known = bool(bad.lr) and all(math.isfinite(rate) and rate > 0.0 for rate in bad.lr)
    for factor, cost in ((0.5, 8), (0.1, 11)):
        label = f"learning rate x{factor:g}"
        change = f"multiply the learning rate by {factor:g}"
        if known:
            rate = bad.lr[0]
            label += f" ({rate:.3g} -> {rate * factor:.3g})"
            change = f"lr={rate * factor:.3g} in place of {rate:.3g}"
        found.append(
            Candidate(
                name=f"lr x{factor:g}",
                label=label,
                cost=cost,
                change=change,
                codes=("SG505", "SG504"),
                lr_factor=factor,
            )
        )
    first = way[0].lr if way else ()
    for one in (*way[1:], bad):
        for now, then in zip(one.lr, first, strict=False):
            if now <= RATE_JUMP * then:
                continue
            # also where it is NaN now
            jump = Candidate(
                name="keep lr",
                label=f"keep the learning rate of step {way[0].index} ({then:.3g})",
                cost=3,
                change=f"the rate rises to {now:.3g} at step {one.index}: keep {then:.3g}",
                codes=("SG504", "SG802"),
                rates_at_most=first,
            )
            return [*found, jump]
    return found


def _of_settings(optimizer: Optimizer) -> list[Candidate]:
    """Larger epsilon, another memory of the second moment, no decay: where there are such."""
    found: list[Candidate] = []
    kind = type(optimizer).__name__
    group = optimizer.param_groups[0]
    eps = group.get("eps")
    if isinstance(eps, float):
        halves = any(one.dtype is torch.float16 for one in optimizer_parameters(optimizer))
        larger = max(eps * EPS_FACTOR, LEAST_EPS_OF_HALF if halves else LEAST_EPS)
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
    decay = group.get("weight_decay", 0.0)
    if isinstance(decay, float | int) and float(group.get("lr", 0.0)) * decay >= STRONG_DECAY:
        found.append(
            Candidate(
                name="no decay",
                label=f"weight decay {decay:g} -> 0",
                cost=7,
                change=f"{kind}(..., weight_decay=0), or far less than {decay:g}",
                codes=("SG505",),
                settings=(("weight_decay", 0.0),),
            )
        )
    return found


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
    noise = _noise_of_batches(recorded)
    floor = -math.inf
    if healthy is not None and math.isfinite(healthy):
        floor = healthy
    working = [outcome for outcome in outcomes if outcome.works]
    order: list[TrialOutcome] = []
    while working:
        limit = math.inf
        known = [loss for loss in map(_loss, working) if loss > -math.inf]
        if known:
            best = max(min(known), floor)
            limit = best + max(NOISE_SHARE * abs(best), noise)
        # they lost nothing, or end where the best does, as far as so few batches can tell
        equal = [outcome for outcome in working if _loss(outcome) <= limit]
        order += sorted(equal, key=lambda outcome: outcome.cost)
        working = [outcome for outcome in working if outcome not in equal]
    failing = [outcome for outcome in outcomes if not outcome.works]
    # of those that fail, the one that got furthest, then the cheapest
    failing.sort(key=lambda one: (bool(one.why_not), -len(one.losses), one.cost))
    return order + failing


def _noise_of_batches(recorded: Sequence[float]) -> float:
    """How much losses of neighbouring steps differ, without the trend of the run."""
    finite = [loss for loss in recorded if math.isfinite(loss)]
    steps = [abs(later - earlier) for earlier, later in pairwise(finite)]
    return NOISE_OF_BATCHES * statistics.median(steps) if len(steps) > 1 else 0.0


def no_worse(one: TrialOutcome, other: TrialOutcome) -> bool:
    """Does it end at a loss that is not clearly higher?"""
    limit = _loss(other)
    if math.isfinite(limit):
        return _loss(one) <= limit + NOISE_SHARE * abs(limit)
    return True


def _loss(outcome: TrialOutcome) -> float:
    """Below every loss where none is known: then it counts as equal to any."""
    loss = judged_by(outcome.loss, outcome.held_out)
    return -math.inf if loss is None else loss


def judged_by(loss: float | None, held_out: float | None) -> float | None:
    """What counts: batches that were not trained on, where there are any."""
    return loss if held_out is None else held_out
