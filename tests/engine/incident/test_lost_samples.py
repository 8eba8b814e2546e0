"""From "sample 2" to the row of the data set: named in the incident, written to the ledger,
honoured after a resume.
"""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import stepguard
from scenes import quiet
from stepguard import Guard, GuardConfig, Policy
from stepguard.engine.incident.samples import known_bad, skip_lost_batches
from stepguard.journal import read_run
from stepguard.ledger import Ledger, ledger_path
from stepguard.records.checks import BadSamples
from stepguard.report import phrases

ROWS, BATCH = 48, 8


class Rows(Dataset[dict[str, Any]]):
    """Row k is fixed; the bad ones hold a NaN."""

    def __init__(self, bad: tuple[int, ...]) -> None:
        source = torch.Generator().manual_seed(3)
        self.x = torch.randn(ROWS, 4, generator=source)
        self.y = self.x.sum(1, keepdim=True)
        for row in bad:
            self.x[row, 1] = math.nan

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "y": self.y[index], "file": f"images/{index}.png"}


class Stream(IterableDataset[dict[str, Any]]):
    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from (self.rows[i] for i in range(ROWS))


def loader(*bad: int, shuffle: bool = True) -> DataLoader[Any]:
    return DataLoader(Rows(bad), BATCH, shuffle=shuffle)


def config(folder: Path | None, **settings: Any) -> GuardConfig:
    return quiet(
        **{"run_dir": folder, "locate": True, "snapshot_every": 4, "probation": 4, **settings}
    )


def built(
    data: Any, settings: GuardConfig, make: Callable[..., Guard] = Guard
) -> tuple[Guard, Callable[[Any], Tensor]]:
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    guard = make(model, torch.optim.SGD(model.parameters(), lr=0.01), loader=data, config=settings)
    return guard, lambda batch: (model(batch["x"]) - batch["y"]).pow(2).mean()


def train(
    guard: Guard,
    loss_fn: Callable[[Any], Tensor],
    prepare: Callable[[Any], Any] = lambda batch: [batch],
) -> None:
    for batch in guard.loader:
        guard.step(loss_fn, *prepare(batch))


def moved(batch: Any) -> list[Any]:
    """What a loop does that moves its batch to a device: other tensors, the same rows."""
    return [{"x": batch["x"].clone(), "y": batch["y"].clone()}]


def halves(batch: Any) -> list[Any]:
    return [{"x": batch["x"][rows], "y": batch["y"][rows]} for rows in (slice(0, 4), slice(4, 8))]


def moved_halves(batch: Any) -> list[Any]:
    return [{key: tensor.clone() for key, tensor in half.items()} for half in halves(batch)]


LOOPS = {
    "as delivered": lambda b: [b],
    "moved": moved,
    "halves": halves,
    "moved halves": moved_halves,
}


@pytest.mark.parametrize("loop", LOOPS)
def test_sample_is_named_by_its_row_of_the_data_set(loop: str, tmp_path: Path) -> None:
    guard, loss_fn = built(loader(17), config(tmp_path))
    with guard:
        train(guard, loss_fn, LOOPS[loop])
        (incident,) = guard.incidents
    assert incident.origin is not None and incident.origin.rows == ("row 17",)
    assert phrases.culprits(incident.origin).startswith(
        f"sample {incident.origin.samples[0]} = row 17 of the data set"
    )
    (entry,) = known_bad(tmp_path)
    assert (entry.indices, entry.samples) == ((17,), incident.origin.samples)
    assert (entry.left_out, entry.count, entry.of, entry.cause) == ("sample", 1, BATCH, "SG101")
    assert (entry.epoch, entry.batch, entry.step, entry.incident) == (
        0,
        incident.step,
        incident.step,
        incident.id,
    )


def test_every_proven_sample_has_its_own_row(tmp_path: Path) -> None:
    guard, loss_fn = built(loader(8, 13, shuffle=False), config(tmp_path))
    with guard:
        train(guard, loss_fn)
    (entry,) = known_bad(tmp_path)
    assert (entry.samples, entry.indices, entry.batch) == ((0, 5), (8, 13), 1)


def test_id_key_names_the_sample_also_without_a_loader(tmp_path: Path) -> None:
    guard, loss_fn = built(None, config(tmp_path, id_key="file"))
    with guard:
        for batch in loader(17):
            guard.step(loss_fn, batch)
        (incident,) = guard.incidents
    # the row is learned from the DataLoader; which pass and batch it is, only from a loader given
    assert incident.origin is not None and incident.origin.rows == ("row 17 (id images/17.png)",)
    (entry,) = known_bad(tmp_path)
    assert (entry.ids, entry.indices) == (("images/17.png",), (17,))
    assert (entry.epoch, entry.batch) == (None, None)


