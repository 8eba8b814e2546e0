"""Earlier steps on earlier weights tell hurt weights from a changed loss function."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from scenes import batches, plain_net, quiet
from stepguard import Guard
from stepguard.engine.recover.rewind import compare_with_best, loss_function_changed

DATA = batches(16)


class Run:
    """Twelve healthy steps with a good snapshot, and a term of the loss that can be switched on."""

    def __init__(self) -> None:
        self.model = plain_net()
        self.added = 0.0
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.guard = Guard(self.model, optimizer, config=quiet(snapshot_every=4, probation=2))
        for batch in DATA[:12]:
            self.guard.step(self.loss, batch)
        self.snapshots = self.guard._rewinder.snapshots

    def loss(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1]) + self.added


def test_loss_function_that_gives_what_it_gave_has_not_changed() -> None:
    run = Run()
    with run.guard:
        weights = [p.detach().clone() for p in run.model.parameters()]
        assert not loss_function_changed(run.snapshots)
        assert all(map(torch.equal, weights, run.model.parameters()))


def test_loss_function_with_another_term_has_changed() -> None:
    run = Run()
    with run.guard:
        run.added = 5.0
        assert loss_function_changed(run.snapshots)


def test_comparison_evaluates_both_steps_on_both_weights() -> None:
    run = Run()
    with run.guard:
        step = run.snapshots.kept.at(11)
        assert step is not None
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.mul_(-50.0)
        found = compare_with_best(run.guard._context, run.snapshots, step.step)
        assert found is not None and found.step in (4, 8)
        assert found.again == found.then
        assert found.now > 2 * found.then
        assert found.this_then < 2 * found.then


def test_nothing_is_compared_without_a_good_snapshot() -> None:
    run = Run()
    with run.guard:
        step = run.snapshots.kept.at(11)
        run.snapshots.ring.clear()
        assert step is not None
        assert compare_with_best(run.guard._context, run.snapshots, step.step) is None
        assert not loss_function_changed(run.snapshots)
