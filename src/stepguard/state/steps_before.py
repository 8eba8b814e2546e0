"""The steps that led to a bad one: the state they began from, their batches and random numbers.

In memory they are references to what the guard keeps anyway; `write_window` puts them beside the
capsule of the bad step, as safetensors and JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from stepguard._errors import CapsuleError
from stepguard.records.codec import restore_floats
from stepguard.state.capsule import DAMAGE, read_facts, restore_kinds, write_facts
from stepguard.state.rng import RngState, rng_from_facts, rng_to_facts
from stepguard.state.run_state import SavedState
from stepguard.state.step import LossFn, Step
from stepguard.state.tree_json import NotPlainError, tree_from_json, tree_to_json

SCHEMA = 1
FOLDER = "window"
STATE_FACTS = ("numbers", "optimizer", "groups", "optimizer_more")
NOT_OF_THE_MODEL = ("rng/", "loader/", "scaler/", "scheduler", "extra:")
"""Parts of a run's state that no trial touches."""


@dataclass(slots=True)
class WindowStep:
    """One step as it was run: enough to run it again from any state."""

    index: int
    micro_batches: tuple[Any, ...]
    rng: list[RngState]
    """Before each micro-batch."""
    loss: float | None = None
    """What it gave the first time."""
    lr: tuple[float, ...] = ()
    """The rate of each parameter group, empty where it is not known."""
    scale: float = 1.0
    """What the loss was multiplied by."""
    clip_norm: float | None = None
    loss_fn: LossFn | None = None


@dataclass(slots=True)
class Window:
    """A state, the steps that led from it to the bad one, and healthy steps beside them."""

    start: SavedState
    steps: list[WindowStep]
    """Oldest first, without the bad one."""
    others: list[WindowStep] = field(default_factory=list)
    """Healthy steps of the run that are not part of the way: earlier or later ones."""

    @property
    def first(self) -> int | None:
        """Index of the first step; None where the bad step is all there is."""
        if not self.steps:
            return None
        return self.steps[0].index


def window_step(step: Step, loss: float | None, lr: tuple[float, ...]) -> WindowStep:
    """What a trial needs of a step, by reference."""
    return WindowStep(
        index=step.index,
        micro_batches=step.micro_batches,
        rng=step.rng,
        loss=loss,
        lr=lr,
        scale=step.scale,
        clip_norm=step.clip_norm,
        loss_fn=step.loss_fn,
    )


def write_window(capsule: Path, window: Window, limit_bytes: int) -> str:
    """Write the window into the capsule's folder; else say in words why not."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in window.start.tensors.items():
        if not name.startswith(NOT_OF_THE_MODEL):
            tensors[f"start/{name}"] = tensor
    try:
        facts = {
            "schema": SCHEMA,
            "state": {key: window.start.facts[key] for key in STATE_FACTS},
            "steps": _steps_apart(window.steps, tensors, "step"),
            "others": _steps_apart(window.others, tensors, "other"),
        }
    except NotPlainError as why:
        return str(why)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if size > limit_bytes:
        return f"the steps before it take {size} bytes, {limit_bytes} are left of capsule_limit"
    write_facts(capsule / FOLDER, "window.json", facts, tensors)
    return ""


def read_window(capsule: Path) -> Window | None:
    """Read the window of a capsule; None where it has none. Nothing in it is executed."""
    folder = capsule / FOLDER
    if not (folder / "window.json").is_file():
        return None
    try:
        facts, tensors = read_facts(folder, "window.json")
        facts = restore_floats(facts)
        restore_kinds(tensors, facts)
        start = {
            name.removeprefix("start/"): tensor
            for name, tensor in tensors.items()
            if name.startswith("start/")
        }
        return Window(
            start=SavedState(start, facts["state"]),
            steps=_steps_together(facts["steps"], tensors),
            others=_steps_together(facts["others"], tensors),
        )
    except (*DAMAGE, OSError, RecursionError) as fault:
        what = str(fault).splitlines()[0] if str(fault) else type(fault).__name__
        raise CapsuleError(f"{folder} is damaged: {what}.") from None


def _steps_apart(
    steps: Sequence[WindowStep], tensors: dict[str, Tensor], name: str
) -> list[dict[str, Any]]:
    apart = []
    for step in steps:
        where = f"{name}/{step.index}"
        batches = [
            tree_to_json(batch, tensors, f"{where}/batch/{number}")
            for number, batch in enumerate(step.micro_batches)
        ]
        rng = [
            rng_to_facts(state, tensors, f"{where}/rng/{number}")
            for number, state in enumerate(step.rng)
        ]
        apart.append(
            {
                "index": step.index,
                "micro_batches": batches,
                "rng": rng,
                "loss": step.loss,
                "lr": list(step.lr),
                "scale": step.scale,
                "clip_norm": step.clip_norm,
            }
        )
    return apart


def _steps_together(facts: list[dict[str, Any]], tensors: dict[str, Tensor]) -> list[WindowStep]:
    steps = []
    for one in facts:
        batches = [tree_from_json(batch, tensors) for batch in one["micro_batches"]]
        steps.append(
            WindowStep(
                index=one["index"],
                micro_batches=tuple(batches),
                rng=[rng_from_facts(rng, tensors) for rng in one["rng"]],
                loss=one["loss"],
                lr=tuple(one["lr"]),
                scale=one["scale"],
                clip_norm=one["clip_norm"],
            )
        )
    return steps