def test_row_and_id_are_both_told(tmp_path: Path) -> None:
    guard, loss_fn = built(loader(17), config(tmp_path, id_key="file"))
    with guard:
        train(guard, loss_fn)
        (incident,) = guard.incidents
    assert incident.origin is not None and incident.origin.rows == ("row 17 (id images/17.png)",)


def test_data_without_indices_has_its_batch_and_nothing_invented(tmp_path: Path) -> None:
    guard, loss_fn = built(DataLoader(Stream(Rows((17,))), BATCH), config(tmp_path))
    with guard:
        train(guard, loss_fn)
        (incident,) = guard.incidents
    (entry,) = known_bad(tmp_path)
    assert (entry.indices, entry.batch, entry.samples) == (None, 2, (1,))
    assert incident.origin is not None and incident.origin.rows == ()


def test_whole_step_lost_lists_all_of_its_rows(tmp_path: Path) -> None:
    guard, loss_fn = built(loader(*range(8, 16), shuffle=False), config(tmp_path))
    with guard:
        train(guard, loss_fn)
    (entry,) = known_bad(tmp_path)
    assert (entry.left_out, entry.count, entry.of, entry.samples) == ("step", BATCH, BATCH, ())
    assert entry.indices == tuple(range(8, 16))


def test_micro_batch_left_out_is_the_only_one_on_record(tmp_path: Path) -> None:
    guard, loss_fn = built(loader(*range(12, 16), shuffle=False), config(tmp_path))
    with guard:
        train(guard, loss_fn, halves)
    (entry,) = known_bad(tmp_path)
    assert (entry.left_out, entry.micro_batch, entry.count, entry.of) == ("micro_batch", 1, 4, 8)
    assert entry.indices == (12, 13, 14, 15)


def test_innocent_micro_batches_that_go_with_the_step_are_marked(tmp_path: Path) -> None:
    policy = Policy(actions=("skip", "stop"))
    guard, loss_fn = built(loader(13, shuffle=False), config(tmp_path, policy=policy))
    with guard:
        train(guard, loss_fn, halves)
    first, second = known_bad(tmp_path)
    assert (first.innocent, first.indices, first.left_out) == (True, (8, 9, 10, 11), "step")
    assert (second.innocent, second.indices, second.samples) == (False, (13,), (1,))
    assert first.count + second.count == first.of == 8


@pytest.mark.parametrize("make", [Guard, stepguard.watch], ids=["step", "watch"])
def test_watched_loop_has_its_losses_on_record_too(
    make: Callable[..., Guard], tmp_path: Path
) -> None:
    guard, loss_fn = built(loader(17, shuffle=False), config(tmp_path), make)
    with guard:
        for batch in guard.loader:
            if make is Guard:
                guard.step(loss_fn, batch)
                continue
            guard.optimizer.zero_grad()
            loss_fn(batch).backward()
            guard.optimizer.step()
    (entry,) = known_bad(tmp_path)
    assert entry.batch == 2 and entry.indices is not None and 17 in entry.indices


def test_healthy_run_and_run_without_a_folder_leave_no_ledger(tmp_path: Path) -> None:
    for data, folder in ((loader(), tmp_path), (loader(17), None)):
        guard, loss_fn = built(data, config(folder))
        with guard:
            train(guard, loss_fn)
    assert not ledger_path(tmp_path).exists()


def test_full_disk_costs_the_ledger_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Ledger, entry: BadSamples) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Ledger, "append", full)
    guard, loss_fn = built(loader(3, 17, 30, shuffle=False), config(tmp_path))
    with guard:
        train(guard, loss_fn)
        assert guard.armed and len(guard.incidents) == 3
        assert all(torch.isfinite(p).all() for p in guard.model.parameters())
    said = [note["summary"] for note in read_run(tmp_path).notes if note.get("kind") == "ledger"]
    assert len(said) == 1 and "No space left on device" in said[0]


def shard(
    *, restarts: bool, folder: Path, data: Any, clean: bool = False
) -> tuple[list[Any], list[str], int]:
    """A run that goes on from its first checkpoint; what it saw, what was said of the loader, its
    incidents.
    """
    guard, loss_fn = built(data, config(folder, policy=Policy(actions=("skip", "stop"))))
    seen = []
    with guard:
        if restarts:
            guard.restore()
        for batch in guard.loader:
            seen.append(batch["file"][0])
            guard.step(loss_fn, batch)
            if guard.steps == 1 and not restarts:
                assert guard.save() is not None
        incidents = len(guard.incidents)
    said = [
        n["summary"] for n in read_run(folder).notes if "skipping batch" in str(n.get("summary"))
    ]
    return seen, said, incidents


