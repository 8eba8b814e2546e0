"""The observer sees every operation once and changes nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stepguard.probes.deep_look import Observer
from stepguard.tensors.torch_private import dispatch_mode_stack


def run(observer: Observer | None) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1))
    if observer is not None:
        observer.start()
    model(torch.randn(16, 4)).square().mean().backward()
    if observer is not None:
        observer.stop()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*gradients, *model.buffers(), torch.get_rng_state()]


def test_watched_step_is_bit_identical() -> None:
    observer = Observer({})
    bare = run(None)
    assert all(map(torch.equal, bare, run(observer)))
    assert observer.results
    assert not dispatch_mode_stack()


def test_work_of_the_guard_is_not_seen() -> None:
    observer = Observer({})
    observer.start()
    observer.paused = True
    torch.ones(3).add(1)
    observer.stop()
    assert observer.results == 0


def test_a_fault_of_its_own_ends_the_look_and_not_the_step() -> None:
    observer = Observer({})
    observer.notes = None  # type: ignore[assignment]
    observer.start()
    total = torch.ones(3).add(1)
    observer.stop()
    assert total.tolist() == [2.0, 2.0, 2.0]
    assert isinstance(observer.fault, AttributeError)


def test_stop_inside_a_backward_leaves_the_stack_later() -> None:
    observer = Observer({})
    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(lambda grad: observer.stop())
    observer.start()
    (weight * 2).sum().backward()
    assert observer.on_the_stack
    observer.stop()
    assert not dispatch_mode_stack()
