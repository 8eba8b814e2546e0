"""What an update does to each parameter, on a sample of its elements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stepguard.locate.finite import plain
from stepguard.look.statistics import Numbers, root_mean_square, sampled
from stepguard.records.look import ParameterLook
from stepguard.tensors.names import (
    named_parameters,
    optimizer_parameter_ids,
    optimizer_parameters,
    parameter_names,
)
from stepguard.tensors.values import is_lazy

MOMENTS = ("exp_avg_sq", "square_avg", "sum", "v")
"""Names that optimizers give to their second moments."""


@dataclass(slots=True)
class Sampled:
    """One parameter before its update."""

    name: str
    parameter: Tensor
    owned: bool
    before: Tensor
    gradient: Tensor | None
    numbers: int
    """Size of the weight, size of the gradient, share of zeros in it."""
    epsilon: float | None


class Updates:
    """Sample all parameters before an update, and see what became of them."""

    def __init__(
        self,
        roots: Mapping[str, nn.Module],
        optimizer: Optimizer,
        owned: set[int],
    ) -> None:
        """`owned`: identities of the parameters that any optimizer of the process updates."""
        self._numbers = Numbers()
        self._optimizer = optimizer
        self._epsilons = epsilons(optimizer)
        self._updated = optimizer_parameter_ids(optimizer)
        self._sampled = []
        copies = _shapes_outside(roots, optimizer)
        for parameter, name in parameter_names(roots, optimizer):
            if not is_lazy(parameter) and parameter.is_floating_point() and parameter.numel():
                updated = id(parameter) in owned or parameter.shape in copies
                self._sampled.append(self._sample(name, parameter, updated))

    def _sample(self, name: str, parameter: Tensor, owned: bool) -> Sampled:
        before = sampled(plain(parameter)).clone()
        numbers = [root_mean_square(before)]
        gradient: Tensor | None = None
        if parameter.grad is not None and parameter.grad.layout is torch.strided:
            gradient = sampled(plain(parameter.grad)).clone()
            scale = getattr(self._optimizer, "grad_scale", None)
            if scale is not None:
                # a scaler leaves it to the fused kernel to divide by its factor
                gradient = gradient.float() / scale
            zeros = (gradient == 0).to(torch.float64).mean().reshape(1)
            numbers += [root_mean_square(gradient), zeros]
        number = self._numbers.add(torch.cat(numbers))
        epsilon = self._epsilons.get(id(parameter))
        return Sampled(name, parameter, owned, before, gradient, number, epsilon)

    def finish(self, *, committed: bool) -> tuple[ParameterLook, ...]:
        """The update is over, or did not happen."""
        after = []
        for one in self._sampled:
            after.append(self._after(one) if committed else None)
        values = self._numbers.read()
        found = []
        for one, number in zip(self._sampled, after, strict=True):
            found.append(_record(one, values[one.numbers], values[number] if number else []))
        return tuple(found)

    def _after(self, one: Sampled) -> int | None:
        """Numbers of the update; None where the parameter has no gradient or was replaced."""
        if id(one.parameter) not in self._updated:
            return None  # its own optimizer has not stepped yet, or has before
        now = sampled(plain(one.parameter))
        if one.gradient is None or now.shape != one.before.shape:
            return None
        change = now.to(torch.float64) - one.before.to(torch.float64)
        asked = one.gradient != 0
        count = asked.sum().clamp_min(1).to(torch.float64)
        lost = (asked & (now == one.before)).sum().to(torch.float64) / count
        parts = [root_mean_square(change), lost.reshape(1)]
        moment = self._moment(one.parameter)
        if moment is not None and moment.shape == asked.shape:
            empty = (asked & (moment == 0)).sum().to(torch.float64) / count
            smallest = torch.where(moment > 0, moment, torch.inf).amin()
            parts += [empty.reshape(1), smallest.to(torch.float64).reshape(1)]
        return self._numbers.add(torch.cat(parts))

    def _moment(self, parameter: Tensor) -> Tensor | None:
        state = self._optimizer.state.get(parameter, {})
        for name in MOMENTS:
            value = state.get(name)
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                return sampled(plain(value))
        return None


def epsilons(optimizer: Optimizer) -> dict[int, float]:
    """By identity of a parameter: the group's epsilon, 0 where it is nothing in its dtype."""
    found = {}
    for group in optimizer.param_groups:
        epsilon = group.get("eps")
        if not isinstance(epsilon, float | int):
            continue
        for parameter in group["params"]:
            value = float(epsilon)
            if parameter.is_floating_point() and value < _smallest(parameter.dtype):
                value = 0.0
            found[id(parameter)] = value
    return found


def _smallest(dtype: torch.dtype) -> float:
    """Half of the smallest number above 0: what is below rounds to 0."""
    limits = torch.finfo(dtype)
    return limits.smallest_normal * limits.eps / 2.0


def _shapes_outside(roots: Mapping[str, nn.Module], optimizer: Optimizer) -> set[torch.Size]:
    """Shapes of parameters with a gradient that only the optimizer knows.

    They are copies in float32 that the weights are written back from.
    """
    inside = {id(parameter) for _, parameter in named_parameters(roots)}
    shapes = set()
    for parameter in optimizer_parameters(optimizer):
        if id(parameter) not in inside and parameter.grad is not None:
            shapes.add(parameter.shape)
    return shapes


def _record(one: Sampled, before: list[float], after: list[float]) -> ParameterLook:
    known = dict(zip(("weight", "gradient", "gradient_zeros"), before, strict=False))
    moved = dict(zip(("update", "lost", "variance_zeros", "variance"), after, strict=False))
    return ParameterLook(
        name=one.name,
        dtype=str(one.parameter.dtype).removeprefix("torch."),
        elements=one.parameter.numel(),
        trainable=one.parameter.requires_grad,
        owned=one.owned,
        epsilon=one.epsilon,
        **known,
        **moved,
    )
