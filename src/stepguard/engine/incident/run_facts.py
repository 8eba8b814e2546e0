"""Collect plain numbers about run and optimizer for the diagnosing rules, which see no torch.

Read only once something is wrong: some of them read every parameter.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from stepguard.diagnose import RunFacts
from stepguard.diagnose.case import Scaling
from stepguard.engine.context import Context
from stepguard.engine.drivers.schedule import scale_rates
from stepguard.records import Decision, Incident, Reading, Verdict
from stepguard.records.incident import Action
from stepguard.tensors.names import named_parameters, names_by_id, optimizer_parameters
from stepguard.tensors.values import dtype_name

# --- Say what was decided about a bad step, and what was really done about it.


INSTEAD: dict[Action, Action] = {
    "heal": "stop",
    "rewind": "stop",
    "retry": "skip",
    "undo": "skip",
}
"""What remains of an action that failed."""


def not_applied(incident: Incident) -> Incident:
    """The incident where a fault of the guard's own kept the decision from being applied.

    The step is dropped all the same. Damaged weights that were to be rewound are still there, so
    the run stops.
    """
    decision = incident.decision
    if decision is None:
        return incident
    action = INSTEAD.get(decision.action)
    if action is None:
        return incident
    why = f"{decision.action} failed because of an internal fault of stepguard"
    return replace(incident, decision=replace(decision, action=action, reason=why))


def change_settings(context: Context, decision: Decision) -> None:
    """Continue with the rate, epsilon or clipping that was decided on."""
    groups = context.optimizer.param_groups
    if decision.lr_factor is not None:
        factors = [decision.lr_factor] * len(groups)
        scale_rates(context.optimizer, context.scheduler, factors)
    if decision.new_eps is not None:
        for group in groups:
            if "eps" in group:
                group["eps"] = decision.new_eps
    if decision.new_clip is not None:
        context.config = replace(context.config, clip_norm=decision.new_clip)


def let_through(verdict: Verdict, incident: Incident | None) -> bool:
    """A finite step that is only reported, or that nothing could be decided on, is committed."""
    if not verdict.finite_anomaly:
        return False
    return incident is None or incident.decision is None or incident.decision.action == "note"


def rewinds(incident: Incident | None) -> bool:
    """Was the step answered by a rewind, which takes back its update as well?"""
    if incident is None or incident.decision is None:
        return False
    return incident.decision.action == "rewind"


def leaves_out(incident: Incident | None) -> bool:
    """Is the step to go on without what is proven guilty?"""
    if incident is None or incident.decision is None:
        return False
    return incident.decision.action == "leave_out"


def without_micro_batches(incident: Incident, dropped: Sequence[int], count: int) -> Incident:
    """Say in the decision which micro-batches were really left out."""
    assert incident.decision is not None
    words = micro_batch_words(dropped, count)
    decision = replace(incident.decision, left_out=words, dropped_micro_batches=tuple(dropped))
    return replace(incident, decision=decision)


def micro_batch_words(dropped: Sequence[int], count: int) -> str:
    """`micro-batch 2 of 4`, counted from 1 as people do."""
    said = "micro-batches " if len(dropped) > 1 else "micro-batch "
    said += ", ".join(str(index + 1) for index in dropped)
    return f"{said} of {count}"


def skipped_after_all(incident: Incident | None) -> Incident | None:
    """Say that the whole step was dropped, because nothing could be cut out of it."""
    if incident is None or incident.decision is None or not leaves_out(incident):
        return incident
    return replace(
        incident, decision=replace(incident.decision, action="skip", left_out="the step")
    )


# --- Collect plain numbers about run and optimizer for the diagnosing rules, which see no torch.


PRECISIONS = {"bf16": "bfloat16", "fp16": "float16"}
FAR_ABOVE = 1e6
"""Times the smallest gradient whose square is not 0: above it, a square of 0 has been lost."""


def run_facts(context: Context, reading: Reading) -> RunFacts:
    """Collect what the rules may know beyond the incident itself."""
    history = context.history
    optimizer = context.optimizer
    first_group: dict[str, Any] = {}
    if optimizer.param_groups:
        first_group = optimizer.param_groups[0]
    ratio = None
    most = None
    if history.rates:
        ratio = update_ratio(optimizer, history.rates[-1])
        most = moved_most(context, history.rates[-1])
    dtypes = {dtype_name(p.dtype) for p in context.parameters}
    return RunFacts(
        lr_history=(*history.rates, reading.lr),
        configured_lr=history.configured_lr,
        first_lr=history.first_lr,
        initial_lr=tuple(_declared_rate(group) for group in optimizer.param_groups),
        update_ratio=ratio,
        moved_most=most,
        lost_squares=lost_squares(optimizer),
        losses=tuple(history.losses),
        grad_norms=tuple(history.norms),
        param_dtypes=tuple(sorted(dtypes)),
        optimizer=type(optimizer).__name__,
        eps=_number(first_group.get("eps")),
        betas=_numbers(first_group.get("betas")),
        clip_norm=context.config.clip_norm,
        configured_dtype=PRECISIONS.get(os.environ.get("ACCELERATE_MIXED_PRECISION", "").lower()),
        scaling=_scaling(context),
        world_size=context.agreement.size,
        committed=history.committed,
        resumed=context.run.resumed,
        just_loaded=context.run.resumed and context.step == context.run.resumed_at,
        outlier=_outlier(context),
    )


def _scaling(context: Context) -> Scaling:
    if context.scaling():
        return "dynamic"
    if context.scales.static != 1.0:
        return "static"
    return "none"


def _outlier(context: Context) -> tuple[int, str, float] | None:
    if context.memory.outliers is None or context.memory.outliers.committed_one is None:
        return None
    seen = context.memory.outliers.committed_one
    return seen.step, seen.name, seen.norm / seen.usual


def _declared_rate(group: Mapping[str, Any]) -> float | None:
    """The highest rate that the group's schedule declares; None where there is no schedule."""
    initial = _number(group.get("initial_lr"))
    peak = _number(group.get("max_lr"))
    if initial is None or peak is None:
        return initial if peak is None else peak
    return max(initial, peak)


