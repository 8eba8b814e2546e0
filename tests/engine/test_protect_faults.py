"""A fault of the guard's own never ends a healthy run nor undoes a veto: it costs a part, or it
disarms with one warning, and training continues as if unguarded.
"""

from __future__ import annotations

import io
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.swa_utils import AveragedModel

from engine.parts import each
from forked import FULL
from pairwise import pairwise
from scenes import (
    LOOPS,
    Scene,
    bare,
    batches,
    calm_net,
    difference,
    generators,
    grouped,
    noisy_net,
    plain_net,
    poisoned,
    quiet,
    state_of,
)
from stepguard import Policy, TrainingHalted
from stepguard.engine.build import build_context
from stepguard.engine.context import Context
from stepguard.engine.drivers.step import StepDriver
from stepguard.engine.protect import (
    GuardDisarmed,
    NotExplained,
    OutputLost,
    PartFailed,
    Protection,
    Shield,
    StepTaken,
    borrowing,
    offer,
    taking,
)
from stepguard.engine.recover.rewind import Rewinder
from stepguard.engine.result import StepResult
from stepguard.journal import read_run

DATA = batches(16)
STEPS = grouped(DATA, 2)
WEAK_SPOTS: dict[str, str] = {
    "norm": "stepguard.engine.reader.gradient_norm "
    "stepguard.engine.watch.observed_loss.gradient_norm",
    "look at the weights": "stepguard.engine.reader.largest",
    "reading": "stepguard.sentinel.gradients.Packet.fetch",
    "buffers": "stepguard.state.buffers.BufferKeeper.remember",
    "judging": "stepguard.engine.transaction.judge_reading",
    "history": "stepguard.judge.History.add",
}
SPARED: dict[str, str] = {
    "journal": "stepguard.journal.Journal.step",
    "readable log": "stepguard.report.sinks.HumanLog.step",
    "snapshots": "stepguard.engine.recover.snapshots.SnapshotKeeper._snapshot_due",
    "probation": "stepguard.engine.recover.snapshots.Probation.commit",
}
"""Parts that no verdict needs."""
AFTER_THE_VERDICT: dict[str, str] = {
    "closer look": "stepguard.engine.transaction.examine",
    "locating": "stepguard.engine.transaction.locate",
    "locating a watched step": "stepguard.engine.watch.live_tracing.locate",
    "diagnosing": "stepguard.engine.transaction.find_causes",
    "facts of the run": "stepguard.engine.transaction.run_facts",
    "deciding": "stepguard.engine.incident.situation.choose_remedy",
    "planning": "stepguard.engine.recover.rewind.Rewinder.plan",
    "probation": "stepguard.engine.recover.snapshots.Probation.incident",
    "recording": "stepguard.engine.incident.incident_record.write_down",
    "capsule": "stepguard.engine.incident.incident_record.write_capsule",
    "folder of the incident": "stepguard.engine.incident.incident_record.write_file",
    "journal": "stepguard.journal.Journal.incident",
    "step line": "stepguard.journal.Journal.step",
    "readable log": "stepguard.report.sinks.HumanLog.incident",
    "terminal": "stepguard.report.terminal.paint_incident",
    "sink": "stepguard.engine.protect.Outputs.incident",
    "applying": "stepguard.engine.transaction.Transaction.apply",
    "verdict": "stepguard.engine.transaction.judge_reading",
}
"""Everything that runs once a step is known to be bad."""
TOLD = (GuardDisarmed, NotExplained, OutputLost, PartFailed)
KINDS = ["plain", "fused", "scaled", "fused-scaled"]


def _scene(kind: str, clip: float | None = 0.5) -> Scene:
    model = noisy_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused="fused" in kind)
    scaler = GradScaler("cpu", init_scale=2.0**16, growth_interval=3) if "scaled" in kind else None
    scheduler = (
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=40)
        if not scaler
        else None
    )
    ema = AveragedModel(model, use_buffers=True)
    autocast = torch.float16 if scaler else None
    return Scene(model, optimizer, scheduler, scaler, autocast=autocast, clip_norm=clip, ema=ema)


def _failing(monkeypatch: pytest.MonkeyPatch, spots: str, after: int) -> list[int]:
    """The guard's own part works `after` times and fails from then on."""
    original, calls = pkgutil.resolve_name(spots.split()[0]), [0]

    def fail(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] > after:
            raise ArithmeticError("a fault of the guard's own")
        return original(*args, **kwargs)

    for spot in spots.split():
        monkeypatch.setattr(spot, fail)
    return calls


