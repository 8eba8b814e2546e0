"""A disk that is slower than the schedule of checkpoints costs checkpoints, never snapshots."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scenes import Scene, batches, plain_net, quiet
from stepguard import Guard
from stepguard.checkpoints import Background


def test_snapshot_that_is_being_written_is_given_back_after_others_were_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    busy = [False]

    def offer_job(self: Background, step: int, job: object) -> bool:
        if busy[0]:
            return False
        busy[0] = True
        written.append(step)
        return True

    monkeypatch.setattr(Background, "offer_job", offer_job)
    monkeypatch.setattr(Background, "idle", lambda self: not busy[0])
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    config = quiet(run_dir=tmp_path, checkpoint_every=4, probation=2, snapshot_every=4)
    with Guard(model, optimizer, config=config) as guard:
        scene = Scene(model, optimizer)
        for number, batch in enumerate(batches(60)):
            if number % 20 == 0:
                busy[0] = False
            guard.step(scene.loss_fn, batch)
        ring = guard._rewinder.snapshots.ring.snapshots
    assert len(written) == 3
    assert sum(snapshot.lent for snapshot in ring) <= 1
    assert max(snapshot.step for snapshot in ring) >= 52
