"""What is kept of the way to a bad step: references, and one snapshot that is not overwritten."""

from __future__ import annotations

import torch
from torch import nn

from scenes import batches, difference, plain_net, poisoned, quiet
from stepguard import Guard

DATA = batches(100)


def run(bad: tuple[int, ...], steps: int) -> Guard:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, config=quiet(snapshot_every=8))
    for index, batch in enumerate(DATA[:steps]):
        given = poisoned(batch) if index in bad else batch
        guard.step(lambda one: nn.functional.cross_entropy(model(one[0]), one[1]), given)
    guard.close()
    return guard


def test_snapshot_of_the_incident_stays_as_it_was_when_the_ring_has_dropped_it() -> None:
    early = run((40,), 41)._context.memory.lead_up
    late_guard = run((40,), 100)
    late = late_guard._context.memory.lead_up
    assert early is not None and early.snapshot is not None
    assert late is not None and late.snapshot is not None
    assert late.snapshot not in late_guard._rewinder.snapshots.ring.snapshots
    assert not late.snapshot.overwritten
    assert difference(late.snapshot.state.tensors, early.snapshot.state.tensors) == ""
    assert [one.index for one in late.steps] == list(range(late.snapshot.step, 40))


def test_bad_steps_shortly_before_are_remembered_and_older_ones_are_not() -> None:
    lead_up = run((20, 38, 40), 41)._context.memory.lead_up
    assert lead_up is not None
    assert [one.index for one in lead_up.failed_before] == [38]
    assert 38 not in [one.index for one in lead_up.steps]


def test_healthy_run_keeps_nothing_of_it() -> None:
    assert run((), 12)._context.memory.lead_up is None
