"""What a tool answers about a scene, and how the answer is marked.

A tool is a function that trains a `Scene` in its own way and returns an `Answer`, or None where it
noticed nothing. What it cannot say it leaves out, and those questions count as wrong.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from zoo.case import Case, Expected, Scene
from zoo.trace import flaws

# A healthy control runs at least this long: longer than anything a guard remembers of its run.
CONTROL_STEPS = 256
PARTS = ("detect", "place", "sample", "cause", "source", "survive")


@dataclass(slots=True, kw_only=True)
class Answer:
    """What a tool reported first. None: it does not say."""

    step: int
    phase: str | None = None
    """input, forward, loss, backward, optimizer, state or checkpoint."""
    op: str | None = None
    """The aten operation, such as `div`."""
    module: str | None = None
    """Dotted path; "" is the root model, None is outside every module."""
    node: str | None = None
    """The autograd node, such as `SqrtBackward0`."""
    tensor: str | None = None
    """A stored tensor that was bad: `param:NAME`, `buffer:NAME`, `batch:KEY`, `opt:SLOT`."""
    samples: tuple[int, ...] = ()
    micro_batch: int | None = None
    source: str = ""
    """`file.py:88`"""
    causes: tuple[str, ...] = ()
    """Cause codes, the most likely first. A tool with other codes maps them to ours."""
    stopped: bool = False
    """The tool ended the run."""
    said: str = ""


Tool = Callable[[Scene], Answer | None]


@dataclass(slots=True, kw_only=True)
class Row:
    """The marks of one case; None where a question does not apply."""

    case: str
    group: str
    control: bool
    detect: bool | None = None
    place: bool | None = None
    sample: bool | None = None
    cause: bool | None = None
    source: bool | None = None
    survive: bool | None = None
    false_alarms: int = 0
    seconds: float = 0.0
    said: str = ""
    causes: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def marks(self) -> list[bool | None]:
        return [getattr(self, part) for part in PARTS]

    @property
    def right(self) -> bool:
        return not self.error and not self.false_alarms and False not in self.marks


def score(case: Case, tool: Tool) -> Row:
    """Run the case under the tool and mark the answer."""
    row = Row(case=case.name, group=case.group, control=case.control)
    scene = case.build(False)
    if case.control:
        scene.steps = max(scene.steps, CONTROL_STEPS)
    nonfinite_on_purpose = [b for b in scene.model.buffers() if any(flaws(b))]
    began = time.perf_counter()
    try:
        answer = tool(scene)
    except Exception:
        row.error = traceback.format_exc(limit=4)
        row.detect = row.place = row.cause = row.survive = False
        # A healthy run that the tool ends is the worst alarm of all.
        row.false_alarms = int(case.control)
        return row
    row.seconds = round(time.perf_counter() - began, 2)
    if answer is not None:
        row.said = answer.said
        row.causes = list(answer.causes)
    if case.control:
        row.false_alarms = int(answer is not None)
        row.detect = answer is None
        return row
    want = case.wanted
    row.survive = _stored_is_finite(scene, nonfinite_on_purpose)
    if (
        answer is not None
        and answer.stopped
        and want.event.startswith(("param:", "buffer:", "opt:"))
    ):
        # The state was bad before the run began: refusing to train is right.
        row.survive = True
    row.detect = answer is not None and want.step <= answer.step <= want.step + _slack(want)
    row.place = answer is not None and row.detect and place_right(answer, want)
    if want.event in ("nan", "inf", "seen") and want.phase in ("forward", "loss", "backward"):
        row.source = answer is not None and bool(answer.source)
    if want.sample is not None:
        row.sample = answer is not None and answer.samples == (want.sample,)
    row.cause = answer is not None and bool(answer.causes) and answer.causes[0] in case.accepted
    return row


def _slack(want: Expected) -> int:
    if want.slack is not None:
        return want.slack
    if want.event == "spike":
        return 3
    return 1 if want.phase == "optimizer" else 0


def place_right(answer: Any, want: Expected) -> bool:
    """A stored tensor by its name, a runaway by its phase, else the operation exactly."""
    kind = want.event.partition(":")[0]
    if kind in ("param", "buffer", "batch", "opt"):
        return answer.tensor == want.event and answer.phase in (want.phase, "state", "input")
    if kind == "spike":
        return bool(answer.phase == "optimizer")
    if kind == "checkpoint":
        return answer.phase in ("checkpoint", "input")
    here = (answer.phase, answer.op, answer.module) == (want.phase, want.op, want.module)
    return here and want.node in (None, answer.node) and want.micro in (None, answer.micro_batch)


def names_place(answer: Answer | None, want: Expected) -> bool:
    """A milder mark, for tools that name an autograd node or a module and no operation."""
    if answer is None or answer.step != want.step:
        return False
    if answer.node is not None:
        return want.node == answer.node
    in_forward = want.phase in ("forward", "loss", "input", "state")
    return in_forward and answer.module is not None and want.module == answer.module


def rates(rows: list[Row]) -> dict[str, tuple[int, int]]:
    """How many of the questions that apply were answered rightly, by part."""
    counted = {}
    for part in PARTS:
        marks = [getattr(row, part) for row in rows if not row.control]
        asked = [mark for mark in marks if mark is not None]
        counted[part] = (sum(asked), len(asked))
    return counted


def _stored_is_finite(scene: Scene, nonfinite_on_purpose: list[torch.Tensor]) -> bool:
    tensors = list(scene.model.parameters())
    for buffer in scene.model.buffers():
        if not any(buffer is meant for meant in nonfinite_on_purpose):
            tensors.append(buffer)
    for state in scene.optimizer.state.values():
        tensors.extend(state.values())
    if scene.save:
        tensors.extend(scene.save().values())
    return not any(any(flaws(tensor)) for tensor in tensors)