BAD_SHARD = tuple(range(16, 32))


def test_bad_shard_is_passed_over_after_a_restart(tmp_path: Path) -> None:
    assert shard(restarts=False, folder=tmp_path, data=loader(*BAD_SHARD, shuffle=False))[2] == 2
    seen, said, incidents = shard(
        restarts=True, folder=tmp_path, data=loader(*BAD_SHARD, shuffle=False)
    )
    assert seen == ["images/8.png", "images/32.png", "images/40.png"] and incidents == 0
    assert said == ["skipping batches 2-3 of pass 0: dropped before as SG101"]


def test_batch_that_holds_other_rows_now_is_delivered(tmp_path: Path) -> None:
    shard(restarts=False, folder=tmp_path, data=loader(*BAD_SHARD, shuffle=False))
    order = [*range(8), *range(32, 48), *range(8, 32)]
    other = DataLoader(Rows(BAD_SHARD), BATCH, sampler=order)
    seen, said, incidents = shard(restarts=True, folder=tmp_path, data=other)
    assert len(seen) == 5 and incidents == 2 and said == []


def test_batch_with_one_bad_row_is_delivered_again_and_the_row_left_out_again(
    tmp_path: Path,
) -> None:
    for restarts in (False, True):
        guard, loss_fn = built(loader(17, shuffle=False), config(tmp_path))
        with guard:
            if restarts:
                guard.restore()
            for batch in guard.loader:
                guard.step(loss_fn, batch)
                if guard.steps == 1 and not restarts:
                    guard.save()
            assert len(guard.incidents) == 1
    assert [(e.attempt, e.indices) for e in known_bad(tmp_path)] == [(1, (17,)), (2, (17,))]


def test_ledger_of_another_run_is_not_honoured(tmp_path: Path) -> None:
    shard(restarts=False, folder=tmp_path, data=loader(*BAD_SHARD, shuffle=False))
    path = ledger_path(tmp_path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(line["run"] for line in lines)
    path.write_text("".join(json.dumps({**line, "run": "another"}) + "\n" for line in lines))
    assert (
        len(shard(restarts=True, folder=tmp_path, data=loader(*BAD_SHARD, shuffle=False))[0]) == 5
    )


def test_what_the_weights_or_the_scale_did_is_not_held_against_the_batch(tmp_path: Path) -> None:
    shard(restarts=False, folder=tmp_path, data=loader(*BAD_SHARD, shuffle=False))
    path = ledger_path(tmp_path)
    path.write_text(path.read_text().replace("SG101", "SG505"))
    assert (
        len(shard(restarts=True, folder=tmp_path, data=loader(*BAD_SHARD, shuffle=False))[0]) == 5
    )


def test_ledger_that_cannot_be_read_stops_no_restore(tmp_path: Path) -> None:
    shard(restarts=False, folder=tmp_path, data=loader(*BAD_SHARD, shuffle=False))
    ledger_path(tmp_path).write_text('{"v":99}\n')
    assert (
        len(shard(restarts=True, folder=tmp_path, data=loader(*BAD_SHARD, shuffle=False))[0]) == 5
    )


class TwoRanks:
    """The other rank has only batch 2 on record."""

    size, rank = 2, 0

    def together(
        self, tell: Callable[[], dict[str, Any]], what: str, *, seconds: float
    ) -> list[dict[str, Any]]:
        return [tell(), {"lost": [[1, 2, 0, 2]]}]


def test_ranks_pass_over_only_what_all_of_them_have_on_record(tmp_path: Path) -> None:
    guard, _ = built(loader(shuffle=False), config(tmp_path))
    with guard:
        ledger = Ledger(tmp_path)
        for epoch, number in ((0, 2), (0, 3), (1, 2)):
            ledger.append(
                BadSamples(step=number, epoch=epoch, batch=number, cause="SG101", indices=(99,))
            )
        alone, guard._context.agreement = guard._context.agreement, TwoRanks()  # type: ignore[assignment]
        skip_lost_batches(guard._context)
        guard._context.agreement = alone
        assert [batch["file"][0] for batch in guard.loader] == [
            f"images/{n}.png" for n in (0, 8, 24, 32, 40)
        ]
