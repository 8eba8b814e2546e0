"""SG928: healthy steps run again: a fault of the machine is named, and nothing else changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stepguard
from stepguard import Guard, GuardConfig, Probes
from stepguard.journal import RunRecord, read_run

STEPS = 6


class Machine:
    """Counts the calls of one operation, and errs in some of them as a processor would."""

    def __init__(self) -> None:
        self.calls = itertools.count()
        self.errs: Callable[[int], bool] = lambda call: False


machine = Machine()


@torch.library.custom_op("stepguard_tests::unit", mutates_args=())
def unit(x: Tensor) -> Tensor:
    made = x * 2.0
    call = next(machine.calls)
    if machine.errs(call):
        made.view(-1)[0] += 2.0**-20 * (1 + call)
    return made


unit.register_autograd(lambda ctx, gradient: gradient * 2.0)


class Unit(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return unit(x)


class Net(nn.Module):
    """With what a second run could disturb: random numbers, statistics, a counter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3))
        self.unit, self.outer = Unit(), nn.Linear(16, 4)
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.outer(self.unit(self.inner(x))) * (1.0 + 0.01 * self.count)


def batches() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        yield torch.randn(16, 8, generator=generator)


def trained(
    folder: Path, driver: str, audit_every: int | None, **more: Any
) -> tuple[list[Tensor], RunRecord]:
    """The state after a few steps, and the journal."""
    torch.manual_seed(0)
    machine.calls = itertools.count()
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    probes = Probes(look_every=None, audit_every=audit_every)
    config = GuardConfig(run_dir=folder, probes=probes, terminal="quiet", **more)
    seen: list[float] = []

    def loss_fn(batch: Tensor) -> Tensor:
        seen.append(1.0)
        return (net(batch) - batch[:, :4]).square().mean() + 0.001 * len(seen)

    if driver == "step":
        with Guard(net, optimizer, scheduler=schedule, config=config) as guard:
            for batch in batches():
                guard.step(loss_fn, batch[:8], batch[8:])
            assert guard.armed
    else:
        with stepguard.watch(net, optimizer, scheduler=schedule, config=config) as guard:
            for batch in batches():
                optimizer.zero_grad()
                for part in (batch[:8], batch[8:]):
                    if driver == "loss":
                        guard.loss(loss_fn, part).backward()
                    else:
                        loss_fn(part).backward()
                optimizer.step()
                schedule.step()
            assert guard.armed
    state = [*net.parameters(), *net.buffers(), torch.tensor(net.count), torch.get_rng_state()]
    for slots in optimizer.state.values():
        state += [torch.as_tensor(slot) for slot in slots.values()]
    return [one.detach().clone() for one in state], read_run(folder)


def silent(record: RunRecord) -> list[str]:
    return [str(note["summary"]) for note in record.notes if note.get("kind") == "silent"]


def why_not(record: RunRecord) -> list[str]:
    return [str(note["reason"]) for note in record.notes if note.get("type") == "no_audit"]


@pytest.mark.parametrize("driver", ["step", "watch", "loss"])
def test_audited_run_is_bit_equal_to_one_without(tmp_path: Path, driver: str) -> None:
    machine.errs = lambda call: False
    plain, _ = trained(tmp_path / "plain", driver, None)
    calls = next(machine.calls)
    audited, record = trained(tmp_path / "audited", driver, 2)
    assert next(machine.calls) == 2 * calls  # half of the steps run three times
    assert all(torch.equal(one, other) for one, other in zip(plain, audited, strict=True))
    assert silent(record) == []
    assert why_not(record) == []


@pytest.mark.parametrize("driver", ["step", "watch", "loss"])
@pytest.mark.parametrize("run", [1, 2])
def test_operation_that_erred_once_is_named(tmp_path: Path, driver: str, run: int) -> None:
    # two micro-batches: the audited step 1 runs calls 2 and 3, then 4 to 7
    machine.errs = lambda call: call == 2 + 2 * run
    _, record = trained(tmp_path, driver, 2)
    (only,) = silent(record)
    assert only.startswith("SG928") and "rank 0, step 1" in only
    assert "stepguard_tests.unit in unit" in only


def test_kernel_that_never_repeats_is_no_fault_of_the_machine(tmp_path: Path) -> None:
    machine.errs = lambda call: True
    _, record = trained(tmp_path, "step", 2)
    assert silent(record) == []
    (why,) = why_not(record)
    assert "every time" in why and "stepguard_tests.unit" in why


def test_program_with_a_state_that_cannot_be_put_back_is_left_alone(tmp_path: Path) -> None:
    machine.errs = lambda call: False
    torch.manual_seed(0)
    net = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    config = GuardConfig(
        run_dir=tmp_path, probes=Probes(look_every=None, audit_every=1), terminal="quiet"
    )
    calls = itertools.count()
    numbers = (float(next(calls) == 3) for _ in iter(int, 1))

    def loss_fn(batch: Tensor) -> Tensor:
        return (net(batch) * (1.0 + next(numbers))).square().mean()

    with Guard(net, optimizer, config=config) as guard:
        for batch in batches():
            guard.step(loss_fn, batch)
        assert guard.armed
    assert silent(read_run(tmp_path)) == []
