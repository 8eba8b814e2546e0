"""The plain training loop people write, under the observer: what happens to a case when nobody
guards it.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zoo.case import Batch, Scene
from zoo.trace import Event, Observer, finite, flaws


@dataclass(slots=True)
class Record:
    """One run, step by step."""

    events: list[Event]
    loss: list[float] = field(default_factory=list)
    grads_finite: list[bool] = field(default_factory=list)
    params_finite: list[bool] = field(default_factory=list)
    bad_buffers: list[list[str]] = field(default_factory=list)
    bad_before: list[list[str]] = field(default_factory=list)
    """Stored tensors and batch tensors that were non-finite before each step."""
    evaluations_finite: list[bool] = field(default_factory=list)
    scale: list[float] = field(default_factory=list)
    zero_grads: list[bool] = field(default_factory=list)
    saved_bad: list[str] = field(default_factory=list)


def autocast(scene: Scene) -> Any:
    return torch.autocast("cpu", dtype=scene.autocast) if scene.autocast else nullcontext()


def make_scaler(scene: Scene) -> torch.amp.GradScaler | None:
    return torch.amp.GradScaler("cpu", **scene.scaler) if scene.scaler else None


def run(scene: Scene, *, without: tuple[int, int, int] | None = None) -> Record:
    """Train. `without` = (step, micro-batch, sample) leaves one sample out."""
    roots = {"": scene.model} | (
        {"criterion": scene.criterion} if scene.criterion is not None else {}
    )
    observer = Observer(roots)
    record, scaler = Record(observer.events), make_scaler(scene)
    with observer.following_modules():
        for step in range(scene.steps):
            _step(scene, observer, record, scaler, step, without)
    if scene.save:
        record.saved_bad = [name for name, tensor in scene.save().items() if any(flaws(tensor))]
    return record


def _step(
    scene: Scene,
    observer: Observer,
    record: Record,
    scaler: Any,
    step: int,
    without: tuple[int, int, int] | None,
) -> None:
    observer.begin(step)
    if scene.before_step:
        scene.before_step(step)
    micros = scene.micro_batches(step)
    if without is not None and without[0] == step:
        micros[without[1]] = leave_out(micros[without[1]], without[2])
    record.bad_before.append(_bad_before(scene, micros))
    kept = (
        {k: v.clone() for k, v in scene.model.state_dict().items()}
        if scene.skips == "restore"
        else {}
    )
    scene.optimizer.zero_grad()
    total = 0.0
    for observer.micro, batch in enumerate(micros):
        with observer:
            observer.phase = "loss"
            with autocast(scene):
                loss = scene.loss(scene.model, batch)
            observer.phase = "backward"
            (scaler.scale(loss) if scaler else loss).backward()
        total += float(loss.detach())
    record.loss.append(total)
    record.grads_finite.append(finite(p.grad for p in scene.model.parameters()))
    observer.phase, observer.micro = "optimizer", 0
    with observer:
        if scene.skips and not math.isfinite(total):
            if kept:
                scene.model.load_state_dict(kept)
        else:
            _update(scene, record, scaler)
    if scaler:
        record.scale.append(scaler.get_scale())
    if scene.after_step:
        scene.after_step(step)
    _look(scene, record, observer)


def _update(scene: Scene, record: Record, scaler: Any) -> None:
    if scaler:
        scaler.unscale_(scene.optimizer)
    if scene.clip:
        torch.nn.utils.clip_grad_norm_(scene.model.parameters(), scene.clip)
        grads = [p.grad for p in scene.model.parameters() if p.grad is not None]
        record.zero_grads.append(all(bool((g == 0).all()) for g in grads))
    if scaler:
        scaler.step(scene.optimizer)
        scaler.update()
    else:
        scene.optimizer.step()


def _look(scene: Scene, record: Record, observer: Observer) -> None:
    """At what the step left behind."""
    model = scene.model
    record.params_finite.append(finite(model.parameters()))
    record.bad_buffers.append([name for name, b in model.named_buffers() if flaws(b)[0]])
    if scene.evaluate:
        model.eval()
        observer.phase = "eval"
        with torch.no_grad(), observer:
            record.evaluations_finite.append(finite([scene.evaluate(model)]))
        model.train()


def _bad_before(scene: Scene, micros: list[Batch]) -> list[str]:
    model = scene.model
    bad = [f"param:{name}" for name, p in model.named_parameters() if any(flaws(p))]
    bad += [f"buffer:{name}" for name, b in model.named_buffers() if any(flaws(b))]
    bad += [f"batch:{key}" for batch in micros for key, value in batch.items() if any(flaws(value))]
    slots = {
        slot
        for state in scene.optimizer.state.values()
        for slot, value in state.items()
        if any(flaws(value))
    }
    return bad + sorted(f"opt:{slot}" for slot in slots)


def leave_out(batch: Batch, sample: int) -> Batch:
    """The batch without one sample; tensors of another leading size stay as they are."""
    count = next(iter(batch.values())).shape[0]
    keep = torch.tensor([i for i in range(count) if i != sample])

    def pick(value: Tensor) -> Tensor:
        return value[keep] if value.dim() and value.shape[0] == count else value

    return {key: pick(value) for key, value in batch.items()}
