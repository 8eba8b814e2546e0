"""A healthy step waits for the device at most once and calls few functions."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import stepguard
from scenes import (
    CLASSES,
    FEATURES,
    LOOPS,
    NAN,
    QUIET,
    Batch,
    Scene,
    batches,
    plain_net,
    plain_step,
    poisoned,
    quiet,
)
from stepguard import Guard, GuardConfig
from stepguard.engine.protect import GuardDisarmed
from stepguard.sentinel.gradients import Packet
from stepguard.state import rng

DATA = batches(12)
WAITING = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "allclose", "_unique2")
"""Operators whose result the host reads, or whose shape depends on values."""


class Reads(TorchDispatchMode):
    """Counts operators that make the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.seen.update([name] if name in WAITING else [])
        return func(*args, **(kwargs or {}))


@contextmanager
def reads() -> Iterator[Reads]:
    with Reads() as mode:
        yield mode


def _scene(fused: bool, *, dtype: torch.dtype = torch.float32, clip: float | None = None) -> Scene:
    model = plain_net().to(dtype)
    loss = (
        (lambda s, b: nn.functional.cross_entropy(s.model(b[0].to(dtype)).float(), b[1]))
        if clip
        else None
    )
    return Scene(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused),
        clip_norm=clip,
        loss=loss,
    )


def _bare_reads(scene: Scene) -> Counter[str]:
    plain_step(scene, (DATA[0],))
    with reads() as bare:
        for batch in DATA[1:6]:
            plain_step(scene, (batch,))
    return bare.seen


@contextmanager
def _stepping(scene: Scene, config: GuardConfig = QUIET) -> Iterator[Callable[[Any], Any]]:
    config = replace(config, clip_norm=scene.clip_norm)
    with Guard(scene.model, scene.optimizer, config=config) as guard:
        yield lambda batch: guard.step(scene.loss_fn, batch)


@contextmanager
def _watching(scene: Scene, config: GuardConfig = QUIET) -> Iterator[Callable[[Any], Any]]:
    with stepguard.watch(scene.model, scene.optimizer, config=config):  # the loop clips by itself
        yield lambda batch: plain_step(scene, (batch,))


ENTRIES: dict[str, Any] = {"step": _stepping, "watch": _watching}


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_clipping_in_half_precision_waits_no_second_time(entry: str, fused: bool) -> None:
    bare = _bare_reads(_scene(fused, dtype=torch.bfloat16, clip=0.01))
    with ENTRIES[entry](_scene(fused, dtype=torch.bfloat16, clip=0.01)) as step:
        step(DATA[0])
        with reads() as guarded:
            for batch in DATA[1:6]:
                step(batch)
    assert guarded.seen == bare


def _fake(fused: bool, net: Callable[[], nn.Module] = plain_net) -> tuple[Scene, Any]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    batch = (torch.randn(4, FEATURES), torch.zeros(4, dtype=torch.long))
    return Scene(model, optimizer), batch


def _normed_net() -> nn.Module:
    net = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    net.register_buffer("mask", torch.full((4,), -torch.inf))
    return net


def test_plain_step_cannot_run_where_nothing_can_be_read() -> None:
    with FakeTensorMode():
        scene, batch = _fake(False)
        with Guard(scene.model, scene.optimizer, config=quiet()) as guard:
            with pytest.warns(
                GuardDisarmed, match=r"DataDependentOutputException|is_nonzero|_local_scalar_dense"
            ):
                guard.step(scene.loss_fn, batch)
            assert not guard.armed  # it had to read, could not, and stepped aside


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_bad_loss_is_judged_after_its_backward_and_before_the_update(entry: str) -> None:
    """One wait for the whole step: loss and gradients are judged together, not the loss first."""
    backwards = []

    def counted(scene: Scene, batch: Any) -> Tensor:
        loss = nn.functional.cross_entropy(scene.model(batch[0]), batch[1])
        loss.register_hook(lambda grad: backwards.append(1))
        return loss

    model = plain_net()
    scene = Scene(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss=counted)
    weights = [p.detach().clone() for p in model.parameters()]
    with ENTRIES[entry](scene) as step:
        step(poisoned(DATA[0]))
        assert backwards
        assert all(map(torch.equal, weights, model.parameters()))
        backwards.clear()
        fetched = Packet.fetched
        step(DATA[1])
        assert (len(backwards), Packet.fetched - fetched) == (1, 1)
    assert not all(map(torch.equal, weights, model.parameters()))