def _number(value: Any) -> float | None:
    if isinstance(value, int | float):
        return float(value)
    return None


def _numbers(values: Any) -> tuple[float, ...]:
    if not isinstance(values, tuple | list):
        return ()
    return tuple(map(float, values))


# --- what the optimizer's memory says about its last update


def update_ratio(
    optimizer: Optimizer, rates: Sequence[float], last_norm: float | None = None
) -> float | None:
    """Norm of the last update, made with `rates`, over the norm of its weights; None if unknown.

    An optimizer without memory (plain SGD) made it of the last gradient, whose norm is `last_norm`.
    """
    moves, weights = _last_moves(optimizer, rates)
    moved = _norm(moves)
    if not moves and last_norm is not None and type(optimizer) is SGD:
        weights = list(filter(_is_plain, (p.data for p in optimizer_parameters(optimizer))))
        moved = max(rates, default=0.0) * last_norm
    total = _norm(weights) or math.nan
    ratio = moved / total + _decay(optimizer, rates)
    return ratio if math.isfinite(ratio) else None


def _last_moves(optimizer: Optimizer, rates: Sequence[float]) -> tuple[list[Tensor], list[Tensor]]:
    """The last update of each parameter whose optimizer remembers it, and these parameters."""
    moves: list[Tensor] = []
    weights: list[Tensor] = []
    for group, rate in zip(optimizer.param_groups, rates, strict=False):
        if not math.isfinite(rate):
            continue
        for parameter in group["params"]:
            direction = _direction(group, optimizer.state.get(parameter, {}))
            if direction is not None:
                moves.append(rate * direction)
                weights.append(parameter.detach())
    return moves, weights


def moved_most(context: Context, rates: Sequence[float]) -> tuple[str, float] | None:
    """The parameter whose last update was largest beside its own size; None if that is unknown."""
    names = names_by_id(named_parameters(context.roots))
    most: tuple[str, float] | None = None
    for group, rate in zip(context.optimizer.param_groups, rates, strict=False):
        for parameter in group["params"]:
            name = names.get(id(parameter))
            moved = _relative_move(
                parameter, rate, _direction(group, context.optimizer.state.get(parameter, {}))
            )
            if name is None or moved is None:
                continue
            if most is None or moved > most[1]:
                most = (name, moved)
    return most


def _relative_move(parameter: Tensor, rate: float, direction: Tensor | None) -> float | None:
    """Relative move of a parameter. None for one that starts at 0: any move of it is large."""
    if direction is None or not _is_plain(parameter.data):
        return None
    size = _norm([parameter.detach()])
    moved = rate * _norm([direction])
    before = size - moved
    if before <= 0.0 and parameter.numel() > 1:
        return None
    return moved / size if size > 0.0 and math.isfinite(moved / size) else None


def _decay(optimizer: Optimizer, rates: Sequence[float]) -> float:
    """Share of the weights that weight decay alone takes off."""
    largest = 0.0
    for group, rate in zip(optimizer.param_groups, rates, strict=False):
        largest = max(largest, rate * float(group.get("weight_decay") or 0.0))
    return largest


def _direction(group: dict[str, Any], state: Any) -> Tensor | None:
    """Adam's update from its moments, SGD's from its momentum; for a rate of 1."""
    if not isinstance(state, Mapping):
        return None
    moments = _moments(state)
    betas = group.get("betas", ())
    if moments is None or len(betas) != 2:
        momentum = state.get("momentum_buffer")
        return momentum.float() if _is_plain(momentum) else None
    mean, square = moments
    steps = max(1.0, float(state.get("step", 1.0)))
    # Adam divides by how much of each average has been filled in so far
    mean = mean.float() / (1.0 - float(betas[0]) ** steps)
    square = square.float() / (1.0 - float(betas[1]) ** steps)
    update: Tensor = mean / (square.sqrt() + float(group.get("eps", 1e-8)))
    return update


def lost_squares(optimizer: Optimizer) -> int:
    """Count elements with a mean gradient but no mean square of it: the mean over 0 is huge.

    No training leaves them behind. Small squares vanish when a checkpoint keeps them in half
    precision. Gradients so small that the square is 0 in its own dtype are not counted.
    """
    found = 0
    for state in optimizer.state.values():
        moments = _moments(state)
        if moments is not None:
            mean, square = moments
            representable = mean.abs() > math.sqrt(torch.finfo(square.dtype).tiny) * FAR_ABOVE
            found += int(((square == 0) & representable).sum())
    return found


def _moments(state: Any) -> tuple[Tensor, Tensor] | None:
    """Adam's mean and mean square of one parameter's gradients; None where they are not kept."""
    if not isinstance(state, Mapping):
        return None
    mean = state.get("exp_avg")
    square = state.get("exp_avg_sq")
    if _is_plain(mean) and _is_plain(square) and mean.shape == square.shape:
        return mean, square
    return None


def _is_plain(value: Any) -> TypeGuard[Tensor]:
    """Not sharded (a norm would be a collective), not sparse, not complex."""
    return type(value) is Tensor and value.layout is torch.strided and value.is_floating_point()


def _norm(tensors: list[Tensor]) -> float:
    squares = 0.0
    for tensor in tensors:
        squares += float(torch.linalg.vector_norm(tensor.float())) ** 2
    return math.sqrt(squares)