def _run(
    kind: str, loop: Callable[..., Any], *settings: Any, clip: float | None = 0.5
) -> tuple[Any, ...]:
    scene = _scene(kind, clip)
    torch.manual_seed(3)
    loop(scene, STEPS, *settings)
    return state_of(scene), generators()


def _armed_at_the_end(run_dir: Path) -> bool:
    (end,) = [note for note in read_run(run_dir).notes if note["type"] == "end"]
    return bool(end["armed"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spot", "loop", "kind", "after"),
    each(WEAK_SPOTS, pairwise(product(LOOPS, KINDS, [0, 3]))),
)
def test_fault_disarms_and_the_run_goes_on_as_if_bare(
    spot: str, loop: str, kind: str, after: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clip = None if spot == "norm" else 0.5  # a watched loop that clips takes the norm itself
    expected = _run(kind, bare, clip=clip)
    calls = _failing(monkeypatch, WEAK_SPOTS[spot], after)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        got = _run(kind, LOOPS[loop], quiet(run_dir=tmp_path), clip=clip)
    assert calls[0] == after + 1  # it failed once, and was not asked again
    assert difference(got, expected) == ""
    assert [(w.category, "ArithmeticError" in str(w.message)) for w in said] == [
        (GuardDisarmed, True)
    ]
    record = read_run(tmp_path)
    assert [n["error"] for n in record.notes if n["type"] == "fault"] == [
        "ArithmeticError: a fault of the guard's own"
    ]
    assert record.notes[-1]["type"] == "end" and record.notes[-1]["armed"] is False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spot", "loop", "kind", "after"),
    each(SPARED, pairwise(product(LOOPS, ["plain", "fused-scaled"], [0, 3]))),
)
def test_fault_in_what_no_verdict_needs_costs_that_part_and_not_the_protection(
    spot: str, loop: str, kind: str, after: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = _run(kind, bare)
    _failing(monkeypatch, SPARED[spot], after)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        got = _run(kind, LOOPS[loop], quiet(run_dir=tmp_path, human_log=tmp_path / "log"))
    assert difference(got, expected) == ""
    assert 1 <= len(said) <= 2  # a part may be asked from two places
    assert all(
        "still protected" in str(w.message) and "ArithmeticError" in str(w.message) for w in said
    )
    assert _armed_at_the_end(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spot", "kind", "loop"),
    each(AFTER_THE_VERDICT, product(["plain", "fused", "closure"], ["watch", "step"])),
)
def test_step_known_to_be_bad_stays_vetoed_whatever_fails_afterwards(
    spot: str, kind: str, loop: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scene, bad = _scene("plain") if kind != "fused" else _scene("fused"), (poisoned(DATA[2]),)
    if kind == "closure":
        scene = Scene(scene.model, torch.optim.LBFGS(scene.model.parameters(), lr=0.1, max_iter=3))
    LOOPS[loop](scene, STEPS[:1], quiet())
    before = state_of(scene)
    calls = _failing(monkeypatch, AFTER_THE_VERDICT[spot], 0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        log, whole = tmp_path / "log", Policy(actions=("skip", "stop"))
        config = quiet(run_dir=tmp_path, human_log=log, locate=True, terminal="auto", policy=whole)
        LOOPS[loop](scene, [bad], config)
    assert calls[0] or spot == "planning"  # which is asked for where the state is damaged
    assert all(w.category in TOLD and "ArithmeticError" in str(w.message) for w in said)
    assert difference(dict(scene.model.state_dict()), before["model"]) == ""
    assert difference(scene.optimizer.state_dict()["state"], before["optimizer"]["state"]) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spot", "loop"),
    each([p for p in AFTER_THE_VERDICT if p not in ("verdict", "applying")], LOOPS),
)
def test_guard_stays_armed_after_a_fault_in_what_only_tells_or_remedies(
    spot: str, loop: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scene, bad = _scene("plain"), (poisoned(DATA[2]),)
    _failing(monkeypatch, AFTER_THE_VERDICT[spot], 0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        config = quiet(run_dir=tmp_path, human_log=tmp_path / "log", locate=True, terminal="auto")
        LOOPS[loop](scene, [STEPS[0], bad, STEPS[1], bad, STEPS[2]], config)
    assert GuardDisarmed not in [w.category for w in said]
    assert all(bool(torch.isfinite(p).all()) for p in scene.model.parameters())
    assert _armed_at_the_end(tmp_path)


@pytest.mark.parametrize("loop", LOOPS)
def test_warnings_that_are_errors_do_not_undo_a_veto(
    loop: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scene = _scene("plain")
    _failing(monkeypatch, AFTER_THE_VERDICT["deciding"], 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LOOPS[loop](scene, [STEPS[0], (poisoned(DATA[2]),)], quiet(run_dir=tmp_path))
    assert all(bool(torch.isfinite(p).all()) for p in scene.model.parameters())
    assert read_run(tmp_path).notes[-1]["armed"] is True


@pytest.mark.parametrize("part", ["locate", "find_causes"])
@pytest.mark.parametrize("loop", LOOPS)
def test_crash_while_explaining_costs_the_explanation_and_not_the_protection(
    loop: str, part: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scene, reference, bad = _scene("plain"), _scene("plain"), (poisoned(DATA[2]),)
    torch.manual_seed(3)
    whole = Policy(actions=("skip", "stop"))  # a sample that is named would be left out of its step
    LOOPS[loop](reference, [STEPS[0], bad, STEPS[1], bad], quiet(policy=whole))
    modules = ("transaction", "watch.live_tracing") if part == "locate" else ("transaction",)
    _failing(monkeypatch, " ".join(f"stepguard.engine.{name}.{part}" for name in modules), 0)
    torch.manual_seed(3)
    with pytest.warns(NotExplained, match=r"ArithmeticError.*still protected"):
        LOOPS[loop](
            scene,
            [STEPS[0], bad, STEPS[1], bad],
            quiet(run_dir=tmp_path, locate=True, policy=whole),
        )
    assert difference(state_of(scene), state_of(reference)) == ""
    record = read_run(tmp_path)
    assert [i.step for i in record.incidents] == [1, 3]
    assert all((i.origin is None) == (part == "locate") for i in record.incidents)
    assert all(part == "locate" or not i.findings for i in record.incidents)
    assert [n["kind"] for n in record.notes if n.get("kind") == "unexplained"] == [
        "unexplained"
    ] * 2
    assert record.notes[-1]["armed"] is True


def test_loss_is_none_once_disarmed(monkeypatch: pytest.MonkeyPatch) -> None:
    _failing(monkeypatch, WEAK_SPOTS["norm"], 1)
    with pytest.warns(GuardDisarmed):
        results = LOOPS["step"](_scene("plain"), STEPS[:3])
    assert results[0].loss is not None and results[1].loss is None and results[2].loss is None
    assert all(result.committed for result in results)


# --- a fault at any call inside any protected region


BAD = [(DATA[0],), (poisoned(DATA[1]),), (DATA[2],)]
Call = tuple[str, int, str]
"""File and line of the calling statement, and the name of the function it calls."""


class Regions:
    """Counts how many regions and parts are open, and where the outermost was opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened_by: list[FrameType | None] = []
        leave = Shield.__exit__

        def entered(region: Any) -> None:
            self.opened_by.append(sys._getframe(1))

        def left(region: Any, *error: Any) -> bool:
            self.opened_by.pop()
            return bool(leave(region, *error))

        monkeypatch.setattr(Shield, "__enter__", entered)
        monkeypatch.setattr(Shield, "__exit__", left)

    def call_inside(self, frame: FrameType) -> Call | None:
        """The call that this frame is, if it was made directly from an open region."""
        caller = frame.f_back
        if not self.opened_by or caller is None or caller is not self.opened_by[-1]:
            return None
        name = frame.f_code.co_qualname
        if name.startswith(("Regions.", "Shield.", "Protection.")):
            return None
        return (caller.f_code.co_filename, caller.f_lineno, name)


@contextmanager
def traced(each_call: Callable[[FrameType], None]) -> Iterator[None]:
    """Tell every function call. An exception raised in `each_call` is raised by the function."""

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            each_call(frame)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def _scene_protect(kind: str) -> Scene:
    model = calm_net()
    if kind == "closure":
        return Scene(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3))
    return Scene(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=kind == "fused"))


def _run_protect(loop: str, kind: str, steps: list[Any], folder: Path) -> Scene:
    scene = _scene_protect(kind)
    config = quiet(
        run_dir=folder, locate=True, snapshot_every=1, policy=Policy(actions=("skip", "stop"))
    )
    LOOPS[loop](scene, steps, config)
    return scene


def _calls(regions: Regions, loop: str, kind: str, steps: list[Any], folder: Path) -> list[Call]:
    found: dict[Call, None] = {}

    def told(frame: FrameType) -> None:
        call = regions.call_inside(frame)
        if call is not None:
            found[call] = None

    with traced(told):
        _run_protect(loop, kind, steps, folder)
    return list(found)


def _survives(target: Call, loop: str, kind: str, folder: Path) -> Scene:
    try:
        return _run_protect(loop, kind, BAD, folder)
    except Exception as error:
        raise AssertionError(f"a fault at {target} ended the run: {error}") from error


def _failing_protect(regions: Regions, target: Call) -> Callable[[FrameType], None]:
    def told(frame: FrameType) -> None:
        if regions.call_inside(frame) == target:
            raise ArithmeticError("a fault of the guard's own")

    return told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop", "kind"),
    product(LOOPS, ["plain", "fused", "closure"])
    if FULL
    else [("step", "plain"), ("watch", "fused"), ("step", "closure")],
)
def test_fault_at_any_call_in_any_region_never_reaches_the_loop(
    loop: str, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    regions = Regions(monkeypatch)
    calls = _calls(regions, loop, kind, BAD, tmp_path / "found")
    assert len(calls) > 15
    for number, target in enumerate(calls):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with traced(_failing_protect(regions, target)):
                scene = _survives(target, loop, kind, tmp_path / str(number))
        assert regions.opened_by == [], target
        assert told, f"{target} failed in silence"
        disarmed = any(w.category is GuardDisarmed for w in told)
        finite = all(bool(torch.isfinite(p).all()) for p in scene.model.parameters())
        assert finite or disarmed, target


def test_part_ends_a_fault_and_leaves_the_guard_armed() -> None:
    told: list[str] = []
    protect = Protection(lambda fault: None, told.append)
    with pytest.warns(PartFailed, match=r"snapshots.*still protected"), protect.part("snapshots"):
        raise ValueError("wrong")
    with protect.part("snapshots"):
        raise ValueError("the same part again")
    assert protect.armed
    assert len(told) == 1


def test_stop_of_the_run_and_interrupts_pass_through() -> None:
    protect = Protection(lambda fault: None)
    for passes in (TrainingHalted(None), KeyboardInterrupt()):  # type: ignore[arg-type]
        with pytest.raises(type(passes)), protect.region:
            raise passes
        with pytest.raises(type(passes)), protect.part("snapshots"):
            raise passes
    assert protect.armed


# --- a disarmed guard


def _context(scaler: GradScaler | None = None, **settings: Any) -> Context:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return build_context(model, optimizer, None, scaler, None, None, quiet(**settings))


def _loss_fn(context: Context) -> Any:
    def loss(batch: Any) -> Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(context.model(inputs), targets)

    return loss


def _disarmed_step(context: Context, *micro_batches: Any) -> StepResult:
    protect = Protection(lambda fault: None)
    protect.armed = False
    return StepDriver(context, protect, Rewinder(context)).run(_loss_fn(context), micro_batches)


def test_step_that_the_scaler_refuses_is_not_committed() -> None:
    context = _context(scaler=GradScaler("cpu", init_scale=2.0**120))
    before = [p.detach().clone() for p in context.model.parameters()]
    bad = (DATA[0][0] * float("inf"), DATA[0][1])
    assert not _disarmed_step(context, bad).committed
    for now, then in zip(context.model.parameters(), before, strict=True):
        assert torch.equal(now, then)
    context.resources.close()


# --- the first step of a script can be borrowed


def _loss(batch: Any) -> Any:
    return batch


def test_step_that_is_taken_unwinds_the_script() -> None:
    seen: list[Any] = []

    def take(context: Any, loss_fn: Any) -> bool:
        seen.append((context, loss_fn))
        return context == "second"

    with taking(take):
        assert borrowing()
        offer("first", _loss)
        with pytest.raises(StepTaken):
            offer("second", _loss)
    assert not borrowing()
    assert [context for context, _ in seen] == ["first", "second"]