class RunningLeast(nn.Module):
    """Keeps the least value seen, infinite at the start, and writes it in every forward."""

    least: Tensor

    def __init__(self, *, replaces: bool) -> None:
        super().__init__()
        self.replaces = replaces
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 3)
        self.register_buffer("least", torch.full((), torch.inf))

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            if self.replaces:
                self.least = self.least * 1.0
            else:
                self.least.mul_(1.0)
        out: Tensor = self.layer(inputs)
        return out


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("replaces", [False, True], ids=["written", "replaced"])
@pytest.mark.parametrize("loop", LOOPS)
def test_no_update_is_dropped_for_a_sentinel(loop: str, replaces: bool, fused: bool) -> None:
    model = RunningLeast(replaces=replaces)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    steps: list[tuple[Batch, ...]] = [(batch,) for batch in batches(3)]
    LOOPS[loop](Scene(model, optimizer), steps, QUIET)
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}


# --- calls


OURS = str(Path(stepguard.__file__).parent)
SETTLED = 70
"""Steps before those that are counted: by then the window of losses is full."""
MOST = {"step": (120, 29), "watch": (180, 34)}
"""Calls of ours, and the modules they are in, of one healthy step."""


def _calls(step: Callable[[], object]) -> tuple[int, int]:
    """Calls of functions of ours in one step, and the modules they are in."""
    found: list[str] = []

    def event(frame: FrameType, kind: str, argument: Any) -> None:
        if kind == "call" and frame.f_code.co_filename.startswith(OURS):
            found.append(frame.f_code.co_filename)

    sys.setprofile(event)
    try:
        step()
    finally:
        sys.setprofile(None)
    return len(found), len(set(found))


@pytest.mark.parametrize("drive", MOST)
def test_healthy_step_calls_few_functions_however_many_layers_there_are(
    drive: str, tmp_path: Path
) -> None:
    counted = []
    for layers in (2, 40):
        torch.manual_seed(0)
        middle = [nn.Linear(8, 8) for _ in range(layers)]
        model = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), *middle, nn.Linear(8, CLASSES))
        scene = Scene(model, torch.optim.AdamW(model.parameters(), 1e-3))
        config = quiet(run_dir=tmp_path / str(layers), locate=True, look_every=None)
        with ENTRIES[drive](scene, config) as step:
            for _ in range(SETTLED):
                step(DATA[0])
            # some steps do more now and then: a collected guard of another test ends, say
            counted.append(min(_calls(lambda: step(DATA[0])) for _ in range(5)))
    (few, modules), (many, _) = counted
    # a few calls depend on where the loss stands, none on the 38 further layers
    assert abs(many - few) < 10
    assert few <= MOST[drive][0]
    assert modules <= MOST[drive][1]


# --- what a step returns


