"""One deep look: begin before the forward pass, end after the update, and get a record."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stepguard.locate.finite import plain
from stepguard.look.batches import SeenBatch
from stepguard.look.observer import ObservedResult, Observer
from stepguard.look.parameters import Updates
from stepguard.look.statistics import FIELDS, bits_above_floor, bits_of_headroom, sampled
from stepguard.records.look import Look, ParameterLook, StepFacts, TensorLook
from stepguard.tensors.names import (
    named_buffers,
    named_modules,
    named_parameters,
    optimizer_parameter_ids,
)
from stepguard.tensors.torch_private import transforming
from stepguard.tensors.values import is_lazy

MOST_ROWS = 400
"""Rows of each kind that a record keeps, the worst ones."""
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules whose parts a model calls one by one, or chooses from."""
GRADIENT_SAMPLE = 256
"""Elements of each gradient that say whether it is 0."""


class DeepLook:
    """Watches one step. Nothing it does changes the step."""

    def __init__(
        self, step: int, roots: Mapping[str, nn.Module], optimizer: Optimizer, owned: set[int]
    ) -> None:
        self.step = step
        self.batch = SeenBatch()
        self._roots = roots
        self._optimizer = optimizer
        self._owned = owned
        self._observer = Observer(roots, optimizer_parameter_ids(optimizer), owned)
        self._observer.backward_begins = self._backward_begins
        self._updates: Updates | None = None
        self._seconds = 0.0
        self._kept_gradients: list[int | None] = []
        """For each backward pass: number of gradients found there that are not 0; None: none."""

    @property
    def fault(self) -> Exception | None:
        """Why nothing more was measured."""
        return self._observer.fault

    @property
    def layer_fault(self) -> Exception | None:
        """Why nothing more was noted of layers."""
        return self._observer.layer_fault

    def suspend(self) -> None:
        """A backward pass is over: what the loop does until it calls the model again is its own."""
        self._observer.stop()

    def resume(self) -> None:
        """The model is called again before the update."""
        if not self._observer.on_the_stack:
            self._observer.start()

    def begin(self) -> None:
        """The step begins."""
        began = time.thread_time()
        # Inside a transform of functorch the modules hold wrappers, whose memory cannot be told.
        if not transforming():
            for name, parameter in named_parameters(self._roots):
                if not is_lazy(parameter):
                    self._observer.store(f"param:{name}", parameter)
            for name, buffer in named_buffers(self._roots):
                if not is_lazy(buffer):
                    self._observer.store(f"buffer:{name}", buffer)
        self._seconds += time.thread_time() - began
        self._observer.start()

    def pause(self, *, on: bool) -> None:
        """The guard begins or ends work of its own."""
        self._observer.paused = on

    def saw_batch(self, batch: Any) -> None:
        """The step's data, or a part of it."""
        self.batch.add(batch)

    def _backward_begins(self) -> None:
        """Note which gradients are there already."""
        parts = []
        updated = optimizer_parameter_ids(self._optimizer)
        for _, parameter in named_parameters(self._roots):
            gradient = parameter.grad
            if id(parameter) not in updated:
                continue  # another player's: its own loop zeroes it
            if gradient is not None and gradient.layout is torch.strided and gradient.numel():
                part = sampled(plain(gradient), GRADIENT_SAMPLE)
                parts.append((part != 0).any().to(torch.float64).reshape(1))
        number = None
        if parts:
            number = self._observer.numbers.add(torch.cat(parts).sum().reshape(1))
        self._kept_gradients.append(number)

    def loss_seen(self, root: Tensor) -> None:
        """A backward pass begins at this loss. One that does not call the model before it goes
        unobserved, and counts.
        """
        self._backward_begins()
        self._observer.loss.backward_begins(root)

    @property
    def outsiders(self) -> list[Tensor]:
        """Tensors that got a gradient and belong to no model and no optimizer."""
        return [one for one in self._observer.loss.outsiders if one.grad is not None]

    def gradients_ready(self) -> None:
        """Forward and backward are over."""
        self._observer.stop()

    def before_update(self) -> None:
        """The optimizer is about to step."""
        began = time.thread_time()
        self._updates = Updates(self._roots, self._optimizer, self._owned)
        self._seconds += time.thread_time() - began

    def abandon(self) -> bool:
        """Nothing came of this step. False inside a backward pass, which keeps the observer."""
        self._observer.stop()
        return not self._observer.on_the_stack

    def finish(self, *, committed: bool) -> Look:
        """The update is over."""
        began = time.thread_time()
        self._observer.stop()
        parameters: tuple[ParameterLook, ...] = ()
        if self._updates is not None:
            parameters = self._updates.finish(committed=committed)
        values = self._observer.numbers.read()
        layers = self._observer.layers
        tensors = tensor_rows(self._observer.seen, values)
        look = Look(
            step=self.step,
            tensors=tuple(tensors[:MOST_ROWS]),
            parameters=_worst_parameters(parameters),
            attention=tuple(layers.attention(values)[:MOST_ROWS]),
            norms=tuple(layers.norms(values)[:MOST_ROWS]),
            units=tuple(layers.units(values)[:MOST_ROWS]),
            facts=self._facts(self._observer.loss.facts(layers.facts(values), values), values),
            left_out=max(0, len(tensors) - MOST_ROWS) + max(0, len(parameters) - MOST_ROWS),
        )
        self._seconds += time.thread_time() - began
        return replace(look, seconds=self._seconds + self._observer.seconds)

    def _facts(self, facts: StepFacts, values: list[list[float]]) -> StepFacts:
        dropout = []
        norms = []
        for name, module in named_modules(self._roots):
            if module.training:
                continue
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
                dropout.append(name)
            if isinstance(module, nn.modules.batchnorm._NormBase):
                norms.append(name)
        return replace(
            facts,
            batch=self.batch.digest,
            samples=self.batch.samples,
            training=next(iter(self._roots.values())).training,
            dropout=tuple(dropout),
            norms_in_eval=tuple(norms),
            kept_gradients=self._gradients_were_kept(values),
            without_gradient=self._without_gradient(),
        )

    def _without_gradient(self) -> tuple[str, ...]:
        """Parameters without a gradient, less those of a container of which others have one.

        An expert or the head of a task is used when its turn comes.
        """
        if self._updates is None:
            return ()
        names = self._updates.without_gradient
        owned = [
            name for name, parameter in named_parameters(self._roots) if parameter.requires_grad
        ]
        for prefix, module in named_modules(self._roots):
            if isinstance(module, CONTAINERS):
                inside = {name for name in owned if name.startswith(f"{prefix}.")}
                if not inside <= set(names):
                    names = tuple(name for name in names if name not in inside)
        return names

    def _gradients_were_kept(self, values: list[list[float]]) -> bool:
        """Every backward pass of the step found gradients.

        The first of an accumulated step finds none; nor does the last one where `zero_grad` stands
        between a gradient inside the loss and its backward pass.
        """
        counts = []
        for number in self._kept_gradients:
            counts.append(0.0 if number is None else values[number][0])
        return bool(counts) and min(counts) > 0.0


