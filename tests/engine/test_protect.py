"""A fault of the guard's own at any call inside any protected region never reaches the user.

The calls are found by running the scene once under a trace; then each of them fails in turn.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import stepguard
from scenes import LOOPS, Scene, batches, calm_net, poisoned, quiet
from stepguard import Policy, TrainingHalted
from stepguard.engine.protect import GuardDisarmed, PartFailed, Protection, Shield

ROOT = Path(stepguard.__file__).parent
ENTRY = (ROOT / "engine" / "drivers", ROOT / "engine" / "transaction.py", ROOT / "guard.py")
"""Files in which regions and parts are opened."""
DATA = batches(8)
HEALTHY = [(DATA[0],), (DATA[1],), (DATA[2],)]
BAD = [(DATA[0],), (poisoned(DATA[1]),), (DATA[2],)]
Call = tuple[str, int, str]
"""File and line of the calling statement, and the name of the function it calls."""


class Regions:
    """Counts how many regions and parts are open, and where the outermost was opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened_by: list[FrameType | None] = []
        for kind in (Shield,):
            self._watch(monkeypatch, kind)

    def _watch(self, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
        leave = kind.__exit__

        def entered(region: Any) -> None:
            self.opened_by.append(sys._getframe(1))

        def left(region: Any, *error: Any) -> bool:
            self.opened_by.pop()
            return bool(leave(region, *error))

        monkeypatch.setattr(kind, "__enter__", entered)
        monkeypatch.setattr(kind, "__exit__", left)

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


def _scene(kind: str) -> Scene:
    model = calm_net()
    if kind == "closure":
        return Scene(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3))
    return Scene(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=kind == "fused"))


def _run(loop: str, kind: str, steps: list[Any], folder: Path) -> Scene:
    scene = _scene(kind)
    config = quiet(
        run_dir=folder, locate=True, snapshot_every=1, policy=Policy(actions=("skip", "stop"))
    )
    LOOPS[loop](scene, steps, config)
    return scene


def _calls(regions: Regions, loop: str, kind: str, steps: list[Any], folder: Path) -> list[Call]:
    found: dict[Call, None] = {}

    def each(frame: FrameType) -> None:
        call = regions.call_inside(frame)
        if call is not None:
            found[call] = None

    with traced(each):
        _run(loop, kind, steps, folder)
    return list(found)


def _survives(target: Call, loop: str, kind: str, folder: Path) -> Scene:
    try:
        return _run(loop, kind, BAD, folder)
    except Exception as error:
        raise AssertionError(f"a fault at {target} ended the run: {error}") from error


def _failing(regions: Regions, target: Call) -> Callable[[FrameType], None]:
    def each(frame: FrameType) -> None:
        if regions.call_inside(frame) == target:
            raise ArithmeticError("a fault of the guard's own")

    return each


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "fused", "closure"])
@pytest.mark.parametrize("loop", LOOPS)
def test_fault_at_any_call_in_any_region_never_reaches_the_loop(
    loop: str, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    regions = Regions(monkeypatch)
    calls = _calls(regions, loop, kind, BAD, tmp_path / "found")
    assert len(calls) > 15
    for number, target in enumerate(calls):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with traced(_failing(regions, target)):
                scene = _survives(target, loop, kind, tmp_path / str(number))
        assert regions.opened_by == [], target
        assert told, f"{target} failed in silence"
        disarmed = any(w.category is GuardDisarmed for w in told)
        finite = all(bool(torch.isfinite(p).all()) for p in scene.model.parameters())
        assert finite or disarmed, target


def test_region_ends_a_fault_and_disarms_once() -> None:
    faults: list[Exception] = []
    protect = Protection(faults.append)
    with pytest.warns(GuardDisarmed, match="ValueError: wrong"), protect.region:
        raise ValueError("wrong")
    with protect.region:
        raise ValueError("a second one is not told again")
    assert not protect.armed
    assert [str(fault) for fault in faults] == ["wrong"]


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