def test_guard_shows_steps_incidents_and_state() -> None:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size = next(model.parameters()).shape[1]
    with stepguard.Guard(model, optimizer, config=quiet()) as guard:
        for value in (1.0, NAN, 1.0):
            result = guard.step(lambda b: model(b).square().mean(), torch.full((2, size), value))
            if not result.committed:
                bad = result
        assert repr(guard).endswith(": 3 steps, 1 incident, armed>")
        assert "step 1</th>" in guard._repr_html_()
    assert repr(guard).endswith("closed>")
    assert "step committed" in result._repr_html_() and "gradient norm" in result._repr_html_()
    assert "step not committed" in bad._repr_html_() and "skip" in bad._repr_html_()
    assert "not read yet" in stepguard.StepResult(settle=lambda: None)._repr_html_()


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("clip", [None, 0.1], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_guarded_step_waits_once(entry: str, clip: float | None, fused: bool) -> None:
    """A fused step is read when the next one begins."""
    unguarded = _bare_reads(_scene(fused, clip=clip))
    with ENTRIES[entry](_scene(fused, clip=clip)) as step:
        step(DATA[0])
        fetched = Packet.fetched
        with reads() as guarded:
            for count, batch in enumerate(DATA[1:6], start=1):
                step(batch)
                assert Packet.fetched - fetched == count
    assert guarded.seen == unguarded


def test_fused_steps_are_read_when_they_are_asked_for_and_once() -> None:
    with _stepping(_scene(True)) as step:
        fetched = Packet.fetched
        result = step(DATA[0])
        assert Packet.fetched == fetched
        assert repr(result) == "StepResult(not read yet)"
        assert result.loss is not None and Packet.fetched == fetched + 1
        assert result.committed and result.grad_norm is not None and Packet.fetched == fetched + 1
        results = [step(batch) for batch in DATA]
        assert Packet.fetched == fetched + len(DATA)
        assert all(result.committed for result in results)
        assert Packet.fetched == fetched + len(DATA) + 1


@pytest.mark.parametrize(
    ("clip", "net", "make"),
    [
        (None, _normed_net, Guard),
        (0.1, plain_net, Guard),
        (0.1, _normed_net, Guard),
        (None, plain_net, stepguard.watch),
    ],
)
def test_fused_step_runs_where_nothing_can_be_read(
    clip: float | None, net: Callable[[], nn.Module], make: Any
) -> None:
    with FakeTensorMode():
        scene, batch = _fake(True, net)
        guard = make(scene.model, scene.optimizer, config=quiet(clip_norm=clip))
        if make is Guard:
            assert repr(guard.step(scene.loss_fn, batch)) == "StepResult(not read yet)"
        else:
            plain_step(scene, (batch,))
        assert guard.armed
        with pytest.raises(DataDependentOutputException):
            bool(scene.loss_fn(batch) > 0)
    # the hooks are undone; the pending read is dropped with the guard
    guard._context.resources.close()


# --- what a healthy step does not do: read generators that nothing drew from, list what it knows


DRAWS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "number": random.random,
    "first of a pair": lambda: random.gauss(0.0, 1.0),
    "both of a pair": lambda: (random.gauss(0.0, 1.0), random.gauss(0.0, 1.0)),
    "seed": lambda: random.seed(7),
    "shuffle": lambda: random.shuffle(list(range(9))),
}


@pytest.mark.parametrize("first", DRAWS)
@pytest.mark.parametrize("second", DRAWS)
def test_python_generator_is_captured_as_it_is(first: str, second: str) -> None:
    before = random.getstate()
    try:
        random.seed(0)
        for name in (first, second):
            rng.capture_rng()
            DRAWS[name]()
            assert rng.capture_rng().python == random.getstate()
    finally:
        random.setstate(before)


def test_cached_normal_number_is_captured_after_it_was_put_back() -> None:
    """The same memory with and without it."""
    before = random.getstate()
    try:
        random.seed(0)
        random.gauss(0.0, 1.0)
        with_number = random.getstate()
        without = (*with_number[:2], None)
        for state in (with_number, without, with_number):
            random.setstate(state)
            assert rng.capture_rng().python == state
    finally:
        random.setstate(before)


@pytest.mark.parametrize("frozen", ["first", "last", "none"])
def test_norm_of_a_clipping_is_taken_over(frozen: str) -> None:
    """The norm before clipping is read, also where the ends of the model have no gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    for name, index in (("first", 0), ("last", 2)):
        model[index].requires_grad_(frozen != name)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    config = stepguard.GuardConfig(terminal="quiet")
    with stepguard.watch(model, optimizer, config=config) as guard:
        for _ in range(3):
            optimizer.zero_grad()
            (100.0 * model(torch.randn(8, 4)).square().mean()).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            assert guard._context.history.norms[-1] == float(norm) > 0.1


def test_clipping_a_part_is_not_the_norm_of_all() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    config = stepguard.GuardConfig(terminal="quiet")
    ends = [*model[0].parameters(), *model[2].parameters()]
    with stepguard.watch(model, optimizer, config=config) as guard:
        model(torch.randn(8, 4)).square().mean().backward()
        part = nn.utils.clip_grad_norm_(ends, 1e9)
        whole = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        assert guard._context.history.norms[-1] == float(whole) > float(part)