def tensor_rows(seen: Sequence[ObservedResult], values: list[list[float]]) -> list[TensorLook]:
    """One row for each module, direction and dtype, those with the least headroom first."""
    groups: dict[tuple[str, str, torch.dtype], list[int]] = {}
    for index, one in enumerate(seen):
        name = one.op if one.stage == "stored" else one.module
        groups.setdefault((name, one.stage, one.dtype), []).append(index)
    rows = []
    for (name, _, dtype), indices in groups.items():
        rows.append(_row(name, dtype, indices, seen, values))
    return sorted(rows, key=lambda row: math.inf if row.headroom is None else row.headroom)


def _row(
    name: str,
    dtype: torch.dtype,
    indices: list[int],
    seen: Sequence[ObservedResult],
    values: list[list[float]],
) -> TensorLook:
    stats = []
    rounded = 0.0
    converted = 0.0
    for index in indices:
        stats.append(dict(zip(FIELDS, values[seen[index].vector], strict=True)))
        number = seen[index].conversion
        if number is not None:
            rounded += values[number][0]
            converted += values[number][1]
    largest = max(range(len(stats)), key=lambda at: stats[at]["largest"])
    smallest = min(one["smallest"] for one in stats)
    elements = max(sum(one["elements"] for one in stats), 1.0)
    return TensorLook(
        module=name,
        stage=seen[indices[0]].stage,
        dtype=str(dtype).removeprefix("torch."),
        op=seen[indices[largest]].op,
        largest=stats[largest]["largest"],
        smallest=smallest if math.isfinite(smallest) else None,
        headroom=bits_of_headroom(stats[largest]["largest"], dtype),
        floor=bits_above_floor(smallest, dtype),
        zeros=sum(one["zeros"] for one in stats) / elements,
        subnormal=sum(one["subnormal"] for one in stats) / elements,
        rounded_away=rounded / converted if converted else 0.0,
        infinities=sum(_born_infinite(index, seen, values) for index in indices),
        elements=int(elements),
    )


def _born_infinite(index: int, seen: Sequence[ObservedResult], values: list[list[float]]) -> int:
    """Infinities of this result that come from finite operands."""
    one = seen[index]
    infinities = FIELDS.index("infinities")
    count = values[one.vector][infinities]
    if not count or one.may_hold_infinity:
        return 0
    if any(values[seen[parent].vector][infinities] for parent in one.parents):
        return 0
    return int(count)


def _worst_parameters(parameters: tuple[ParameterLook, ...]) -> tuple[ParameterLook, ...]:
    """Keep the order of the model; drop what moves as it should where there are too many."""
    if len(parameters) <= MOST_ROWS:
        return parameters
    ranked = sorted(parameters, key=_suspicion, reverse=True)[:MOST_ROWS]
    kept = {one.name for one in ranked}
    return tuple(one for one in parameters if one.name in kept)


def _suspicion(one: ParameterLook) -> float:
    return (one.lost or 0.0) + one.gradient_zeros + (one.ratio or 0.0)
