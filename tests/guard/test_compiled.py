"""Compiled models and compiled updates: protected, and the guard's own work stays outside their
graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stepguard
from scenes import quiet
from stepguard.journal import read_run
from stepguard.records import Incident

pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit:DeprecationWarning"
)  # of torch's own compiler


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.log(self.inner(x).relu() + x.sum(1, keepdim=True).abs()))


class Loop:
    """Eight steps; in a bad one, sample 2 is all zeros and the model takes the logarithm of it."""

    def __init__(self, *, bad: tuple[int, ...] = (), settings: Any = None) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.bad, self.settings = bad, settings
        self.incidents: tuple[Incident, ...] = ()

    def run(self, compile_it: Callable[[Loop], tuple[Any, Any]], *, guarded: bool = True) -> Loop:
        """`compile_it` gives the model to call and the update to make, once the guard is there."""
        settings = self.settings or quiet(locate=True)
        guard = stepguard.watch(self.model, self.optimizer, config=settings) if guarded else None
        call, update = compile_it(self)
        for step in range(8):
            x = torch.randn(6, 4)
            if step in self.bad:
                x[2] = 0.0
            self.optimizer.zero_grad()
            call(x).pow(2).mean().backward()
            update()
        if guard is not None:
            self.incidents = guard.incidents
            assert guard.armed
            guard.close()
        return self


def compiled_update(loop: Loop) -> tuple[Any, Any]:
    return loop.model, torch.compile(loop.optimizer.step, backend="eager")


def compiled_in_place(loop: Loop) -> tuple[Any, Any]:
    loop.model.compile(backend="eager")
    return loop.model, loop.optimizer.step


def compiled_afterwards(loop: Loop) -> tuple[Any, Any]:
    return torch.compile(loop.model, backend="eager"), loop.optimizer.step


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("compile_it", [compiled_update, compiled_in_place, compiled_afterwards])
def test_a_healthy_run_has_the_same_bits_and_as_many_graphs_as_bare(compile_it: Any) -> None:
    bare = Loop().run(compile_it, guarded=False)
    count = graphs()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    guarded = Loop().run(compile_it)
    assert graphs() == count > 0
    for left, right in zip(bare.model.parameters(), guarded.model.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("compile_it", [compiled_update, compiled_in_place])
def test_a_bad_step_is_vetoed_and_placed(compile_it: Any) -> None:
    loop = Loop(bad=(4,)).run(compile_it)
    (incident,) = loop.incidents
    assert incident.origin is not None
    assert (incident.origin.op, incident.origin.samples) == ("aten.log", (2,))
    assert all(bool(p.isfinite().all()) for p in loop.model.parameters())


def test_a_model_compiled_after_the_guard_is_protected_and_told_how_to_be_placed(
    tmp_path: Path,
) -> None:
    loop = Loop(bad=(4,), settings=quiet(locate=True, run_dir=tmp_path)).run(compiled_afterwards)
    assert len(loop.incidents) == 1
    assert all(bool(p.isfinite().all()) for p in loop.model.parameters())
    (note,) = [
        note["summary"] for note in read_run(tmp_path).notes if note.get("kind") == "tracing"
    ]
    assert "give stepguard.watch what torch.compile returned" in note
