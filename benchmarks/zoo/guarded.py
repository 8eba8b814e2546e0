"""One case under the guard, through the public face only, and what of its answer is right."""

from __future__ import annotations

import tempfile
import time
import traceback
from dataclasses import dataclass, field

import torch

import stepguard
from benchmarks.zoo.case import Batch, Case, Expected, Scene
from benchmarks.zoo.plain import autocast, make_scaler
from benchmarks.zoo.trace import flaws

CONTROL_STEPS = 256
"""A healthy control runs at least so long: longer than anything a guard remembers of its run."""
PARTS = ("detect", "place", "sample", "cause", "source", "survive")


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
    findings: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def marks(self) -> list[bool | None]:
        return [getattr(self, part) for part in PARTS]

    @property
    def right(self) -> bool:
        return not self.error and not self.false_alarms and False not in self.marks


def score(case: Case) -> Row:
    """Run the case under the guard and mark the answer."""
    row = Row(case=case.name, group=case.group, control=case.control)
    scene, began = case.build(False), time.perf_counter()
    if case.control:
        scene.steps = max(scene.steps, CONTROL_STEPS)
    meant = [b for b in scene.model.buffers() if any(flaws(b))]
    try:
        with tempfile.TemporaryDirectory() as run_dir:
            incidents, halted = run_guarded(scene, run_dir)
    except Exception:
        row.error = traceback.format_exc(limit=4)
        row.detect = row.place = row.cause = row.survive = False
        row.false_alarms = int(
            case.control
        )  # a healthy run that the guard ends is the worst alarm of all
        return row
    row.seconds = round(time.perf_counter() - began, 2)
    if case.control:
        row.false_alarms = len(incidents) + (halted and not incidents)
        row.detect = not row.false_alarms
        if incidents:
            row.said = str(incidents[0].origin)
            row.findings = [finding.code for finding in incidents[0].findings]
        return row
    row.survive = _healthy(scene, meant)
    if halted and case.wanted.event.startswith(("param:", "buffer:", "opt:")):
        row.survive = True  # the state was bad before the run began: refusing to train is right
    _mark(row, case, incidents)
    return row


def run_guarded(scene: Scene, run_dir: str) -> tuple[list[stepguard.Incident], bool]:
    """Every incident, and whether the policy stopped the run."""
    modules = {"criterion": scene.criterion} if scene.criterion is not None else None
    config = stepguard.GuardConfig(clip_norm=scene.clip, run_dir=run_dir, terminal="quiet")

    def loss_fn(batch: Batch) -> torch.Tensor:
        with autocast(scene):
            return scene.loss(scene.model, batch)

    with stepguard.Guard(
        scene.model, scene.optimizer, scaler=make_scaler(scene), modules=modules, config=config
    ) as guard:
        for step in range(scene.steps):
            if scene.before_step:
                scene.before_step(step)
            try:
                guard.step(loss_fn, *scene.micro_batches(step))
            except stepguard.TrainingHalted:
                return list(guard.incidents), True
            if scene.after_step:
                scene.after_step(step)
        return list(guard.incidents), False


def _mark(row: Row, case: Case, incidents: list[stepguard.Incident]) -> None:
    want = case.wanted
    first = next(
        (i for i in incidents if i.origin is not None), incidents[0] if incidents else None
    )
    row.detect = first is not None and want.step <= first.step <= want.step + _slack(want)
    origin = first.origin if first is not None else None
    row.place = origin is not None and row.detect and place_right(origin, want)
    if want.event in ("nan", "inf", "seen") and want.phase in ("forward", "loss", "backward"):
        row.source = origin is not None and bool(origin.source)
    if want.sample is not None:
        row.sample = origin is not None and tuple(origin.samples or ()) == (want.sample,)
    row.cause = (
        first is not None and bool(first.findings) and first.findings[0].code in case.accepted
    )
    if first is not None:
        row.said = f"step {first.step} {first.verdict.kind}: {origin}"
        row.findings = [f"{finding.code}:{finding.certainty}" for finding in first.findings]


def _slack(want: Expected) -> int:
    if want.slack is not None:
        return want.slack
    return 3 if want.event == "spike" else 1 if want.phase == "optimizer" else 0


def place_right(origin: stepguard.Origin, want: Expected) -> bool:
    """The rules of the shared zoo: a stored tensor by its name, a runaway by its phase, else the
    operation exactly.
    """
    kind = want.event.partition(":")[0]
    if kind in ("param", "buffer", "batch", "opt"):
        return origin.tensor == want.event and origin.phase in (want.phase, "state", "input")
    if kind == "spike":
        return origin.phase == "optimizer"
    if kind == "checkpoint":
        return origin.phase in ("checkpoint", "input")
    here = (origin.phase, origin.op, origin.module) == (want.phase, want.op, want.module)
    return here and want.node in (None, origin.node) and want.micro in (None, origin.micro_batch)


def _healthy(scene: Scene, meant: list[torch.Tensor]) -> bool:
    """Everything stored is finite, but for buffers that were not from the beginning."""
    buffers = [b for b in scene.model.buffers() if not any(b is m for m in meant)]
    tensors = [*scene.model.parameters(), *buffers]
    tensors += [v for state in scene.optimizer.state.values() for v in state.values()]
    if scene.save:
        tensors += scene.save().values()
    return not any(any(flaws(t)) for t in tensors)
