"""Bad values that the optimizer makes from finite gradients, and norms that overflow."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import Optimizer

from stepguard.locate.calls import ancestors
from stepguard.locate.modules import ModuleSpans
from stepguard.locate.operands import summarise
from stepguard.locate.origin_record import line_of
from stepguard.locate.replay import Replayer, ReplayError
from stepguard.locate.source import context, spell
from stepguard.locate.tracer import Tracer
from stepguard.records.evidence import Evidence
from stepguard.records.origin import Origin, with_evidence
from stepguard.records.reading import Reading
from stepguard.state.isolation import untouched
from stepguard.state.step import Step
from stepguard.tensors.names import named_parameters, names_by_id
from stepguard.tensors.values import is_finite

Gradients = dict[int, Tensor]


def update_origin(step: Step, reading: Reading) -> Origin:
    """Run the update again on copies of parameters, gradients and optimizer state."""
    seen = reading.bad_state[0] if reading.bad_state else None
    origin = Origin(
        step=reading.step,
        phase="optimizer",
        tensor=seen,
        method="evidence",
        evidence=_rates(reading),
    )
    gradients = _gradients(step)
    if not gradients:
        return origin
    twin, originals = _twin(step.optimizer, gradients)
    if step.clip_norm is not None and any(p.grad is not None for p in originals):
        clip_grad_norm_(list(originals), step.clip_norm)
    tracer = Tracer(ModuleSpans({}), stage="optimizer")
    names = names_by_id(named_parameters(step.named_roots()))
    for parameter, original in originals.items():
        tracer.store(f"param:{names.get(id(original), '')}", parameter)
        for slot, value in twin.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tracer.store(f"opt:{slot}", value)
    try:
        with torch.no_grad(), tracer:
            twin.step()
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"[:200]
        origin = with_evidence(origin, Evidence(replay_error=failure))
        return replace(origin, remarks=(f"the replay failed: {failure}",))
    return _from_trace(origin, tracer, originals, names, twin)


def _from_trace(
    origin: Origin,
    tracer: Tracer,
    originals: dict[Tensor, Tensor],
    names: dict[int, str],
    twin: Optimizer,
) -> Origin:
    bad = list(_bad_results(originals, names, twin))
    makers = [
        (maker, found) for found in bad if (maker := tracer.maker_of(found.tensor)) is not None
    ]
    births = [(call, found) for maker, found in makers for call in ancestors(maker) if call.born]
    if not births:
        return replace(origin, reproduced=False, method="replay")
    call, found = min(births, key=lambda pair: pair[0].index)
    if call.stage == "stored":
        return replace(origin, phase="state", tensor=call.op, method="replay", reproduced=True)
    line = line_of(call, tracer)
    return replace(
        origin,
        op=call.op,
        tensor=found.name,
        source=spell(line),
        context=context(line),
        inputs=call.inputs,
        output=call.output,
        method="replay",
        reproduced=True,
        evidence=call.evidence | origin.evidence | _epsilon(twin, found.parameter),
    )


@dataclass(frozen=True, slots=True)
class _BadResult:
    """A parameter or optimizer slot that the update left non-finite."""

    name: str
    tensor: Tensor
    parameter: Tensor


def _bad_results(
    originals: dict[Tensor, Tensor], names: dict[int, str], twin: Optimizer
) -> Iterator[_BadResult]:
    for parameter, original in originals.items():
        if not is_finite(parameter):
            yield _BadResult(f"param:{names.get(id(original), '')}", parameter, parameter)
    for parameter in originals:
        for slot, value in twin.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and not is_finite(value):
                yield _BadResult(f"opt:{slot}", value, parameter)


def _epsilon(optimizer: Optimizer, parameter: Tensor) -> Evidence:
    """Does the group's epsilon vanish in the parameter's dtype?"""
    for group in optimizer.param_groups:
        if any(p is parameter for p in group["params"]) and isinstance(group.get("eps"), float):
            eps = group["eps"]
            gone = eps > 0 and float(torch.tensor(eps, dtype=parameter.dtype)) == 0.0
            return Evidence(eps=eps, eps_underflow=gone)
    return Evidence()


def norm_origin(step: Step, reading: Reading) -> Origin:
    """Finite gradients whose norm overflows: which operation of the norm does?"""
    origin = Origin(
        step=reading.step,
        phase="optimizer",
        op="aten._foreach_norm",
        method="evidence",
        evidence=_rates(reading),
    )
    gradients = list(_gradients(step).values())
    if not gradients:
        return origin
    tracer = Tracer(ModuleSpans({}), stage="optimizer")
    with torch.no_grad(), tracer:
        norm = get_total_norm(gradients)
    exact = math.sqrt(sum(float(g.detach().double().norm()) ** 2 for g in gradients))
    birth = next((call for call in tracer.calls if call.born), None)
    largest = max(gradients, key=lambda g: float(g.detach().abs().max()) if g.numel() else 0.0)
    index = int(largest.detach().abs().argmax())
    operand = summarise(
        "grad",
        largest,
        tuple(int(i) for i in torch.unravel_index(torch.tensor(index), largest.shape)),
    )
    return replace(
        origin,
        op=birth.op if birth is not None else origin.op,
        inputs=(operand,),
        output=birth.output if birth is not None else None,
        method="replay",
        reproduced=not is_finite(norm),
        evidence=origin.evidence | Evidence(finite_norm=exact if math.isfinite(exact) else None),
    )


def divergence_origin(step: Step, reading: Reading) -> Origin:
    """Everything is finite and yet the run is being lost: the update did it, there is no single
    operation.
    """
    evidence = _rates(reading) | Evidence(repeat_loss=reading.repeat_loss)
    return Origin(step=reading.step, phase="optimizer", method="evidence", evidence=evidence)


def _rates(reading: Reading) -> Evidence:
    return Evidence(lr=max(reading.lr, default=None))


def _gradients(step: Step) -> Gradients:
    """Gradients by parameter: those that are there, else those of a replay (unscaled)."""
    present = _present(step)
    if present or step.loss_fn is None or not step.rng:
        return present
    with untouched(step) as keeper:
        replayer = Replayer(step, keeper)
        try:
            for micro in range(len(step.micro_batches)):
                replayer.run(micro)
        except ReplayError:
            return {}
        return {key: grad / step.scale for key, grad in _present(step).items()}


def _present(step: Step) -> Gradients:
    return {
        id(p): p.grad
        for group in step.optimizer.param_groups
        for p in group["params"]
        if p.grad is not None
    }


def _twin(optimizer: Optimizer, gradients: Gradients) -> tuple[Optimizer, dict[Tensor, Tensor]]:
    """An independent optimizer on copied parameters and state, without anybody's hooks."""
    memo: dict[int, Any] = {}
    twin = copy.deepcopy(optimizer, memo)
    _copy_own(optimizer, twin, memo)
    originals = {}
    for mine, theirs in zip(twin.param_groups, optimizer.param_groups, strict=True):
        for parameter, original in zip(mine["params"], theirs["params"], strict=True):
            grad = gradients.get(id(original))
            parameter.grad = grad.detach().clone() if grad is not None else None
            originals[parameter] = original
    return twin, originals


def _copy_own(optimizer: Optimizer, twin: Optimizer, memo: dict[int, Any]) -> None:
    """What the author put on `self`: a copy of a torch optimizer carries groups, state and defaults
    only.
    """
    for name, value in vars(optimizer).items():
        if name not in vars(twin) and not callable(value):
            with suppress(
                TypeError, RuntimeError
            ):  # cannot be copied: the replay says so if the update needs it
                setattr(twin, name, copy.deepcopy(value, memo))
