"""The host waits for the device at most once a step, and never inside one that is fused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def _config(scene: Scene) -> GuardConfig:
    return quiet(clip_norm=scene.clip_norm)


def _bare_reads(scene: Scene) -> Counter[str]:
    plain_step(scene, (DATA[0],))
    with reads() as bare:
        for batch in DATA[1:6]:
            plain_step(scene, (batch,))
    return bare.seen


@contextmanager
def _stepping(scene: Scene) -> Iterator[Callable[[Any], Any]]:
    with Guard(scene.model, scene.optimizer, config=_config(scene)) as guard:
        yield lambda batch: guard.step(scene.loss_fn, batch)


@contextmanager
def _watching(scene: Scene) -> Iterator[Callable[[Any], Any]]:
    with stepguard.watch(scene.model, scene.optimizer, config=quiet()):  # the loop clips by itself
        yield lambda batch: plain_step(scene, (batch,))


ENTRIES: dict[str, Any] = {"step": _stepping, "watch": _watching}


def test_counting_sees_a_read() -> None:
    with reads() as seen:
        torch.ones(3).sum().item()
        bool(torch.ones(()))
        torch.ones(3).nonzero()
        torch.equal(torch.ones(2), torch.ones(2))
    assert sum(seen.seen.values()) == 4


@pytest.mark.parametrize("clip", [None, 0.1], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_guarded_step_waits_once(entry: str, clip: float | None) -> None:
    bare = _bare_reads(_scene(False, clip=clip))
    with ENTRIES[entry](_scene(False, clip=clip)) as step:
        step(DATA[0])
        fetched = Packet.fetched
        with reads() as guarded:
            for count, batch in enumerate(DATA[1:6], start=1):
                step(batch)
                assert Packet.fetched - fetched == count
    assert guarded.seen == bare


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


@pytest.mark.parametrize("clip", [None, 0.1], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_fused_step_is_read_when_the_next_one_begins(entry: str, clip: float | None) -> None:
    bare = _bare_reads(_scene(True, clip=clip))
    scene = _scene(True, clip=clip)
    with ENTRIES[entry](scene) as step:
        step(DATA[0])
        fetched = Packet.fetched
        with reads() as guarded:
            for count, batch in enumerate(DATA[1:6], start=1):
                step(batch)
                assert Packet.fetched - fetched == count  # the one before, none of its own
    assert guarded.seen == bare


def test_first_fused_step_is_not_read_at_all() -> None:
    with _stepping(_scene(True)) as step:
        fetched = Packet.fetched
        result = step(DATA[0])
        assert Packet.fetched == fetched
        assert repr(result) == "StepResult(not read yet)"
        assert result.loss is not None and Packet.fetched == fetched + 1
        assert result.committed and result.grad_norm is not None and Packet.fetched == fetched + 1


def test_unread_results_cost_nothing() -> None:
    def run(read: bool) -> int:
        with _stepping(_scene(True)) as step:
            fetched = Packet.fetched
            results = [step(batch) for batch in DATA]
            if read:
                assert all(result.committed for result in results)
            return Packet.fetched - fetched

    assert run(read=False) == len(DATA) - 1
    assert run(read=True) == len(DATA)


# --- proof by fake tensors: a device that cannot be read
# --------------------------------------------------------------


def _fake(fused: bool, net: Callable[[], nn.Module] = plain_net) -> tuple[Scene, Any]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    batch = (torch.randn(4, FEATURES), torch.zeros(4, dtype=torch.long))
    return Scene(model, optimizer), batch


def _normed_net() -> nn.Module:
    net = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    net.register_buffer("mask", torch.full((4,), -torch.inf))
    return net


@pytest.mark.parametrize("net", [plain_net, _normed_net])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_fused_step_runs_where_nothing_can_be_read(
    clip: float | None, net: Callable[[], nn.Module]
) -> None:
    with FakeTensorMode():
        scene, batch = _fake(True, net)
        guard = Guard(scene.model, scene.optimizer, config=quiet(clip_norm=clip))
        result = guard.step(scene.loss_fn, batch)
        assert guard.armed
        with pytest.raises(DataDependentOutputException):
            bool(scene.loss_fn(batch) > 0)
    assert repr(result) == "StepResult(not read yet)"
    # the hooks are undone; the pending read is dropped with the guard
    guard._context.resources.close()


def test_watched_fused_step_runs_where_nothing_can_be_read() -> None:
    with FakeTensorMode():
        scene, batch = _fake(True)
        guard = stepguard.watch(scene.model, scene.optimizer, config=quiet())
        plain_step(scene, (batch,))
        assert guard.armed
    guard._context.resources.close()


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
